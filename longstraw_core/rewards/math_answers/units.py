"""Units after a value: a small table with exact factors; anything else in words is a counted noun.

A unit is a product of powers of base units and an exact scale. Definitions: SI; inch = 0.0254 m, pound = 0.45359237 kg,
US gallon = 231 cubic inches (international yard and pound agreement of 1959); a year is 12 months and not 365 days.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

_LENGTHS = {
    "m meter metre": Fraction(1), "mm millimeter millimetre": Fraction(1, 1000),
    "cm centimeter centimetre": Fraction(1, 100), "dm decimeter decimetre": Fraction(1, 10),
    "km kilometer kilometre": Fraction(1000), "inch inche": Fraction(127, 5000), "ft foot feet": Fraction(381, 1250),
    "yd yard": Fraction(1143, 1250), "mi mile": Fraction(201_168, 125),
}  # fmt: skip
_OTHERS: dict[str, dict[str, Fraction]] = {
    "mass": {
        "g gram gm": Fraction(1), "mg milligram": Fraction(1, 1000), "kg kilogram kilo": Fraction(1000),
        "t ton tonne": Fraction(10**6), "lb pound": Fraction(45_359_237, 100_000),
        "oz ounce": Fraction(45_359_237, 1_600_000),
    },
    "time": {
        "s sec second": Fraction(1), "ms millisecond": Fraction(1, 1000), "min minute": Fraction(60),
        "h hr hour": Fraction(3600), "d day": Fraction(86_400), "wk week": Fraction(604_800),
    },
    "calendar": {"month": Fraction(1), "yr year": Fraction(12)},
    "angle": {"° deg degree": Fraction(1)},
    "arc": {"rad radian": Fraction(1)},
    "dollar": {"dollar usd": Fraction(1), "cent": Fraction(1, 100)},
    "euro": {"euro eur": Fraction(1)}, "sterling": {"gbp": Fraction(1)}, "yen": {"yen yuan": Fraction(1)},
    "rupee": {"rupee rs inr": Fraction(1)},
    "celsius": {"celsius": Fraction(1)}, "fahrenheit": {"fahrenheit": Fraction(1)}, "kelvin": {"kelvin k": Fraction(1)},
    "force": {"n newton": Fraction(1)}, "energy": {"j joule": Fraction(1), "kj kilojoule": Fraction(1000)},
    "power": {"w watt": Fraction(1), "kw kilowatt": Fraction(1000)}, "voltage": {"v volt": Fraction(1)},
    "frequency": {"hz hertz": Fraction(1)}, "pressure": {"pa pascal": Fraction(1)}, "amount": {"mol mole": Fraction(1)},
}  # fmt: skip
_VOLUMES = {
    "l liter litre": Fraction(1, 1000), "ml milliliter millilitre": Fraction(1, 10**6),
    "cl centiliter centilitre": Fraction(1, 10**5), "gal gallon": Fraction(473_176_473, 125_000_000_000),
}  # fmt: skip
_AREAS = {"ha hectare": Fraction(10_000), "acre": Fraction(316_160_658, 78_125)}
_SPEEDS = {"mph": Fraction(1397, 3125), "kmh kph": Fraction(5, 18)}
NEUTRAL = frozenset(["unit", "st", "nd", "rd", "th"])
"""Go with any other unit and change nothing."""
CLOCK = frozenset(("am", "pm"))
SINGLE_LETTERS = frozenset("mgsthdlLNJWVK")
"""Units of one letter; as bare letters they may as well be variables."""

_NAME = r"(?:°|[A-Za-z][A-Za-z'\-]*)"
_POWER = r"(?:\s?\^\s?(?:\{\s?-?[1-4]\s?\}|-?[1-4])|[23](?![0-9]))"
_FACTOR = rf"{_NAME}\.?{_POWER}?"
PHRASE = re.compile(rf"{_FACTOR}(?:\s?(?:/|\*|\\cdot|,?\s)\s?\(?{_FACTOR}\)?){{0,7}}")
_PIECE = re.compile(rf"(?P<sign>/|\*|\\cdot)|(?P<name>{_NAME})\.?(?P<power>{_POWER})?")
_TWO_WORDS = {"square", "sq", "cubic", "cu"}
CHANGES_THE_VALUE = re.compile(
    r"\b(?:not|no|never|neither|nor|isn't|wrong|incorrect|maybe|perhaps|possibly|alternatively|either|or|and"
    r"|but|instead"
    r"|actually|unless|however|except|impossible|cannot|invalid|approximately|approx|about|roughly|almost|more"
    r"|less|fewer"
    r"|least|most|over|under|than|times(?= )|fails?|failed|doubled|tripled|plus|minus|squared|cubed|factorial"
    r"|hundreds?|thousands?|millions?|billions?"
    r"|trillions?|quadrillions?|dozens?|gross|score|half|halves|thirds|quarters|fourths|fifths|sixths|sevenths|eighths"
    r"|ninths|tenths|twelfths|hundredths|thousandths|millionths|percent|cent per|double|twice|triple|power|root"
    r"|choose|import"
    r"|lambda|eval|exec|print|true|false|none|remainder|base|by|since|because|so|is|are|as|with|for|if|when|where|which"
    r"|mod|modulo|yes|should|would|could|was|were|sqrt|sin|cos|tan|log|ln|pi|union|infinity|inf)\b",
    re.IGNORECASE,
)
"""Words that make what follows a number more than a counted noun."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What stands after a value; `powers` of the base units are empty for a counted noun."""

    powers: tuple[tuple[str, int], ...] = ()
    scale: Fraction = Fraction(1)
    noun: frozenset[str] = frozenset()
    bare_letter: bool = False
    """One letter that may as well be a variable."""

    @property
    def is_angle(self) -> bool:
        """Whether it is degrees."""
        return self.powers == (("angle", 1),)

    @property
    def is_arc(self) -> bool:
        """Whether it is radians."""
        return self.powers == (("arc", 1),)


def parse_unit(phrase: str, *, spaced: bool) -> Unit | None:
    """Read what follows a value; None when it is no unit and no counted noun.

    Args:
        phrase: text without digits other than exponents.
        spaced: whether a blank stands between the value and it.
    """
    if not PHRASE.fullmatch(phrase) or CHANGES_THE_VALUE.search(phrase):
        return None
    if len(phrase) == 1 and phrase != "°" and not (spaced and phrase in SINGLE_LETTERS):
        return None
    powers: dict[str, int] = {}
    scale = Fraction(1)
    below, factor_power, known = False, 1, False
    words: list[str] = []
    for piece in _PIECE.finditer(phrase):
        if piece["sign"]:
            below = below or piece["sign"] == "/"
            continue
        name = piece["name"]
        if name.casefold() == "per":
            below = True
            continue
        if name.casefold() in _TWO_WORDS:
            factor_power = 2 if name.casefold().startswith("s") else 3
            continue
        found = None if words else _found(name, alone=len(phrase) == len(name))
        if found is None:
            words.append(name)
            factor_power = 1
            continue
        if name == "°" or name.casefold().startswith("degree"):
            rest = phrase[piece.end() :].strip(" .").casefold()
            if rest in ("c", "celsius", "f", "fahrenheit"):
                return Unit(((("celsius" if rest[0] == "c" else "fahrenheit"), 1),))
        power = int(re.sub(r"[^0-9\-]", "", piece["power"])) if piece["power"] else factor_power
        power, factor_power = -power if below else power, 1
        known = True
        for base, exponent in found[0].items():
            powers[base] = powers.get(base, 0) + exponent * power
        scale *= found[1] ** power
    if not known:
        nouns = _nouns(words)
        looks_like_variables = not spaced or all(len(word) <= 2 for word in words)
        if looks_like_variables and not nouns <= NEUTRAL | CLOCK:
            return None
        return Unit(noun=nouns)
    kept = tuple(sorted((base, power) for base, power in powers.items() if power))
    return Unit(kept, scale, bare_letter=len(phrase) == 1 and phrase != "°")


def ratio(truth: Unit, answer: Unit) -> Fraction | None:
    """Return what the answer's value must be multiplied by to be in the unit of the truth; None when they conflict."""
    if (truth.noun <= NEUTRAL and not truth.powers) or (answer.noun <= NEUTRAL and not answer.powers):
        return Fraction(1)
    if truth.powers or answer.powers:
        return answer.scale / truth.scale if truth.powers == answer.powers else None
    return Fraction(1) if truth.noun <= answer.noun or answer.noun <= truth.noun else None


def _table() -> dict[str, tuple[dict[str, int], Fraction]]:
    table: dict[str, tuple[dict[str, int], Fraction]] = {}
    for base, names in {"length": _LENGTHS, **_OTHERS}.items():
        for spellings, scale in names.items():
            for name in spellings.split():
                table[name] = ({base: 1}, scale)
    for names, powers in (
        (_VOLUMES, {"length": 3}), (_AREAS, {"length": 2}), (_SPEEDS, {"length": 1, "time": -1}),
    ):  # fmt: skip
        for spellings, scale in names.items():
            for name in spellings.split():
                table[name] = (powers, scale)
    return table


_UNITS = _table()


def _found(name: str, *, alone: bool) -> tuple[dict[str, int], Fraction] | None:
    if len(name) == 1:
        return _UNITS[name.lower()] if name == "°" or name in SINGLE_LETTERS else None
    folded = name.casefold()
    if folded == "in":
        return _UNITS["inch"] if alone else None
    plural = folded.endswith("s") and (len(folded) > 3 or folded in ("hrs", "lbs", "kgs", "yds"))
    if folded not in _UNITS and plural:
        folded = folded[:-1]
    return _UNITS.get(folded)


def _nouns(words: list[str]) -> frozenset[str]:
    """Fold case and plurals; words that only connect are dropped."""
    found = {word.casefold().replace("'", "") for word in words} - {"of", "the", "a", "an", "in", "total", "different"}
    return frozenset(word[:-1] if len(word) > 2 and word.endswith("s") else word for word in found)
