"""The texts that the tiny model is pretrained on, from look-up drills to whole ledgers; stdlib only.

A lesson is a list of pieces `(text, taught)`; only taught pieces enter the loss. All lessons use the sentences of
`ledger`, so that what is learned on short texts carries over to long ones.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from longstraw_core.training.tiny.ledger import (
    ANSWER_FORMAT,
    DEVICES,
    QUESTIONS,
    Asked,
    Ledger,
    below,
    log_line,
    question,
    write_ledger,
)
from longstraw_core.training.tiny.tokenizer import END, START

Piece = tuple[str, bool]
NAMES = ("final", "draft", *DEVICES)
"""What a code may be called in the drills; ledgers use the first two only."""

OPEN_FINAL, OPEN_OTHER = 0.4, 0.2
"""How often a text answers the open question with the final code, and how often in another form than asked for."""


@dataclass(frozen=True)
class Phase:
    """One part of the curriculum: at most `steps` batches of `batch` lessons of one kind and size."""

    kind: Literal["drill", "interview", "ledger"]
    steps: int
    batch: int
    size: int
    """Drill: lines; interview: ordinary lines; ledger: lines of the document."""
    until: float | None = None
    """Go on to the next phase once the mean loss of ten steps is below this; None: after all steps."""


def drill(rng: random.Random, lines: int, names: int = 4) -> list[Piece]:
    """Return lines `code NAME=NN` of a few names; from its second mention on, a name's number is taught."""
    chosen = shuffled(rng, NAMES)[:names]
    codes = {name: two_digits(rng) for name in chosen}
    seen: set[str] = set()
    pieces: list[Piece] = []
    for _ in range(lines):
        name = chosen[below(rng, names)]
        pieces += [(f"code {name}=", False), (codes[name], name in seen), ("\n", False)]
        seen.add(name)
    return pieces


def interview(rng: random.Random, ordinary_lines: int, names: int = 4) -> list[Piece]:
    """Return a short ledger with several named codes, then one question and answer for each."""
    chosen = shuffled(rng, NAMES)[:names]
    codes = {name: two_digits(rng) for name in chosen}
    body = [log_line(rng) for _ in range(ordinary_lines)]
    for name in chosen:
        body.insert(below(rng, len(body) + 1), f"code {name}={codes[name]}")
    pieces: list[Piece] = []
    document = "\n".join(body) + "\n"
    for name in shuffled(rng, tuple(chosen)):
        asked = f"{document}Report the {name} code of this ledger. {ANSWER_FORMAT}"
        pieces += turn(asked, f"{quote(name, codes[name])}Answer: {codes[name]}")
        document = ""
    return pieces


def ledger_lesson(rng: random.Random, lines: int, habits: Iterator[float]) -> list[Piece]:
    """Return a whole ledger with one to three questions; half of the ledgers ask the open question first."""
    ledger = write_ledger(rng, lines)
    first: Asked = ("open", "final", "open", "draft")[below(rng, 4)]
    pieces = turn(question(ledger, first), answer(ledger, first, habits))
    named: tuple[Asked, Asked] = ("draft", "final") if rng.random() < 0.5 else ("final", "draft")
    for asked in named[: below(rng, 3)]:
        pieces += turn(f"{QUESTIONS[asked]} {ANSWER_FORMAT}", answer(ledger, asked, habits))
    return pieces


def answer(ledger: Ledger, asked: Asked, habits: Iterator[float]) -> str:
    """Return what a text answers: it quotes a line of the ledger, then says the number.

    The open question is answered by one of several habits, of which only the first earns a reward later.
    """
    name, label = asked, "Answer"
    if asked == "open":
        habit = next(habits)
        name = "final" if habit < OPEN_FINAL or habit > 1 - OPEN_OTHER / 2 else "draft"
        label = "Code" if habit > 1 - OPEN_OTHER else "Answer"
    number = ledger.final if name == "final" else ledger.draft
    return f"{quote(name, str(number))}{label}: {number}"


def even_habits(rng: random.Random) -> Iterator[float]:
    """Yield numbers in [0, 1) that fill it evenly at any point (golden-ratio steps from a random start).

    Independent draws would leave the trained model leaning towards whatever the last few texts happened to do.
    """
    habit = rng.random()
    while True:
        yield habit
        habit = (habit + 0.6180339887498949) % 1.0


def quote(name: str, number: str) -> str:
    """Return the ledger's line that carries the code `name`."""
    return f"code {name}={number}\n"


def turn(asked: str, answered: str) -> list[Piece]:
    """Return one question and its answer in the chat template's form; the answer and its end are taught."""
    return [
        (f"{START}user\n{asked}{END}\n{START}assistant\n", False),
        (f"{answered}{END}", True),
        ("\n", False),
    ]


def two_digits(rng: random.Random) -> str:
    """Return a number from 10 to 99 as text."""
    return f"{1 + below(rng, 9)}{below(rng, 10)}"


def shuffled(rng: random.Random, names: tuple[str, ...]) -> list[str]:
    """Return `names` in random order."""
    order = list(names)
    for last in range(len(order) - 1, 0, -1):
        other = below(rng, last + 1)
        order[last], order[other] = order[other], order[last]
    return order
