"""Follows descriptors to everything they stand for: blobs, files of trees, checkpoints and all their parents."""

from dataclasses import dataclass, field

from pydantic import ValidationError

from longstraw_core.artifacts.receipts import ReceiptPlace
from longstraw_core.artifacts.store import blob_name
from longstraw_core.artifacts.trees import first_complaint, parse_manifest
from longstraw_core.artifacts.verification.reader import ObjectReader
from longstraw_core.artifacts.verification.receipts import ReceiptReader
from longstraw_core.spec.canonical import parse_canonical_json
from longstraw_core.spec.descriptors import MEDIA_TYPE_CHECKPOINT, MEDIA_TYPE_TREE, Descriptor, TreeManifest
from longstraw_core.spec.errors import IntegrityError
from longstraw_core.spec.policy import PolicyPointer
from longstraw_core.spec.receipts import CheckpointManifest


@dataclass(slots=True)
class Reach:
    """What receipts and pointers lead to, and what contradicts itself on the way."""

    reader: ObjectReader
    receipts: ReceiptReader
    blobs: dict[str, tuple[Descriptor, str]] = field(default_factory=dict[str, tuple[Descriptor, str]])
    """Blob name -> the descriptor that leads to it, and who wrote that descriptor."""
    visited: set[str] = field(default_factory=set[str])
    """Digests of manifests already followed."""
    parents: list[tuple[Descriptor, str]] = field(default_factory=list[tuple[Descriptor, str]])
    """Parent checkpoints still to follow; a list and not a recursion, because chains are as long as training."""
    transactions: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    """Run and transaction of every checkpoint that was reached: each says that it happened."""

    def add(self, descriptor: Descriptor, origin: str) -> None:
        """Note a blob and who names it."""
        name = blob_name(descriptor.digest)
        earlier, named_by = self.blobs.setdefault(name, (descriptor, origin))
        if earlier.size != descriptor.size:
            message = f"{origin} and {named_by} give different sizes for {name}"
            path = origin.partition(" ")[0]
            self.reader.fault("chain", path, f"{earlier.size} bytes", f"{descriptor.size} bytes", message)

    def follow(self, descriptor: Descriptor, origin: str, place: ReceiptPlace | None) -> None:
        """Note an output's blob and, through manifests, all it stands for; `place` is the receipt that wrote it."""
        if descriptor.uri != blob_name(descriptor.digest):
            message = f"{origin}: an output is a blob of this store, named by its digest"
            path = origin.partition(" ")[0]
            self.reader.fault("malformed", path, blob_name(descriptor.digest), descriptor.uri, message)
            return
        self.add(descriptor, origin)
        if descriptor.media_type == MEDIA_TYPE_TREE:
            self._read_tree(descriptor)
        elif descriptor.media_type == MEDIA_TYPE_CHECKPOINT:
            self._read_checkpoint(descriptor, place)

    def follow_pointer(self, pointer: PolicyPointer, name: str) -> None:
        """Note where a policy stands, and check it against the checkpoint that it names."""
        self.transactions.add((pointer.run, pointer.transaction))
        self.parents.append((pointer.checkpoint, name))
        if pointer.checkpoint.media_type != MEDIA_TYPE_CHECKPOINT:
            observed = pointer.checkpoint.media_type
            self.reader.fault("malformed", name, MEDIA_TYPE_CHECKPOINT, observed, f"{name} points to no checkpoint")
            return
        manifest = self._checkpoint(pointer.checkpoint)
        if manifest is None:
            return  # reported already
        for field_name, claimed, actual in (
            ("run", pointer.run, manifest.run),
            ("transaction", str(pointer.transaction), str(manifest.transaction)),
            ("lineage", str(pointer.lineage), str(manifest.lineage)),
        ):
            if claimed != actual:
                message = f"{name}: {field_name} differs from the checkpoint that it points to"
                self.reader.fault("chain", name, actual, claimed, message)

    def follow_parents(self) -> None:
        """Follow the checkpoints that others were trained from, to the first."""
        while self.parents:
            self.follow(*self.parents.pop(), None)

    def _read_tree(self, descriptor: Descriptor) -> TreeManifest | None:
        content = self.reader.content(descriptor)
        if content is None:
            return None
        try:
            manifest = parse_manifest(content, name=descriptor.uri)
        except IntegrityError as error:
            self.reader.fault("malformed", descriptor.uri, "a tree manifest", descriptor.digest, str(error))
            return None
        if descriptor.digest not in self.visited:
            self.visited.add(descriptor.digest)
            for entry in manifest.entries:
                blob = Descriptor(uri=blob_name(entry.digest), digest=entry.digest, size=entry.size, media_type="file")
                self.add(blob, f"{descriptor.uri} file {entry.path!r}")
        return manifest

    def _read_checkpoint(self, descriptor: Descriptor, place: ReceiptPlace | None) -> None:
        """Check a checkpoint manifest; `place` is None when it was reached as a parent."""
        if place is None and descriptor.digest in self.visited:
            return
        self.visited.add(descriptor.digest)
        manifest = self._checkpoint(descriptor)
        if manifest is None:
            return
        uri = descriptor.uri
        self.transactions.add((manifest.run, manifest.transaction))
        if place is not None:
            self._check_origin(uri, manifest, place)
        self._check_files(uri, manifest)
        if manifest.model_snapshot.media_type == MEDIA_TYPE_TREE:
            self.add(manifest.model_snapshot, f"{uri} field 'model_snapshot'")
        self._check_parent(uri, manifest)

    def _check_files(self, uri: str, manifest: CheckpointManifest) -> None:
        if manifest.tree.media_type != MEDIA_TYPE_TREE:
            observed = manifest.tree.media_type
            self.reader.fault("malformed", uri, MEDIA_TYPE_TREE, observed, f"{uri}: field tree is no tree")
            return
        self.follow(manifest.tree, f"{uri} field 'tree'", None)
        tree = self._read_tree(manifest.tree)
        if tree is None:
            return  # reported already
        listed = {file.path: (file.digest, file.size) for file in manifest.files}
        stored = {entry.path: (entry.digest, entry.size) for entry in tree.entries}
        if len(listed) != len(manifest.files):
            self.reader.fault("malformed", uri, "distinct files", "duplicates", f"{uri} lists a file twice")
        for path in sorted(listed.keys() | stored.keys()):
            if listed.get(path) != stored.get(path):
                message = f"{uri}: file {path!r} differs between the checkpoint manifest and its tree"
                self.reader.fault("chain", uri, _pair(stored.get(path)), _pair(listed.get(path)), message)

    def _check_origin(self, uri: str, manifest: CheckpointManifest, place: ReceiptPlace) -> None:
        predicate = self.receipts.known[place].receipt.predicate
        for name, claimed, actual in (
            ("run", manifest.run, predicate.run),
            ("transaction", str(manifest.transaction), str(predicate.transaction)),
            ("spec_digest", manifest.spec_digest, predicate.spec_digest),
            ("gradient", manifest.gradient, predicate.gradient),
        ):
            if claimed != actual:
                message = f"{uri}: {name} differs from {place.name}, which wrote it"
                self.reader.fault("chain", uri, actual, claimed, message)
        here = (place.run, place.transaction)
        digests: dict[str, str] = {
            at.stage: known.digest for at, known in self.receipts.known.items() if (at.run, at.transaction) == here
        }
        for stage, digest in sorted(manifest.receipts.items()):
            observed = digests.get(stage, "no usable receipt")
            if observed != digest:
                message = f"{uri}: receipt of {stage} is not the one it was made from"
                self.reader.fault("chain", uri, digest, observed, message)

    def _check_parent(self, uri: str, manifest: CheckpointManifest) -> None:
        before = ReceiptPlace(manifest.run, manifest.transaction - 1, "manifest_checkpoint")
        parent = manifest.parent
        if parent is None:
            self._check_lineage(uri, manifest, 1)
            if manifest.transaction > 1:
                message = f"{uri}: transaction {manifest.transaction} must name the checkpoint before as its parent"
                self.reader.fault("chain", uri, "a parent", "none", message)
            return
        if parent.media_type != MEDIA_TYPE_CHECKPOINT:
            message = f"{uri}: parent is no checkpoint"
            self.reader.fault("malformed", uri, MEDIA_TYPE_CHECKPOINT, parent.media_type, message)
            return
        self.parents.append((parent, f"{uri} field 'parent'"))
        older = self._checkpoint(parent)
        if older is None:
            return  # reported already
        self._check_lineage(uri, manifest, older.lineage + 1)
        if older.run != manifest.run:
            return  # continued from another run
        if older.transaction != manifest.transaction - 1:
            message = f"{uri}: parent is of transaction {older.transaction}, not {manifest.transaction - 1}"
            self.reader.fault("chain", uri, str(manifest.transaction - 1), str(older.transaction), message)
        known = self.receipts.known.get(before)
        if known and parent.digest not in {output.digest for output in known.receipt.predicate.outputs.values()}:
            message = f"{uri}: parent is not what {before.name} says it wrote"
            self.reader.fault("chain", uri, "an output of it", parent.digest, message)

    def _check_lineage(self, uri: str, manifest: CheckpointManifest, expected: int) -> None:
        if manifest.lineage != expected:
            message = f"{uri}: lineage does not follow from its parent's"
            self.reader.fault("chain", uri, str(expected), str(manifest.lineage), message)

    def _checkpoint(self, descriptor: Descriptor) -> CheckpointManifest | None:
        content = self.reader.content(descriptor)
        if content is None:
            return None
        try:
            return CheckpointManifest.model_validate(parse_canonical_json(content, name=descriptor.uri))
        except (IntegrityError, ValidationError) as error:
            reason = first_complaint(error) if isinstance(error, ValidationError) else str(error)
            message = f"{descriptor.uri} is not a checkpoint manifest: {reason}"
            self.reader.fault("malformed", descriptor.uri, "a checkpoint manifest", descriptor.digest, message)
            return None


def _pair(value: tuple[str, int] | None) -> str:
    return "nothing" if value is None else f"{value[0]} ({value[1]} bytes)"
