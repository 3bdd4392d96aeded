"""Soft overlong punishment (DAPO, equation 13): counted in tokens, never below −1."""


def overlong_penalty(tokens: int, *, max_tokens: int, cache_tokens: int) -> float:
    """Return the punishment for a response of `tokens` tokens, a number in [−1, 0].

    It is 0 up to `max_tokens − cache_tokens`, falls linearly to −1 at `max_tokens` and stays there. (verl's form
    keeps falling past `max_tokens`; the paper's and TRL's, used here, do not.)
    """
    if tokens < 0 or cache_tokens < 1 or max_tokens < cache_tokens:
        raise ValueError(
            f"overlong_penalty: tokens {tokens}, max_tokens {max_tokens}, cache_tokens {cache_tokens}; "
            "need 0 <= tokens and 1 <= cache_tokens <= max_tokens"
        )
    free_tokens = max_tokens - cache_tokens
    if tokens <= free_tokens:
        return 0.0
    return max((free_tokens - tokens) / cache_tokens, -1.0)
