"""How captured prompt state gets from one stage, and from one transaction, to the next, and when it is too old.

A state captured with the adapter on belongs to exactly that adapter. After an optimizer step it may be used again only
as far as `prefix.max_stale_steps` allows, and the receipt then says how many steps it is behind. A state captured with
the adapter off (always in `response_adapter` mode) does not depend on the adapter and is used again across steps.
"""

import json
from typing import TYPE_CHECKING

from longstraw_core.artifacts.store import Store, blob_name
from longstraw_core.artifacts.trees import publish_files, publish_manifest, read_manifest
from longstraw_core.spec import Descriptor, Prompt, canonical_json, sha256_digest
from longstraw_core.spec.descriptors import MEDIA_TYPE_JSON, TreeEntry, TreeManifest
from longstraw_core.stages.context import StageContext
from longstraw_core.stages.policy_inputs import POLICY_PREFIX, REFERENCE_PREFIX, PolicyInputs, needs_reference

if TYPE_CHECKING:
    from longstraw_core.resident import PrefixIdentity, PrefixState
    from longstraw_core.resident.files import PrefixManifest

STALE_FACT = "prefix"


def prefix_directory(number: int, kind: str) -> str:
    """Where a prompt's captured state lies inside the `prefix` tree."""
    return f"{number:04d}/{kind}"


def prefix_kinds(context: StageContext, inputs: PolicyInputs) -> list[str]:
    """The states every prompt has: the policy's, and the reference's where the policy's own does not serve it."""
    # In response_adapter mode the policy's own prompt is captured with the adapter off: the reference shares it.
    shared = not inputs.policy.captures_with_adapter
    return [POLICY_PREFIX] if shared or not needs_reference(context) else [POLICY_PREFIX, REFERENCE_PREFIX]


def stale_steps(
    stored: "PrefixManifest", expected: "PrefixIdentity", adapter_steps: int, *, max_stale_steps: int
) -> int | None:
    """Return by how many optimizer steps a stored state is behind, or None when it must not be used."""
    if stored.identity == expected:
        return 0
    if stored.identity.model_copy(update={"adapter_digest": expected.adapter_digest}) != expected:
        return None
    if stored.identity.adapter_digest is None or expected.adapter_digest is None:
        return None
    behind = adapter_steps - stored.adapter_steps
    return behind if 0 < behind <= max_stale_steps else None


def adapter_steps(context: StageContext) -> int:
    """Optimizer steps that the adapter of this transaction has taken."""
    parent = context.parent_manifest()
    return 0 if parent is None else parent.optimizer_steps


class PrefixWriter:
    """Collects the states of one transaction into a tree: captured, taken over, or only named."""

    def __init__(self, context: StageContext, inputs: PolicyInputs) -> None:
        self._context = context
        self._inputs = inputs
        self._root = context.scratch / "prefix"
        self._root.mkdir(exist_ok=context.joined is not None)
        self._taken: list[TreeEntry] = []
        self._steps = adapter_steps(context)
        self._earlier = _earlier_states(context) if context.spec.prefix.handoff == "store" else {}
        self.stale_steps = 0
        """The most steps that any state in the tree is behind."""
        self.taken_over = 0

    def take_over(self, number: int, kind: str, prompt: Prompt) -> bool:
        """Put a state of the transaction before into the tree if it may still be used."""
        expected = self._inputs.identity(prompt, reference=kind == REFERENCE_PREFIX)
        for manifest, entries in self._earlier.get(expected.prompt_digest, ()):
            behind = stale_steps(
                manifest, expected, self._steps, max_stale_steps=self._context.spec.prefix.max_stale_steps
            )
            if behind is None:
                continue
            for name, entry in entries.items():
                path = f"{prefix_directory(number, kind)}/{name}"
                self._taken.append(TreeEntry(path=path, digest=entry.digest, size=entry.size))
            self.stale_steps = max(self.stale_steps, behind)
            self.taken_over += 1
            return True
        return False

    def write(self, number: int, kind: str, prompt: Prompt, state: "PrefixState | None") -> None:
        """Write this rank's part of a state; None names a state that every stage captures again."""
        from longstraw_core.resident.files import PrefixManifest, write_manifest

        directory = self._root / prefix_directory(number, kind)
        ranks = self._context.ranks
        shards: list[dict[str, object]] = []
        if state is not None:
            mine = [entry.to_json_object() for entry in state.save_shards(directory)]
            shards = [entry for part in ranks.gather(json.dumps(mine).encode()) for entry in json.loads(part)]
        if self._context.leads:
            manifest = PrefixManifest(
                identity=self._inputs.identity(prompt, reference=kind == REFERENCE_PREFIX),
                adapter_steps=self._steps,
                ranks=1 if state is None else ranks.size,
                prompt_token_ids=prompt.token_ids,
                chunk_starts=tuple(self._chunk_starts(prompt)) if state is None else tuple(state.chunk_starts),
                shards=tuple(TreeEntry.model_validate(entry) for entry in shards),
            )
            write_manifest(directory, manifest)

    def _chunk_starts(self, prompt: Prompt) -> range:
        return range(0, len(prompt.token_ids) - 1, self._context.spec.layout.prompt_chunk_tokens)

    def publish(self) -> Descriptor | None:
        """Store the files of all ranks, and on rank 0 the tree; every host stores its own ranks' files."""
        ranks = self._context.ranks
        mine: list[TreeEntry] = []
        ranks.gather(b"")  # every file is written

        def store_files() -> None:
            mine.extend(publish_files(self._context.store, self._root))

        self._context.once_per_host(store_files)
        parts = ranks.gather(json.dumps([entry.to_json_object() for entry in mine]).encode())
        if not self._context.leads:
            return None
        found = [TreeEntry.model_validate(entry) for part in parts for entry in json.loads(part)]
        entries = sorted([*found, *self._taken], key=lambda entry: entry.path)
        return publish_manifest(self._context.store, TreeManifest(entries=tuple(entries)))


def _earlier_states(
    context: StageContext,
) -> dict[str, list[tuple["PrefixManifest", dict[str, TreeEntry]]]]:
    """States of the transaction before, by prompt digest: manifest and files by their names below its directory.

    None when that transaction had another specification.
    """
    from longstraw_core.resident.files import MANIFEST_NAME, parse_manifest

    receipt = context.previous_receipt("capture_prefix")
    if receipt is None or receipt.predicate.spec_digest != sha256_digest(canonical_json(context.spec)):
        return {}  # another type, page size or chunk could not be restored
    by_directory: dict[str, dict[str, TreeEntry]] = {}
    for entry in read_manifest(context.store, receipt.predicate.outputs["prefix"]).entries:
        number, kind, name = entry.path.split("/", 2)
        by_directory.setdefault(f"{number}/{kind}", {})[name] = entry
    states: dict[str, list[tuple[PrefixManifest, dict[str, TreeEntry]]]] = {}
    for directory, entries in by_directory.items():
        content = _blob(context.store, entries[MANIFEST_NAME])
        manifest = parse_manifest(content, f"{directory}/{MANIFEST_NAME}")
        if manifest.shards:
            states.setdefault(manifest.identity.prompt_digest, []).append((manifest, entries))
    return states


def _blob(store: Store, entry: TreeEntry) -> bytes:
    return store.get_bytes(
        Descriptor(uri=blob_name(entry.digest), digest=entry.digest, size=entry.size, media_type=MEDIA_TYPE_JSON)
    )


class PrefixReader:
    """Opens the states that `capture_prefix` left: restores them, or captures again where the specification says so."""

    def __init__(self, context: StageContext, inputs: PolicyInputs) -> None:
        self._context = context
        self._inputs = inputs
        self._root = context.open_tree("capture_prefix", "prefix")
        self._steps = adapter_steps(context)
        self.recaptures = context.spec.prefix.handoff == "recapture"
        self.stale_steps = 0
        """The most steps that any opened state was behind."""

    @property
    def phase(self) -> str:
        """What opening is called in the session."""
        return "capture" if self.recaptures else "restore"

    def open(self, number: int, kind: str, prompt: Prompt) -> "PrefixState":
        """Return the state of a prompt.

        Raises:
            IntegrityError: it belongs to another model, adapter, prompt or mode, or is too many steps behind.
        """
        from longstraw_core.resident.files import read_any_manifest

        expected = self._inputs.identity(prompt, reference=kind == REFERENCE_PREFIX)
        directory = self._root / prefix_directory(number, kind)
        policy = self._inputs.policy
        if self.recaptures:
            return policy.capture(prompt.token_ids, adapter=expected.adapter_digest is not None)
        stored = read_any_manifest(directory)
        behind = stale_steps(stored, expected, self._steps, max_stale_steps=self._context.spec.prefix.max_stale_steps)
        if behind:
            self.stale_steps = max(self.stale_steps, behind)
            expected = stored.identity
        return policy.load_state(directory, expected)


def stale_fact(steps: int) -> dict[str, str]:
    """What a receipt says of states that are behind; nothing when none is."""
    return {STALE_FACT: f"captured {steps} optimizer step{'s' if steps != 1 else ''} ago"} if steps else {}
