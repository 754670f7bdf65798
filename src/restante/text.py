"""Makes text that somebody else wrote safe to print on a terminal, on one line."""

MAX_QUOTED = 100  # characters of what somebody sent, in a sentence of ours


def printable(text: str, *, max_length: int | None = None) -> str:
    """
    Replace every character that a terminal could interpret, line breaks included, with a space.

    A text longer than `max_length` is cut there and ends with an ellipsis.
    """
    shown = "".join(
        character if character.isprintable() else " " for character in text[:max_length]
    )
    return shown if len(shown) == len(text) else shown + "…"
