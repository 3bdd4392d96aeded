"""The bounds of everything that a response can make us compute; one place, so that they can be reviewed together."""

MAX_ANSWER_CHARACTERS = 2_000
"""Longest text that is read as one value."""
MAX_TOKENS = 1_200
"""Most symbols of one value."""
MAX_DEPTH = 150
"""Deepest nesting of braces, fractions, powers and signs."""
MAX_DIGITS = 2_000
"""Longest number that is read."""
MAX_BITS = 100_000
"""Largest numerator or denominator that is computed."""
MAX_FACTORIAL = 5_000
MAX_TERMS = 400
"""Most terms of an expanded sum."""
MAX_STEPS = 20_000
"""Most products of two terms in one evaluation."""
MAX_VALUES = 64
"""Most values that a `±` or a list may stand for."""
MAX_CANDIDATES = 8
"""Most values of one answer that are compared before it is called a spray."""
MAX_TRIAL_DIVISOR = 1 << 12
"""Radicands are factored by trial division up to here."""


class Unreadable(Exception):
    """The text is not one value of the grammar."""


class OverLimit(Exception):
    """The value is larger than the limits let us compute; not known to be right or wrong."""
