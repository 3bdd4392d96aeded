"""Re-hash a store from its receipts: every blob, chain and manifest; report every fault, not only the first."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pydantic import ValidationError

from longstraw_core.artifacts.external import check_external
from longstraw_core.artifacts.faults import Fault, FaultKind, VerifyReport
from longstraw_core.artifacts.files import FoundFile, Measured, UnsafeFile, storage_error
from longstraw_core.artifacts.policy import parse_pointer
from longstraw_core.artifacts.receipts import (
    RUNS_PREFIX,
    InputKey,
    ReceiptPlace,
    check_signature,
    envelope_name,
    parse_input_key,
    parse_statement,
    place_of,
    receipt_name,
    receipt_of_envelope,
)
from longstraw_core.artifacts.signing import read_envelope
from longstraw_core.artifacts.snapshots import SNAPSHOT_PREFIX, parse_snapshot
from longstraw_core.artifacts.store import BLOB_PREFIX, POLICY_PREFIX, Store, blob_name
from longstraw_core.artifacts.trees import first_complaint, parse_manifest
from longstraw_core.spec.canonical import parse_canonical_json, sha256_digest
from longstraw_core.spec.descriptors import (
    MEDIA_TYPE_CHECKPOINT,
    MEDIA_TYPE_TREE,
    Descriptor,
    TreeManifest,
)
from longstraw_core.spec.errors import IntegrityError, LongStrawError, SpecError
from longstraw_core.spec.receipts import CheckpointManifest, StageReceipt


def verify_store(
    store: Store,
    run: str | None = None,
    *,
    external: bool = True,
    deep: bool = False,
    measured: Mapping[str, Measured] | None = None,
) -> VerifyReport:
    """Verify every run of a store, or one, and return a report of everything that is not as published.

    Without `run` the whole store is read, including blobs that no receipt leads to, and whatever does not belong in a
    store is a fault. With `run` only that run's objects and the blobs it reaches are read.

    Args:
        store: the store to read.
        run: verify this run only.
        external: also re-hash `external:*` inputs that can be reached.
        deep: with `run`, also verify every run whose checkpoints this one was continued from.
        measured: digests that the caller computed from these very files just before, by object name.

    Raises:
        SpecError: the store holds no receipt of `run`.
    """
    walk = StoreWalk(store, dict(measured or {}))
    walk.read_receipts(run)
    if run is not None and not walk.receipts:
        if not walk.report.faults:
            raise SpecError(f"{store.uri} holds no receipt of run {run!r}; check the name")
        return walk.finish()
    if run is None:
        walk.hash_everything()
        walk.read_roots()
    walk.check_receipts(external=external)
    while deep and (ancestors := walk.ancestors_to_read()):
        for ancestor in ancestors:
            walk.read_receipts(ancestor)
        walk.check_receipts(external=external)
    walk.hash_reached(whole_store=run is None)
    return walk.finish()


MAX_RECEIPT_BYTES = 64 << 20
"""A longer receipt is read only this far, and so is malformed."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A receipt that could be read, with the digest of its bytes."""

    receipt: StageReceipt
    digest: str


@dataclass(slots=True)
class StoreWalk:
    """One walk from receipts and pointers to everything they reach, and the faults met on the way."""

    store: Store
    measured: dict[str, Measured]
    report: VerifyReport = field(default_factory=VerifyReport)
    receipts: dict[ReceiptPlace, _Known] = field(default_factory=dict[ReceiptPlace, _Known])
    reached: dict[str, tuple[Descriptor, str]] = field(default_factory=dict[str, tuple[Descriptor, str]])
    """Blob name -> the descriptor that leads to it, and who wrote that descriptor."""
    present: dict[str, Measured] = field(default_factory=dict[str, Measured])
    """Blobs that were read."""
    visited: set[str] = field(default_factory=set[str])
    """Digests of manifests already followed."""
    externals: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    parents: list[tuple[Descriptor, str]] = field(default_factory=list[tuple[Descriptor, str]])
    """Parent checkpoints still to follow; a list and not a recursion, because chains are as long as training."""
    unreadable: set[str] = field(default_factory=set[str])
    """Objects already reported as unreadable."""
    unread: list[str] = field(default_factory=list[str])
    """Manifests that could not be read, so that what they lead to is unknown."""
    runs: set[str] = field(default_factory=set[str])
    """Runs whose receipts were read, or asked for."""
    ancestors: set[str] = field(default_factory=set[str])
    """Runs that wrote a checkpoint which was reached."""
    checked: set[ReceiptPlace] = field(default_factory=set[ReceiptPlace])

    def fault(self, kind: FaultKind, path: str, expected: str, observed: str, message: str) -> None:
        self.report.faults.append(Fault(kind, path, expected, observed, message))

    def read_receipts(self, run: str | None) -> None:
        """Read every receipt and its signature; whatever else lies among the runs is a fault."""
        if run is not None:
            self.runs.add(run)
        envelopes: set[str] = set()
        prefix = RUNS_PREFIX if run is None else receipt_name(run, 1, "audit_data").partition("/0001/")[0] + "/"
        for found in self._found(prefix):
            if found.kind != "file":
                self._not_a_file(found)
                continue
            signed = receipt_of_envelope(found.path)
            if signed is not None:
                envelopes.add(signed)
                continue
            place = place_of(found.path)
            if place is None:
                shown = _shown(found.path)
                self.fault("extra", shown, "nothing", "a file", f"{shown} is no receipt: remove it")
                continue
            try:
                with self.store.open_object(found.path) as opened:
                    content = opened.stream.read(MAX_RECEIPT_BYTES)
            except (OSError, LongStrawError) as error:
                self._unreadable(found.path, "a receipt", error)
                continue
            self.report.receipts += 1
            self.report.bytes += len(content)
            try:
                receipt = parse_statement(content, name=found.path)
            except IntegrityError as error:
                self.fault("malformed", found.path, "a canonical stage receipt", sha256_digest(content), str(error))
                continue
            claimed = receipt_name_claimed(receipt)
            if claimed != found.path:
                self.fault(
                    "misplaced",
                    found.path,
                    found.path,
                    claimed,
                    f"this receipt says it belongs at {claimed}: replayed?",
                )
                continue
            self.receipts[place] = _Known(receipt, sha256_digest(content))
            self.runs.add(place.run)
            self._check_signature(found.path, content, signed=found.path in envelopes)
            envelopes.discard(found.path)
        self.report.unreferenced.extend(envelope_name(name) for name in sorted(envelopes))

    def _check_signature(self, name: str, content: bytes, *, signed: bool) -> None:
        """With a verify key it must have signed; without one, a signature must at least be of this receipt."""
        envelope = envelope_name(name)
        try:
            if self.store.keys.verify is not None:
                check_signature(self.store, name, content)
            elif signed:
                with self.store.open_object(envelope) as opened:
                    payload, _ = read_envelope(opened.stream.read(2 * MAX_RECEIPT_BYTES), name=envelope)
                if payload != content:
                    raise IntegrityError(f"{envelope} signs another receipt than the one stored at {name}")
                self.report.unchecked.append(f"{envelope}: no verify key was given")
        except OSError as error:
            self._unreadable(envelope, "a signature", error)
        except LongStrawError as error:
            self.fault(
                "signature", name, "the expected key's signature", "none" if not signed else "another", str(error)
            )

    def read_roots(self) -> None:
        """Read what keeps artifacts alive besides receipts: policy pointers and registered snapshots."""
        for found in (*self._found(POLICY_PREFIX), *self._found(SNAPSHOT_PREFIX)):
            if found.kind != "file":
                self._not_a_file(found)
                continue
            try:
                with self.store.open_object(found.path) as opened:
                    content = opened.stream.read(MAX_RECEIPT_BYTES)
                if found.path.startswith(SNAPSHOT_PREFIX):
                    self._reach(parse_snapshot(content, name=found.path), found.path)
                else:
                    self.parents.append((parse_pointer(content, name=found.path).checkpoint, found.path))
            except OSError as error:
                self._unreadable(found.path, "a pointer", error)
            except LongStrawError as error:
                self.fault("malformed", _shown(found.path), "a pointer", sha256_digest(b""), str(error))
                self.unread.append(found.path)

    def check_receipts(self, *, external: bool) -> None:
        """Check every receipt that was read and not checked yet, then follow the checkpoints they started from."""
        for place, known in sorted(self.receipts.items(), key=lambda item: item[0].name):
            if place not in self.checked:
                self.checked.add(place)
                self.check_receipt(place, known, external=external)
        self.follow_parents()

    def ancestors_to_read(self) -> list[str]:
        """Runs that checkpoints came from and whose receipts were not read yet."""
        return sorted(self.ancestors - self.runs)

    def follow_parents(self) -> None:
        """Follow the checkpoints that others were trained from, to the first."""
        while self.parents:
            self._follow(*self.parents.pop(), None)

    def hash_everything(self) -> None:
        """Hash all blobs and report what does not belong in a store."""
        blobs: list[FoundFile] = []
        for found in self._found(""):
            if found.path.startswith((RUNS_PREFIX, POLICY_PREFIX, SNAPSHOT_PREFIX)):
                continue  # read_receipts or read_roots sees it
            if found.kind != "file":
                self._not_a_file(found)
            elif found.path.startswith("staging/"):
                message = "left by a killed writer (or one is writing now): clear_stale_staging removes it"
                self.fault("staging", _shown(found.path), "nothing", f"{found.size} bytes", message)
            elif _is_blob(found.path):
                blobs.append(found)
            else:
                message = f"{_shown(found.path)} does not belong in a store: remove it"
                self.fault("extra", _shown(found.path), "nothing", f"{found.size} bytes", message)
        self._hash([found.path for found in sorted(blobs, key=lambda found: -found.size)])

    def check_receipt(self, place: ReceiptPlace, known: _Known, *, external: bool) -> None:
        """Check one receipt's inputs against their producers and follow its outputs."""
        inputs = known.receipt.predicate.inputs
        for key, descriptor in sorted(inputs.items()):
            try:
                parsed = parse_input_key(key)
            except SpecError as error:
                self.fault("malformed", place.name, "an input key", key, str(error))
                continue
            if parsed.kind == "external":
                self._check_external(place, key, descriptor, external=external)
            else:
                self._check_input(place, key, parsed, descriptor, inputs)
        for output, descriptor in sorted(known.receipt.predicate.outputs.items()):
            self._follow(descriptor, f"{place.name} output {output!r}", place)

    def hash_reached(self, *, whole_store: bool) -> None:
        """Hash the blobs that receipts lead to, unless already done, and compare each with its descriptor."""
        self.follow_parents()
        self._hash([name for name in self.reached if name not in self.present])
        for name, (descriptor, origin) in sorted(self.reached.items()):
            observed = self.present.get(name)
            if observed is None:
                if name not in self.unreadable:
                    wanted = f"{descriptor.digest} ({descriptor.size} bytes)"
                    self.fault("missing", name, wanted, "nothing", f"blob is missing; named by {origin}")
            elif observed.size != descriptor.size and observed.digest == descriptor.digest:
                self.fault(
                    "chain",
                    origin.partition(" ")[0],
                    f"{observed.size} bytes",
                    f"{descriptor.size} bytes",
                    f"{origin} gives a wrong size for {name}",
                )
        if whole_store:
            self.report.unreferenced.extend(sorted(name for name in self.present if name not in self.reached))

    def finish(self) -> VerifyReport:
        """Order the faults by path and return the report."""
        self.report.faults = sorted(dict.fromkeys(self.report.faults), key=lambda fault: (fault.path, fault.kind))
        return self.report

    def _check_input(
        self, place: ReceiptPlace, key: str, parsed: InputKey, descriptor: Descriptor, inputs: Mapping[str, Descriptor]
    ) -> None:
        stage = parsed.stage
        if stage is None:
            return
        producer = ReceiptPlace(place.run, place.transaction - int(parsed.previous), stage)
        shown = f"{place.name} input {key!r}"
        if producer.transaction < 1:
            self.fault("chain", place.name, "a transaction before", "none", f"{shown}: there is no transaction before")
            return
        known = self.receipts.get(producer)
        if known is None:
            message = f"{shown}: the producer's receipt {producer.name} is missing or unusable"
            self.fault("chain", place.name, descriptor.digest, "no receipt", message)
            return
        if parsed.kind == "receipt":
            if descriptor.digest != known.digest or descriptor.uri != producer.name:
                self.fault(
                    "chain",
                    place.name,
                    f"{producer.name} {descriptor.digest}",
                    f"{descriptor.uri} {known.digest}",
                    f"{shown}: {producer.name} is not the receipt that was read",
                )
            return
        receipt_key = f"{'previous:' if parsed.previous else ''}receipt:{stage}"
        if receipt_key not in inputs:
            message = f"{shown}: input {receipt_key!r} is missing, so nothing says which receipt it came from"
            self.fault("chain", place.name, receipt_key, "nothing", message)
        output = known.receipt.predicate.outputs.get(parsed.name)
        if output != descriptor:
            observed = "no such output" if output is None else f"{output.uri} {output.digest} ({output.size} bytes)"
            self.fault(
                "chain",
                place.name,
                f"{descriptor.uri} {descriptor.digest} ({descriptor.size} bytes)",
                observed,
                f"{shown}: not what {producer.name} says it wrote",
            )

    def _check_external(self, place: ReceiptPlace, key: str, descriptor: Descriptor, *, external: bool) -> None:
        shown = f"{place.name} {key}: {descriptor.uri}"
        if descriptor.media_type == MEDIA_TYPE_TREE:  # the manifest, not its files, is in the store
            self._reach(descriptor, f"{place.name} input {key!r}")
        if not descriptor.uri.startswith("file://"):
            if descriptor.uri == blob_name(descriptor.digest) and descriptor.media_type == MEDIA_TYPE_CHECKPOINT:
                self.parents.append((descriptor, f"{place.name} input {key!r}"))
            elif descriptor.uri == blob_name(descriptor.digest):
                self._reach(descriptor, f"{place.name} input {key!r}")
            else:
                self.report.unchecked.append(shown)
            return
        identity = (descriptor.uri, descriptor.digest)
        if identity in self.externals:
            return
        self.externals.add(identity)
        faults = check_external(self.store, descriptor) if external else None
        if faults is None:
            self.report.unchecked.append(shown)
        else:
            self.report.faults.extend(faults)

    def _reach(self, descriptor: Descriptor, origin: str) -> None:
        name = blob_name(descriptor.digest)
        earlier = self.reached.setdefault(name, (descriptor, origin))
        if earlier[0].size != descriptor.size:
            message = f"{origin} and {earlier[1]} give different sizes for {name}"
            path = origin.partition(" ")[0]
            self.fault("chain", path, f"{earlier[0].size} bytes", f"{descriptor.size} bytes", message)

    def _follow(self, descriptor: Descriptor, origin: str, place: ReceiptPlace | None) -> None:
        """Reach an output's blob and, through manifests, everything it stands for."""
        if descriptor.uri != blob_name(descriptor.digest):
            message = f"{origin}: an output is a blob of this store, named by its digest"
            path = origin.partition(" ")[0]
            self.fault("malformed", path, blob_name(descriptor.digest), descriptor.uri, message)
            return
        self._reach(descriptor, origin)
        if descriptor.media_type == MEDIA_TYPE_TREE:
            self._read_tree(descriptor)
        elif descriptor.media_type == MEDIA_TYPE_CHECKPOINT:
            self._read_checkpoint(descriptor, origin, place)

    def _read_tree(self, descriptor: Descriptor) -> TreeManifest | None:
        content = self._content(descriptor)
        if content is None:
            return None
        try:
            manifest = parse_manifest(content, name=descriptor.uri)
        except IntegrityError as error:
            self.fault("malformed", descriptor.uri, "a tree manifest", descriptor.digest, str(error))
            return None
        if descriptor.digest not in self.visited:
            self.visited.add(descriptor.digest)
            for entry in manifest.entries:
                blob = Descriptor(uri=blob_name(entry.digest), digest=entry.digest, size=entry.size, media_type="file")
                self._reach(blob, f"{descriptor.uri} file {entry.path!r}")
        return manifest

    def _read_checkpoint(self, descriptor: Descriptor, origin: str, place: ReceiptPlace | None) -> None:
        """Check a checkpoint manifest; `place` is the receipt that wrote it, None when reached as a parent."""
        if place is None and descriptor.digest in self.visited:
            return
        self.visited.add(descriptor.digest)
        manifest = self._checkpoint(descriptor)
        if manifest is None:
            return
        uri = descriptor.uri
        self.ancestors.add(manifest.run)
        if place is not None:
            self._check_checkpoint_origin(uri, manifest, place)
        tree = None
        if manifest.tree.media_type != MEDIA_TYPE_TREE:
            self.fault("malformed", uri, MEDIA_TYPE_TREE, manifest.tree.media_type, f"{uri}: field tree is no tree")
        else:
            self._follow(manifest.tree, f"{uri} field 'tree'", None)
            tree = self._read_tree(manifest.tree)
        if tree is not None:
            listed = {file.path: (file.digest, file.size) for file in manifest.files}
            stored = {entry.path: (entry.digest, entry.size) for entry in tree.entries}
            if len(listed) != len(manifest.files):
                self.fault("malformed", uri, "distinct files", "duplicates", f"{uri} lists a file twice")
            for path in sorted(listed.keys() | stored.keys()):
                if listed.get(path) != stored.get(path):
                    message = f"{uri}: file {path!r} differs between the checkpoint manifest and its tree"
                    self.fault("chain", uri, _pair(stored.get(path)), _pair(listed.get(path)), message)
        if manifest.model_snapshot.media_type == MEDIA_TYPE_TREE:
            self._reach(manifest.model_snapshot, f"{uri} field 'model_snapshot'")
        self._check_parent(uri, manifest)

    def _check_checkpoint_origin(self, uri: str, manifest: CheckpointManifest, place: ReceiptPlace) -> None:
        predicate = self.receipts[place].receipt.predicate
        for name, claimed, actual in (
            ("run", manifest.run, predicate.run),
            ("transaction", str(manifest.transaction), str(predicate.transaction)),
            ("spec_digest", manifest.spec_digest, predicate.spec_digest),
            ("gradient", manifest.gradient, predicate.gradient),
        ):
            if claimed != actual:
                self.fault("chain", uri, actual, claimed, f"{uri}: {name} differs from {place.name}, which wrote it")
        for stage, digest in sorted(manifest.receipts.items()):
            known = next((at for at in self.receipts if _is_at(at, place, stage)), None)
            observed = self.receipts[known].digest if known else "no usable receipt"
            if observed != digest:
                self.fault("chain", uri, digest, observed, f"{uri}: receipt of {stage} is not the one it was made from")

    def _check_parent(self, uri: str, manifest: CheckpointManifest) -> None:
        before = ReceiptPlace(manifest.run, manifest.transaction - 1, "manifest_checkpoint")
        parent = manifest.parent
        if parent is None:
            self._check_lineage(uri, manifest, 1)
            if manifest.transaction > 1:
                message = f"{uri}: transaction {manifest.transaction} must name the checkpoint before as its parent"
                self.fault("chain", uri, "a parent", "none", message)
            return
        if parent.media_type != MEDIA_TYPE_CHECKPOINT:
            self.fault("malformed", uri, MEDIA_TYPE_CHECKPOINT, parent.media_type, f"{uri}: parent is no checkpoint")
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
            self.fault("chain", uri, str(manifest.transaction - 1), str(older.transaction), message)
        known = self.receipts.get(before)
        if known and parent.digest not in {output.digest for output in known.receipt.predicate.outputs.values()}:
            message = f"{uri}: parent is not what {before.name} says it wrote"
            self.fault("chain", uri, "an output of it", parent.digest, message)

    def _check_lineage(self, uri: str, manifest: CheckpointManifest, expected: int) -> None:
        if manifest.lineage != expected:
            message = f"{uri}: lineage does not follow from its parent's"
            self.fault("chain", uri, str(expected), str(manifest.lineage), message)

    def _checkpoint(self, descriptor: Descriptor) -> CheckpointManifest | None:
        content = self._content(descriptor)
        if content is None:
            return None
        try:
            return CheckpointManifest.model_validate(parse_canonical_json(content, name=descriptor.uri))
        except (IntegrityError, ValidationError) as error:
            reason = first_complaint(error) if isinstance(error, ValidationError) else str(error)
            message = f"{descriptor.uri} is not a checkpoint manifest: {reason}"
            self.fault("malformed", descriptor.uri, "a checkpoint manifest", descriptor.digest, message)
            return None

    def _content(self, descriptor: Descriptor) -> bytes | None:
        """Verified bytes of a manifest; None when they are missing or corrupt, which hashing reports by itself."""
        try:
            return self.store.get_bytes(descriptor)
        except LongStrawError:
            self.unread.append(descriptor.uri)
            return None

    def _hash(self, names: list[str]) -> None:
        """Hash blobs on all cores; a blob whose bytes are not its name is a fault."""
        with ThreadPoolExecutor(self.store.concurrency) as pool:
            results = list(pool.map(self._measure, names))
        for name, result in zip(names, results, strict=True):
            if isinstance(result, FileNotFoundError):
                continue  # hash_reached reports it with who needs it
            expected = "sha256:" + name.removeprefix(BLOB_PREFIX)
            if not isinstance(result, Measured):
                self._unreadable(name, expected, result)
                continue
            self.present[name] = result
            self.report.blobs += 1
            self.report.bytes += result.size
            if result.digest != expected:
                observed = f"{result.digest} ({result.size} bytes)"
                wanted = expected
                if name in self.reached:
                    wanted = f"{expected} ({self.reached[name][0].size} bytes)"
                self.fault("changed", name, wanted, observed, "the blob's bytes are not what its name says")

    def _measure(self, name: str) -> Measured | OSError | LongStrawError:
        known = self.measured.get(name)
        if known is not None:
            return known
        try:
            return self.store.measure(name)
        except (OSError, LongStrawError) as error:
            return error

    def _unreadable(self, name: str, expected: str, error: OSError | LongStrawError) -> None:
        if name in self.unreadable:
            return
        self.unreadable.add(name)
        kind: FaultKind = error.kind if isinstance(error, UnsafeFile) else "unreadable"
        reason = storage_error(error, f"reading {name}") if isinstance(error, OSError) else error
        self.fault(kind, name, expected, kind, str(reason))

    def _not_a_file(self, found: FoundFile) -> None:
        self.unreadable.add(found.path)
        shown = _shown(found.path)
        self.fault(found.kind, shown, "a regular file or nothing", found.kind, f"{shown} is a {found.kind}: remove it")

    def _found(self, prefix: str) -> list[FoundFile]:
        try:
            return sorted(self.store.walk(prefix), key=lambda found: found.path)
        except LongStrawError as error:
            self._unreadable(prefix or self.store.uri, "a directory", error)
            return []


def receipt_name_claimed(receipt: StageReceipt) -> str:
    """Object name under which a receipt says it belongs; its raw fields when they cannot make a name."""
    predicate = receipt.predicate
    try:
        return receipt_name(predicate.run, predicate.transaction, predicate.stage)
    except SpecError:
        return f"run {predicate.run!r} transaction {predicate.transaction} stage {predicate.stage}"


def _is_blob(name: str) -> bool:
    digits = name.removeprefix(BLOB_PREFIX)
    return name.startswith(BLOB_PREFIX) and len(digits) == 64 and set(digits) <= set("0123456789abcdef")


def _is_at(candidate: ReceiptPlace, place: ReceiptPlace, stage: str) -> bool:
    return (candidate.run, candidate.transaction, candidate.stage) == (place.run, place.transaction, stage)


def _pair(value: tuple[str, int] | None) -> str:
    return "nothing" if value is None else f"{value[0]} ({value[1]} bytes)"


def _shown(path: str) -> str:
    return path.encode(errors="backslashreplace").decode()
