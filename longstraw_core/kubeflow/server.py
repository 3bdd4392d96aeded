"""A typed face of KFP's API server (v2beta1): the few calls that submitting and watching need, errors as ours.

The generated client `kfp_server_api` does the HTTP; `kfp.Client` is not used because it prints to standard output and
keeps settings in the user's home directory.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from longstraw_core.cluster.spoken import spoken
from longstraw_core.kubeflow.run_state import RunView, checked_run_id, run_view
from longstraw_core.spec.errors import Retryable, SpecError

Answer = TypeVar("Answer")

TIMEOUT_SECONDS = (10, 60)
"""Longest time to connect, and between two bytes of an answer."""

_EQUALS = "EQUALS"


@dataclass(frozen=True)
class ServerAddress:
    """Where KFP's API server is, and how we prove who we are."""

    endpoint: str
    """`http(s)://host[:port][/prefix]`, what the UI has before `/#/`."""
    namespace: str | None = None
    """Profile of a multi-user installation; ignored by a single-user one."""
    token: str | None = None
    token_file: Path | None = None
    """Read again before every request: projected service-account tokens are replaced every hour."""
    certificate_authority: Path | None = None


class KubeflowServer:
    """One API server."""

    def __init__(self, address: ServerAddress) -> None:
        """Connect lazily.

        Raises:
            SpecError: the endpoint is no URL, or a file that the address names cannot be read.
        """
        endpoint = re.sub(r"/*(#/.*)?$", "", address.endpoint)
        if re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", endpoint) is None:
            raise SpecError(f"--endpoint {address.endpoint!r}: must be http(s)://host[:port], as in the browser")
        self.endpoint, self._address = endpoint, address
        self._api = _generated_api()
        configuration = self._api.Configuration(host=endpoint)
        if address.certificate_authority is not None:
            if not address.certificate_authority.is_file():
                raise SpecError(f"--ca-file: {address.certificate_authority} is not a file")
            configuration.ssl_ca_cert = str(address.certificate_authority)
        if address.token_file is not None:
            configuration.refresh_api_key_hook = _token_reader(address.token_file)
        if address.token or address.token_file:
            configuration.api_key_prefix["authorization"] = "Bearer"
            configuration.api_key["authorization"] = _one_token(address.token or "", "KFP_EXISTING_TOKEN")
        client = self._api.ApiClient(configuration)
        self._client = client
        self._pipelines = self._api.PipelineServiceApi(client)
        self._uploads = self._api.PipelineUploadServiceApi(client)
        self._runs, self._experiments = self._api.RunServiceApi(client), self._api.ExperimentServiceApi(client)
        self._health = self._api.HealthzServiceApi(client)
        self._multi_user: bool | None = None

    @property
    def namespace(self) -> str | None:
        """The namespace to send: none to a single-user installation.

        Raises:
            SpecError: the installation is multi-user and no namespace is known.
        """
        if self._multi_user is None:
            answer = self._call("asking for its health", self._health.healthz_service_get_healthz)
            self._multi_user = bool(answer.multi_user)
        if not self._multi_user:
            return None
        if self._address.namespace is None:
            raise SpecError(f"{self.endpoint} is a multi-user installation: name your profile with -n/--namespace")
        return self._address.namespace

    def version(self) -> str | None:
        """The server's release, for instance `2.17.0`; None where it does not say.

        Only the health answer of API v1beta1 has it.
        """

        def ask(*, _request_timeout: tuple[int, int]) -> Any:
            return self._client.call_api(
                "/apis/v1beta1/healthz",
                "GET",
                header_params={"Accept": "application/json"},
                response_type="object",
                auth_settings=["Bearer"],
                _return_http_data_only=True,
                _request_timeout=_request_timeout,
            )

        answer = self._call("asking for its version", ask)
        version = answer.get("tag_name") if isinstance(answer, dict) else None
        return str(version) if version else None

    def experiment_id(self, name: str) -> str:
        """Return the id of an experiment; create it where there is none."""
        namespace = self.namespace

        def find() -> str | None:
            answer = self._call(
                f"looking for experiment {name}",
                self._experiments.experiment_service_list_experiments,
                filter=_named(name),
                **({} if namespace is None else {"namespace": namespace}),
            )
            return next((item.experiment_id for item in answer.experiments or ()), None)

        def create() -> str:
            body = self._api.V2beta1Experiment(display_name=name, namespace=namespace)
            return self._call(
                f"creating experiment {name}",
                self._experiments.experiment_service_create_experiment,
                experiment=body,
            ).experiment_id

        return _get_or_create(find, create)

    def pipeline_id(self, name: str) -> str:
        """Return the id of a pipeline; create it, without a version, where there is none."""
        namespace = self.namespace

        def find() -> str | None:
            answer = self._call(
                f"looking for pipeline {name}",
                self._pipelines.pipeline_service_list_pipelines,
                filter=_named(name),
                **({} if namespace is None else {"namespace": namespace}),
            )
            return next((item.pipeline_id for item in answer.pipelines or ()), None)

        def create() -> str:
            body = self._api.V2beta1Pipeline(display_name=name, namespace=namespace)
            return self._call(
                f"creating pipeline {name}", self._pipelines.pipeline_service_create_pipeline, pipeline=body
            ).pipeline_id

        return _get_or_create(find, create)

    def version_id(self, pipeline_id: str, name: str, package: Path) -> tuple[str, bool]:
        """Return (id of the version called `name`, whether it was uploaded now from the file `package`)."""
        uploaded = False

        def find() -> str | None:
            answer = self._call(
                f"looking for version {name}",
                self._pipelines.pipeline_service_list_pipeline_versions,
                pipeline_id,
                filter=_named(name),
            )
            return next((item.pipeline_version_id for item in answer.pipeline_versions or ()), None)

        def create() -> str:
            nonlocal uploaded
            answer = self._call(
                f"uploading version {name}",
                self._uploads.upload_pipeline_version,
                str(package),
                name=name,
                pipelineid=pipeline_id,
            )
            uploaded = True
            return answer.pipeline_version_id

        return _get_or_create(find, create), uploaded

    def create_run(
        self,
        *,
        experiment_id: str,
        name: str,
        pipeline_id: str,
        version_id: str,
        parameters: dict[str, Any],
        pipeline_root: str | None,
        service_account: str | None,
    ) -> RunView:
        """Start a run of a version.

        Raises:
            SpecError: the server refuses a parameter or a name; its own words say which.
            Retryable: no answer; KFP has no way to ask again without perhaps starting a second run.
        """
        body = self._api.V2beta1Run(
            display_name=name,
            experiment_id=experiment_id,
            pipeline_version_reference=self._api.V2beta1PipelineVersionReference(
                pipeline_id=pipeline_id, pipeline_version_id=version_id
            ),
            runtime_config=self._api.V2beta1RuntimeConfig(parameters=parameters, pipeline_root=pipeline_root),
            service_account=service_account,
        )
        try:
            return run_view(self._call(f"creating run {name}", self._runs.run_service_create_run, run=body))
        except Retryable as error:
            raise Retryable(f"{error}; it may have started: look at {self.endpoint}/#/runs first") from error

    def run(self, run_id: str) -> RunView:
        """Return what the server knows of a run.

        Raises:
            SpecError: there is none, or no run can have this id.
            Retryable: no answer.
        """
        known = checked_run_id(run_id)
        return run_view(self._call(f"reading run {known}", self._runs.run_service_get_run, known))

    def terminate(self, run_id: str) -> None:
        """Ask for the end of a run; nothing happens to one that has ended."""
        self._call(f"cancelling run {run_id}", self._runs.run_service_terminate_run, run_id)

    def url(self, run_id: str) -> str:
        """Where the UI shows a run."""
        return f"{self.endpoint}/#/runs/details/{run_id}"

    def _call(self, doing: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call the generated client and turn what it raises into one line."""
        from urllib3.exceptions import HTTPError, LocationValueError

        try:
            return function(*arguments, _request_timeout=TIMEOUT_SECONDS, **named)
        except self._api.ApiException as error:
            raise self._refusal(doing, error) from error
        except LocationValueError as error:  # the host or port is none: asking again does not help
            raise SpecError(f"--endpoint {self.endpoint!r}: {_one_line(str(error))}") from error
        except HTTPError as error:
            reason = getattr(error, "reason", None) or error
            raise Retryable(f"{self.endpoint}: {doing}: {_one_line(str(reason))}") from error
        except ValueError as error:  # the generated models refuse what is not the API: a login page, another service
            raise SpecError(f"{self.endpoint}: {doing}: the answer is not KFP's: {spoken(error)}") from error

    def _refusal(self, doing: str, error: Any) -> SpecError | Retryable:
        status, where = int(error.status or 0), f"{self.endpoint}: {doing}"
        words = _server_words(error)
        if status in (401, 403):
            return SpecError(f"{where}: {status}, not allowed{words}; set KFP_EXISTING_TOKEN or --token-file")
        if status == 409:
            return _AlreadyExists(f"{where}: it exists already{words}")
        if status == 404:
            return SpecError(f"{where}: not found{words}")
        if status == 0 or status == 429 or status >= 500:
            return Retryable(f"{where}: status {status}{words}")
        return SpecError(f"{where}: refused with {status}{words}")


class _AlreadyExists(SpecError):
    """Somebody else created it between our looking and our creating."""


def _get_or_create(find: Callable[[], Answer | None], create: Callable[[], Answer]) -> Answer:
    found = find()
    if found is not None:
        return found
    try:
        return create()
    except _AlreadyExists:
        found = find()
        if found is None:
            raise
        return found


def _generated_api() -> Any:
    import kfp_server_api

    return kfp_server_api


def _named(name: str) -> str:
    """KFP's filter for things with one display name."""
    return json.dumps({"predicates": [{"operation": _EQUALS, "key": "display_name", "stringValue": name}]})


def _token_reader(path: Path) -> Callable[[Any], None]:
    """Return the client's hook that reads the token again; refuse a file without one at once."""
    _read_token(path)

    def refresh(configuration: Any) -> None:
        configuration.api_key["authorization"] = _read_token(path)

    return refresh


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"--token-file: {path}: cannot be read: {error}") from error
    if not token.strip():
        raise SpecError(f"--token-file: {path}: is empty")
    return _one_token(token, f"--token-file: {path}")


def _one_token(text: str, source: str) -> str:
    """Return the token without the white space around it; what no header can carry is refused without quoting it."""
    token = text.strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise SpecError(f"{source}: does not hold one token: it must be one line of ASCII without spaces")
    return token


def _server_words(error: Any) -> str:
    """`: what the server says`, or nothing."""
    try:
        body = json.loads(error.body or "{}")
        words = str(body.get("error_message") or body.get("message") or body.get("error") or "")
    except (ValueError, AttributeError):
        words = str(error.reason or "")
    return f": {_one_line(words)}" if words else ""


def _one_line(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 500 else flat[:497] + "..."
