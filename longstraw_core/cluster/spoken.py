"""What a client's error says, as one line that may go to a log. No I/O."""

LONGEST = 600


def spoken(error: object) -> str:
    """Return the error's words on one line, shortened; never a header's value, which may be a token.

    `http.client` quotes the header that it cannot send: `Invalid header value b'Bearer …'`.
    """
    text = " ".join(str(error).split())
    if isinstance(error, ValueError) and "header value" in text.lower():
        return "the token cannot be sent: it is not one line of plain text"
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
