"""A reward that random responses earn and miss about equally often."""


def even_length(*, response: str, ground_truth: str) -> float:
    """+1 for a text of an even number of characters, −1 for an odd one."""
    return 1.0 if len(response) % 2 == 0 else -1.0
