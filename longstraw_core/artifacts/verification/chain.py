"""Checks what a receipt says it read against what the producing receipts say they wrote."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from longstraw_core.artifacts.external import check_external
from longstraw_core.artifacts.receipts import InputKey, ReceiptPlace, parse_input_key
from longstraw_core.artifacts.store import blob_name
from longstraw_core.artifacts.verification.reach import Reach
from longstraw_core.artifacts.verification.reader import ObjectReader
from longstraw_core.artifacts.verification.receipts import ReceiptReader
from longstraw_core.spec.descriptors import MEDIA_TYPE_CHECKPOINT, MEDIA_TYPE_TREE, Descriptor
from longstraw_core.spec.errors import SpecError


@dataclass(slots=True)
class ChainCheck:
    """Checks every receipt once."""

    reader: ObjectReader
    receipts: ReceiptReader
    reach: Reach
    external: bool
    """Whether inputs outside the store are re-hashed where they can be reached."""
    checked: set[ReceiptPlace] = field(default_factory=set[ReceiptPlace])
    externals: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """URI and digest of the inputs outside the store that were looked at."""

    def check_all(self) -> None:
        """Check every receipt that was read and not checked yet, then follow the checkpoints they started from."""
        while unchecked := self.receipts.known.keys() - self.checked:
            for place in sorted(unchecked, key=lambda place: place.name):
                self.checked.add(place)
                self._check(place)
        self.reach.follow_parents()

    def _check(self, place: ReceiptPlace) -> None:
        """Check one receipt's inputs and follow its outputs."""
        predicate = self.receipts.known[place].receipt.predicate
        for key, descriptor in sorted(predicate.inputs.items()):
            try:
                parsed = parse_input_key(key)
            except SpecError as error:
                self.reader.fault("malformed", place.name, "an input key", key, str(error))
                continue
            if parsed.kind == "external":
                self._check_external(place, key, descriptor)
            else:
                self._check_input(place, key, parsed, descriptor, predicate.inputs)
        for output, descriptor in sorted(predicate.outputs.items()):
            self.reach.follow(descriptor, f"{place.name} output {output!r}", place)

    def _check_input(
        self, place: ReceiptPlace, key: str, parsed: InputKey, descriptor: Descriptor, inputs: Mapping[str, Descriptor]
    ) -> None:
        stage = parsed.stage
        if stage is None:
            return
        producer = ReceiptPlace(place.run, place.transaction - int(parsed.previous), stage)
        shown = f"{place.name} input {key!r}"
        if producer.transaction < 1:
            message = f"{shown}: there is no transaction before"
            self.reader.fault("chain", place.name, "a transaction before", "none", message)
            return
        known = self.receipts.look_again(producer)
        if known is None:
            message = f"{shown}: the producer's receipt {producer.name} is missing or unusable"
            self.reader.fault("chain", place.name, descriptor.digest, "no receipt", message)
            return
        if parsed.kind == "receipt":
            if descriptor != known.descriptor:
                self.reader.fault(
                    "chain",
                    place.name,
                    _whole(descriptor),
                    _whole(known.descriptor),
                    f"{shown}: {producer.name} is not the receipt that was read",
                )
            return
        receipt_key = f"{'previous:' if parsed.previous else ''}receipt:{stage}"
        if receipt_key not in inputs:
            message = f"{shown}: input {receipt_key!r} is missing, so nothing says which receipt it came from"
            self.reader.fault("chain", place.name, receipt_key, "nothing", message)
        output = known.receipt.predicate.outputs.get(parsed.name)
        if output != descriptor:
            self.reader.fault(
                "chain",
                place.name,
                _whole(descriptor),
                "no such output" if output is None else _whole(output),
                f"{shown}: not what {producer.name} says it wrote",
            )

    def _check_external(self, place: ReceiptPlace, key: str, descriptor: Descriptor) -> None:
        shown = f"{place.name} {key}: {descriptor.uri}"
        origin = f"{place.name} input {key!r}"
        if descriptor.media_type == MEDIA_TYPE_TREE:  # the manifest, not its files, is in the store
            self.reach.add(descriptor, origin)
        if not descriptor.uri.startswith("file://"):
            if descriptor.uri != blob_name(descriptor.digest):
                self.reader.report.unchecked.append(shown)
            elif descriptor.media_type == MEDIA_TYPE_CHECKPOINT:
                self.reach.parents.append((descriptor, origin))
            else:
                self.reach.add(descriptor, origin)
            return
        identity = (descriptor.uri, descriptor.digest)
        if identity in self.externals:
            return
        self.externals.add(identity)
        faults = check_external(self.reader.store, descriptor) if self.external else None
        if faults is None:
            self.reader.report.unchecked.append(shown)
        else:
            self.reader.report.faults.extend(faults)


def _whole(descriptor: Descriptor) -> str:
    return f"{descriptor.uri} {descriptor.digest} ({descriptor.size} bytes, {descriptor.media_type})"
