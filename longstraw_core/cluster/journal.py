"""The ownership journal: what a launcher means to create, what it created, and what is gone, as create-only objects.

The intent is stored before anything is created, so that a launcher which dies at any moment leaves a record of it.
Objects are only ever deleted when a journal names their uid. Layout, below `cluster/<run>/<transaction>/<stage>/`:
`<attempt, 4 digits>/<record, 4 digits>-<kind>.json`. Nothing is overwritten; whoever appends first has the number.
"""

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field, TypeAdapter, ValidationError

from longstraw_core.artifacts.journals import JOURNAL_PREFIX, parse_journal_name
from longstraw_core.artifacts.store import AlreadyPublished, Store
from longstraw_core.spec import IntegrityError, Retryable, SpecError, canonical_json, parse_canonical_json
from longstraw_core.spec.descriptors import MEDIA_TYPE_JSON
from longstraw_core.spec.model import PositiveCount, Sha256, StrictModel
from longstraw_core.spec.receipts import StageName

ObjectKind = Literal["Service", "Job"]
OBJECT_KINDS: tuple[ObjectKind, ...] = get_args(ObjectKind)

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ATTEMPTS = 50


class LauncherPod(StrictModel):
    """The pod that a launcher runs in."""

    name: str
    uid: str


class Intent(StrictModel):
    """First record of an attempt: objects of this name and token may exist from now on."""

    kind: Literal["intent"] = "intent"
    token: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Random; the annotation of every object created for this intent."""
    plan: Sha256
    namespace: str
    name: str
    launcher: LauncherPod | None


class Owned(StrictModel):
    """An object exists and is this attempt's."""

    kind: Literal["owned"] = "owned"
    object: ObjectKind
    uid: str
    adopted: bool = False
    """Whether an earlier attempt created it."""


class Released(StrictModel):
    """An object that a later attempt has adopted."""

    kind: Literal["released"] = "released"
    uid: str
    attempt: PositiveCount


class Deleted(StrictModel):
    """The server accepted the deletion of this uid, or says that it is gone."""

    kind: Literal["deleted"] = "deleted"
    uid: str


class Closed(StrictModel):
    """Last record: nothing of this attempt is left."""

    kind: Literal["closed"] = "closed"
    reason: str


Record: TypeAlias = Intent | Owned | Released | Deleted | Closed
_RECORD: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])


@dataclass(frozen=True, slots=True, order=True)
class AttemptPlace:
    """Which attempt of which stage."""

    run: str
    transaction: int
    stage: StageName
    attempt: int

    @property
    def prefix(self) -> str:
        """Object prefix of the attempt's records."""
        return f"{JOURNAL_PREFIX}{self.run}/{self.transaction:04d}/{self.stage}/{self.attempt:04d}/"


@dataclass(slots=True)
class Attempt:
    """One attempt as its records say, and the way to append to them."""

    store: Store
    place: AttemptPlace
    intent: Intent
    owned: dict[str, ObjectKind] = field(default_factory=dict[str, ObjectKind])
    """uid → kind, of everything this attempt ever owned."""
    gone: set[str] = field(default_factory=set[str])
    """uids that were deleted or handed over."""
    closed: bool = False
    records: int = 1

    @property
    def live(self) -> dict[str, ObjectKind]:
        """uid → kind of what is still this attempt's."""
        return {uid: kind for uid, kind in self.owned.items() if uid not in self.gone}

    def kinds_without_uid(self) -> tuple[ObjectKind, ...]:
        """Kinds that were meant to be created and of which no uid is known: the launcher died in between, or before."""
        known = set(self.owned.values())
        return tuple(kind for kind in OBJECT_KINDS if kind not in known)

    def append(self, record: Record) -> None:
        """Append a record. The records of two writers with the same number and different kinds both count: all but the
        intent commute.

        Raises:
            Retryable: the store cannot be written.
        """
        for _ in range(_ATTEMPTS):
            name = f"{self.place.prefix}{self.records:04d}-{record.kind}.json"
            try:
                self.store.create_object(name, canonical_json(record), MEDIA_TYPE_JSON)
            except AlreadyPublished:
                self.refresh()
                continue
            self._apply(record)
            self.records += 1
            return
        raise Retryable(f"{self.store.uri}/{self.place.prefix}: other writers keep appending; run again")

    def refresh(self) -> None:
        """Read the records that were appended since."""
        fresh = read_attempt(self.store, self.place)
        if fresh is not None:
            self.owned, self.gone, self.closed, self.records = fresh.owned, fresh.gone, fresh.closed, fresh.records

    def _apply(self, record: Record) -> None:
        if isinstance(record, Owned):
            self.owned[record.uid] = record.object
            self.gone.discard(record.uid)
            self.closed = False  # its launcher was taken for dead, closed by another, and went on
        elif isinstance(record, Released | Deleted):
            self.gone.add(record.uid)
        elif isinstance(record, Closed):
            self.closed = True


def open_attempt(
    store: Store,
    *,
    run: str,
    transaction: int,
    stage: StageName,
    plan: str,
    namespace: str,
    name: str,
    launcher: LauncherPod | None,
) -> Attempt:
    """Store the intent of a new attempt, numbered after every earlier one; call it before creating anything.

    Raises:
        Retryable: the store cannot be written, or other launchers of the same stage keep starting.
    """
    intent = Intent(token=secrets.token_hex(16), plan=plan, namespace=namespace, name=name, launcher=launcher)
    content = canonical_json(intent)
    for _ in range(_ATTEMPTS):
        earlier = [
            place.attempt
            for place in attempt_places(store, run)
            if (place.transaction, place.stage) == (transaction, stage)
        ]
        place = AttemptPlace(run, transaction, stage, max(earlier, default=0) + 1)
        try:
            store.create_object(f"{place.prefix}0000-intent.json", content, MEDIA_TYPE_JSON)
        except AlreadyPublished:
            continue
        return Attempt(store, place, intent)
    raise Retryable(f"{store.uri}/{JOURNAL_PREFIX}{run}: other launchers of {stage} keep starting; run again")


def attempt_places(store: Store, run: str) -> list[AttemptPlace]:
    """Places of all attempts of a run, in order.

    Raises:
        SpecError: no run can have this name.
    """
    if _RUN_NAME.fullmatch(run) is None:
        raise SpecError(f"run name {run!r} must be 1 to 128 of A-Z a-z 0-9 . _ - and begin with a letter or digit")
    places: set[AttemptPlace] = set()
    for name in store.list_names(f"{JOURNAL_PREFIX}{run}/"):
        parsed = parse_journal_name(name)
        if parsed is not None and parsed.attempt is not None:
            places.add(AttemptPlace(parsed.run, parsed.transaction, parsed.stage, parsed.attempt))
    return sorted(places)


def read_attempts(store: Store, run: str) -> Iterator[Attempt]:
    """Yield every attempt of a run whose intent was stored."""
    for place in attempt_places(store, run):
        attempt = read_attempt(store, place)
        if attempt is not None:
            yield attempt


def attempts_of_stage(store: Store, stage: AttemptPlace) -> list[Attempt]:
    """Every attempt of the stage that a place names, in order."""
    return [
        attempt
        for place in attempt_places(store, stage.run)
        if (place.transaction, place.stage) == (stage.transaction, stage.stage)
        and (attempt := read_attempt(store, place)) is not None
    ]


def read_attempt(store: Store, place: AttemptPlace) -> Attempt | None:
    """Read the records of an attempt; None when there is no intent.

    Raises:
        IntegrityError: a record is not one, so that nothing can be said about ownership.
    """
    attempt: Attempt | None = None
    for name in store.list_names(place.prefix):
        content = store.get_bytes(store.describe_object(name, MEDIA_TYPE_JSON))
        try:
            record = _RECORD.validate_python(parse_canonical_json(content, name=name))
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            raise IntegrityError(
                f"{name} is not a journal record: {problem['msg']}; so nothing says what its attempt "
                "owns: look for it by the label longstraw.io/run, then delete the record"
            ) from error
        if isinstance(record, Intent):
            attempt = Attempt(store, place, record)
        elif attempt is not None:
            attempt._apply(record)  # pyright: ignore[reportPrivateUsage]
            parsed = parse_journal_name(name)
            if parsed is not None and parsed.record is not None:
                attempt.records = max(attempt.records, parsed.record + 1)
    return attempt
