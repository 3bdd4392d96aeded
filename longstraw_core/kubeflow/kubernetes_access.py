"""A connection to the Kubernetes API: from a kubeconfig, or from inside a pod."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longstraw_core.cluster.spoken import spoken
from longstraw_core.spec.errors import Retryable, SpecError

DEFAULT_NAMESPACE = "kubeflow"
_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

TIMEOUT_SECONDS = (10, 30)
"""Longest time to connect, and between two bytes of an answer."""


@dataclass(frozen=True)
class KubernetesAccess:
    """An API client, and the namespace that its configuration names."""

    client: Any
    namespace: str
    server: str


def open_kubernetes(kubeconfig: Path | None, context: str | None, namespace: str | None) -> KubernetesAccess:
    """Return a connection; nothing is asked yet.

    Args:
        kubeconfig: The file; None means KUBECONFIG or ~/.kube/config, or the pod's own account inside a pod.
        context: Name of a context of the file; None means its current one.
        namespace: Overrides what the configuration names.

    Raises:
        SpecError: no usable configuration.
    """
    from kubernetes import client, config
    from kubernetes.config.config_exception import ConfigException
    from yaml import YAMLError

    settings: Any = client.Configuration()
    found: str | None = None
    try:
        if kubeconfig is None and context is None and _POD_NAMESPACE.exists():
            config.load_incluster_config(client_configuration=settings)
            found = _POD_NAMESPACE.read_text(encoding="utf-8").strip()
        else:
            file = None if kubeconfig is None else str(kubeconfig)
            config.load_kube_config(config_file=file, context=context, client_configuration=settings)
            contexts: Any
            current: Any
            contexts, current = config.list_kube_config_contexts(config_file=file)
            chosen = next((item for item in contexts if item["name"] == context), current)
            found = chosen["context"].get("namespace")
    except (ConfigException, OSError, TypeError, ValueError, YAMLError) as error:
        raise SpecError(f"no connection to Kubernetes: {' '.join(str(error).split())}; name a --kubeconfig") from error
    return KubernetesAccess(client.ApiClient(settings), namespace or found or DEFAULT_NAMESPACE, str(settings.host))


class NotAllowed(SpecError):
    """The API server answers 403."""


class NotThere(SpecError):
    """The API server answers 404."""


_BY_STATUS = {403: NotAllowed, 404: NotThere}


@contextmanager
def kubernetes_errors(server: str, doing: str) -> Iterator[None]:
    """Turn what the generated client raises into one line."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        words = f"{server}: {doing}: {error.status} {error.reason}"
        if error.status in (0, 429) or (error.status or 0) >= 500:
            raise Retryable(words) from error
        raise _BY_STATUS.get(error.status or 0, SpecError)(words) from error
    except HTTPError as error:
        raise Retryable(f"{server}: {doing}: {spoken(getattr(error, 'reason', error))}") from error
    except ValueError as error:
        raise SpecError(f"{server}: {doing}: {spoken(error)}") from error
