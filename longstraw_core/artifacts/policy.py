"""Moves a policy's `current` pointer by compare-and-swap, from a checkpoint to a child of it and nowhere else.

Two runs that start from the same checkpoint both finish, but only the first moves the pointer; the other is told so
and keeps its checkpoint under its digest.
"""

from pydantic import ValidationError

from longstraw_core.artifacts.store import POLICY_PREFIX, Store, check_pointer_name
from longstraw_core.artifacts.trees import first_complaint
from longstraw_core.spec.canonical import canonical_json, parse_canonical_json
from longstraw_core.spec.descriptors import Descriptor
from longstraw_core.spec.errors import IntegrityError, Retryable, SpecError
from longstraw_core.spec.policy import PolicyPointer
from longstraw_core.spec.receipts import CheckpointManifest

_ATTEMPTS = 5


class PolicyMoved(SpecError):
    """The policy is not where this run started from; the run's checkpoint is kept, but it is not the current one."""

    def __init__(self, policy: str, current: PolicyPointer, parent: Descriptor | None, lost: Descriptor | None) -> None:
        started = "a fresh adapter" if parent is None else f"checkpoint {parent.digest}"
        kept = "" if lost is None else f" This run's checkpoint {lost.digest} stays stored as {lost.uri}."
        following = canonical_json(current.checkpoint).decode("utf-8")
        super().__init__(
            f"policy {policy!r} is at checkpoint {current.checkpoint.digest} (run {current.run}, transaction "
            f"{current.transaction}), but this run starts from {started}: another run moved it first.{kept} Start a "
            f"new run from the current one with --parent-checkpoint '{following}', or leave storage.policy out"
        )
        self.current = current


def policy_name(policy: str) -> str:
    """Object name of a policy's pointer."""
    return check_pointer_name(f"{POLICY_PREFIX}{policy}/current.json")


def parse_pointer(content: bytes, *, name: str) -> PolicyPointer:
    """Read a pointer's bytes; raises IntegrityError when they are anything else, or belong to another policy."""
    value = parse_canonical_json(content, name=name)
    try:
        pointer = PolicyPointer.model_validate(value)
    except ValidationError as error:
        raise IntegrityError(f"{name} is not a policy pointer: {first_complaint(error)}") from error
    if policy_name(pointer.policy) != name:
        raise IntegrityError(f"{name} says that it is the pointer of policy {pointer.policy!r}; do not use it")
    return pointer


def read_policy(store: Store, policy: str) -> PolicyPointer | None:
    """Where a policy stands; None when nothing ever moved it."""
    name = policy_name(policy)
    stored = store.read_pointer(name)
    return None if stored is None else parse_pointer(stored.content, name=name)


def check_policy_parent(store: Store, policy: str, parent: Descriptor | None) -> None:
    """Raise PolicyMoved if a run that starts from `parent` could not move the policy; costs one request."""
    current = read_policy(store, policy)
    if current is not None and current.checkpoint != parent:
        raise PolicyMoved(policy, current, parent, None)


def advance_policy(store: Store, policy: str, checkpoint: Descriptor, manifest: CheckpointManifest) -> PolicyPointer:
    """Move a policy to a checkpoint from that checkpoint's parent; doing it again changes nothing.

    A stage that was killed after it moved the pointer does it again, perhaps when the policy is already further on.
    Returns where the policy stands. A policy without a pointer takes any checkpoint: nobody else has moved it.

    Raises:
        PolicyMoved: it stands elsewhere than at the parent.
        Retryable: other writers keep changing it.
    """
    name = policy_name(policy)
    wanted = PolicyPointer(
        policy=policy,
        checkpoint=checkpoint,
        lineage=manifest.lineage,
        run=manifest.run,
        transaction=manifest.transaction,
    )
    for _ in range(_ATTEMPTS):
        stored = store.read_pointer(name)
        if stored is not None:
            current = parse_pointer(stored.content, name=name)
            if current == wanted or _came_through(store, current, checkpoint, manifest.lineage):
                return current
            if current.checkpoint != manifest.parent:
                raise PolicyMoved(policy, current, manifest.parent, checkpoint)
        if store.replace_pointer(name, canonical_json(wanted), stored):
            return wanted
    raise Retryable(f"{store.uri}/{name} keeps changing while it is moved; run again")


def _came_through(store: Store, current: PolicyPointer, checkpoint: Descriptor, lineage: int) -> bool:
    """Whether a policy stood at a checkpoint of this lineage before: follows the parents back to it."""
    ancestor = current.checkpoint
    for _ in range(current.lineage - lineage):
        content = store.get_bytes(ancestor)
        try:
            manifest = CheckpointManifest.model_validate(parse_canonical_json(content, name=ancestor.uri))
        except ValidationError as error:
            raise IntegrityError(f"{ancestor.uri} is not a checkpoint manifest: {first_complaint(error)}") from error
        if manifest.parent is None:
            return False
        ancestor = manifest.parent
    return ancestor == checkpoint
