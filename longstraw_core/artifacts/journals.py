"""Names of what launchers of multi-pod stages keep in a store: journals of what they own, heartbeats and requests."""

import re
from dataclasses import dataclass
from typing import get_args

from longstraw_core.spec.receipts import StageName

JOURNAL_PREFIX = "cluster/"

_STAGES = "|".join(get_args(StageName))
_NAME = re.compile(
    r"cluster/(?P<run>[A-Za-z0-9][A-Za-z0-9._-]{0,127})/(?P<transaction>[0-9]{4})/"
    rf"(?P<stage>{_STAGES})/"
    r"(?:(?P<attempt>[0-9]{4})/(?P<record>[0-9]{4})-(?P<kind>intent|owned|released|deleted|closed)\.json"
    r"|heartbeat/[0-9]{8}\.json|request-[0-9a-f]{64}\.json)"
)
_STAGE_BY_NAME: dict[str, StageName] = {stage: stage for stage in get_args(StageName)}


@dataclass(frozen=True, slots=True)
class JournalName:
    """The parsed name of an object below `cluster/`; attempt, record and kind only of a journal's record."""

    run: str
    transaction: int
    stage: StageName
    attempt: int | None
    record: int | None
    kind: str | None


def parse_journal_name(name: str) -> JournalName | None:
    """Read the name of a journal record, heartbeat or request; None when it is neither."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return JournalName(
        run=match["run"],
        transaction=int(match["transaction"]),
        stage=_STAGE_BY_NAME[match["stage"]],
        attempt=None if match["attempt"] is None else int(match["attempt"]),
        record=None if match["record"] is None else int(match["record"]),
        kind=match["kind"],
    )
