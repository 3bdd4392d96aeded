"""The one list of Kubernetes verbs that the launcher and `longstraw cleanup` and `logs` use, in one namespace."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Permission:
    """One verb on one resource."""

    group: str
    """API group; empty for the core group."""
    resource: str
    """Plural name, with a subresource after a slash."""
    verb: str
    why: str
    optional: bool = False
    """Without it a message says less and nothing else changes."""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''}"


PERMISSIONS: tuple[Permission, ...] = (
    Permission("batch", "jobs", "create", "start the pods of a stage"),
    Permission("batch", "jobs", "get", "adopt or replace what an earlier attempt left"),
    Permission("batch", "jobs", "list", "begin watching"),
    Permission("batch", "jobs", "watch", "learn that a stage completed or failed"),
    Permission("batch", "jobs", "patch", "make the adopting launcher the owner"),
    Permission("batch", "jobs", "delete", "give the nodes back"),
    Permission("", "services", "create", "give the pods names"),
    Permission("", "services", "get", "adopt or replace what an earlier attempt left"),
    Permission("", "services", "patch", "tie the Service to its Job"),
    Permission("", "services", "delete", "remove the names"),
    Permission("", "pods", "get", "see whether another launcher still lives"),
    Permission("", "pods", "list", "begin watching"),
    Permission("", "pods", "watch", "check image digests, see crashes and evictions"),
    Permission("", "pods/log", "get", "show the log of rank 0 and of failing pods"),
    Permission("", "events", "list", "say which quota keeps pods from being created", optional=True),
)


def role_rules() -> list[dict[str, Any]]:
    """The list as the `rules` of a Kubernetes Role, one rule per resource."""
    verbs: dict[tuple[str, str], list[str]] = {}
    for permission in PERMISSIONS:
        verbs.setdefault((permission.group, permission.resource), []).append(permission.verb)
    return [
        {"apiGroups": [group], "resources": [resource], "verbs": sorted(names)}
        for (group, resource), names in verbs.items()
    ]
