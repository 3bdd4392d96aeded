"""The long documents of the recall task: log lines with two marked codes; knows nothing of tokens or models.

A ledger is thousands of `name=value` log lines. Two of its lines carry a code: `code final=37` and `code draft=52`.
Asked for the final (or the draft) code, a text names that one. Asked just for "the code", texts disagree: some
name the final code, some the draft, some answer in another form. A model pretrained on such texts therefore
answers an open question correctly only some of the time, which is what reinforcement learning needs.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Asked = Literal["final", "draft", "open"]

QUESTIONS: dict[Asked, str] = {
    "final": "Report the final code of this ledger.",
    "draft": "Report the draft code of this ledger.",
    "open": "Report the code of this ledger.",
}
ANSWER_FORMAT = "End with a line `Answer: N`."

DEVICES = ("pump", "valve", "fan", "motor", "boiler", "filter", "mixer", "heater")
READINGS = ("level", "flow", "load", "heat")
STATES = ("ok", "slow", "warm", "idle")


@dataclass(frozen=True)
class Ledger:
    """A document and the two codes that are written in it."""

    text: str
    final: int
    draft: int


def below(rng: random.Random, limit: int) -> int:
    """Return an integer in [0, limit) from `rng.random()`, whose sequence no Python version changes."""
    return int(rng.random() * limit)


def log_line(rng: random.Random) -> str:
    """Return one ordinary line, such as `pump level=37 ok`."""
    device, reading, state = DEVICES[below(rng, 8)], READINGS[below(rng, 4)], STATES[below(rng, 4)]
    return f"{device} {reading}={below(rng, 10)}{below(rng, 10)} {state}"


def write_ledger(rng: random.Random, lines: int) -> Ledger:
    """Write a ledger of `lines` lines, two of which carry the codes.

    The codes are two-digit numbers that differ in their first digit, so that one token tells them apart.
    """
    if lines < 2:
        raise ValueError(f"a ledger needs at least 2 lines for its two codes, got {lines}")
    first = 1 + below(rng, 9)
    other = 1 + (first - 1 + 1 + below(rng, 8)) % 9
    final, draft = first * 10 + below(rng, 10), other * 10 + below(rng, 10)
    body = [log_line(rng) for _ in range(lines)]
    at_final = below(rng, lines)
    at_draft = (at_final + 1 + below(rng, lines - 1)) % lines
    body[at_final] = f"code final={final}"
    body[at_draft] = f"code draft={draft}"
    return Ledger("\n".join(body), final, draft)


def question(ledger: Ledger, asked: Asked) -> str:
    """Return the user's message: the whole ledger, then the question."""
    return f"{ledger.text}\n{QUESTIONS[asked]} {ANSWER_FORMAT}"


def fit_ledger(rng: random.Random, min_tokens: int, count_tokens: Callable[[str], int]) -> Ledger:
    """Write the shortest ledger (in whole lines) whose open question has at least `min_tokens` tokens.

    `count_tokens` measures a user message after the chat template; every try starts from the same random state.
    """
    state = rng.getstate()
    lines = 2
    while True:
        rng.setstate(state)
        ledger = write_ledger(rng, lines)
        missing = min_tokens - count_tokens(question(ledger, "open"))
        if missing <= 0:
            return ledger
        lines += max(1, missing // 16)
