"""JSON for programs, printed where a terminal may read it too."""

import json

import msgspec


def json_text(value: object, *, indent: int = -1) -> str:
    """
    The value as JSON, on one line unless it is to be indented.

    What could steer a terminal is escaped, which makes no difference to a program.
    """
    encoded = msgspec.json.format(msgspec.json.encode(value), indent=indent)
    text = encoded.decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
