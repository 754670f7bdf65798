"""Answers that no subject owns."""

from datetime import datetime
from typing import Annotated, Literal

from msgspec import Meta, Struct

Moment = Annotated[datetime, Meta(tz=True)]


class Problem(Struct, frozen=True):
    """Every refusal and failure."""

    error: Annotated[str, Meta(description="What happened and what to do, as a sentence.")]
    code: Annotated[str, Meta(description="Stable; programs branch on it.")]


class Status(Struct, frozen=True):
    """That something was done."""

    status: str


class Alive(Struct, frozen=True):
    """The process runs."""

    status: Literal["ok"]


class Ready(Struct, frozen=True, omit_defaults=True):
    """The server can do its work, or most of it."""

    status: Literal["ready"]
    degraded: Annotated[
        Literal["disk"] | None,
        Meta(
            description="`disk`: it is almost full. Nothing new is stored; what waits can be "
            "fetched and acknowledged."
        ),
    ] = None
