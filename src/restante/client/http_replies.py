"""An answer of the server, or none: its status, headers and body, and which error it is."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import aiohttp
import msgspec

from restante import errors, wire
from restante.errors import (
    AnswerInvalid,
    NotReady,
    RestanteError,
    ServerRefused,
    ServerUnreachable,
    TooManyAtOnce,
    TooManyConnections,
    TooManyMessages,
)
from restante.text import printable

T = TypeVar("T")

_MAX_MESSAGE_LENGTH = 500


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer with its body; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""


def failure(url: str, error: Exception) -> RestanteError:
    """Why there is no answer: an error of the HTTP library, translated."""
    if isinstance(error, aiohttp.ClientResponseError):
        reason = printable(error.message.partition("\n")[0]).rstrip(": ")
        return AnswerInvalid(f"{url} does not speak valid HTTP: {reason}.")
    if isinstance(error, aiohttp.ClientSSLError):
        return ServerUnreachable(_tls_failure(url, error), is_unsent=True)
    if isinstance(error, aiohttp.ClientConnectorError):
        return ServerUnreachable(f"{url} cannot be reached: {_reason(error)}.", is_unsent=True)
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return ServerUnreachable(f"{url} did not answer in time.", is_unsent=True)
    if isinstance(error, TimeoutError):
        return ServerUnreachable(f"{url} did not answer in time.")
    reason = printable(str(error)) or type(error).__name__
    return ServerUnreachable(f"The connection to {url} was lost: {reason}.")


def _reason(error: aiohttp.ClientConnectorError) -> str:
    number = error.os_error.errno or 0  # negative for a failed DNS lookup
    if not number and isinstance(error.os_error, ConnectionError):
        return "it closes the connection during the TLS handshake, and may be a plain HTTP server"
    return os.strerror(number) if number > 0 else error.os_error.strerror or str(error)


def _tls_failure(url: str, error: aiohttp.ClientSSLError) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        reason = getattr(error.certificate_error, "verify_message", "") or "it is not valid"
        return f"{url} has a certificate that this machine does not trust: {printable(reason)}."
    reason = getattr(error.os_error, "reason", None) or "no reason given"
    if reason in _NOT_TLS:
        plain = url.replace("https:", "http:", 1)
        return f"{url} answers without TLS: it is a plain HTTP server. Its address is {plain}."
    return f"{url} cannot be reached: the TLS handshake failed ({printable(reason)})."


# OpenSSL's reasons when the first bytes of an answer are not TLS.
_NOT_TLS = {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"}

# A server refuses so before it begins.
_REFUSED_EARLY = (NotReady, TooManyAtOnce, TooManyConnections, TooManyMessages)


def has_done_nothing(error: RestanteError) -> bool:
    """Whether the server cannot have acted: it was not reached, or refused before it began."""
    is_unsent = isinstance(error, ServerUnreachable) and bool(error.facts.get("is_unsent"))
    return is_unsent or isinstance(error, _REFUSED_EARLY)


def reply_of(answer: aiohttp.ClientResponse, body: bytes) -> Reply:
    """An answer of the HTTP library with the body that was read of it."""
    headers = {name.lower(): value for name, value in answer.headers.items()}
    return Reply(answer.status, headers, body)


def decoded(body: bytes | msgspec.Raw, answer: type[T]) -> T:
    """Decode JSON from a server; raises AnswerInvalid."""
    try:
        return msgspec.json.decode(body, type=answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = f"it cannot be understood: {error}."
        if bytes(body)[:100].lstrip().startswith(b"<"):
            reason = "it is a web page. Check the address, or log in to this network."
        raise AnswerInvalid(f"The answer is not from a Restante server: {reason}") from error


def body_of(row: wire.ActivityRow) -> Any:
    """Decode the body of a row, which is not validated with the page; raises AnswerInvalid."""
    return decoded(row.request_body, cast("type[Any]", Any))


def number_in(reply: Reply, header: str, default: int) -> int:
    """The number in a header, or the default."""
    text = reply.headers.get(header.lower(), "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else default


def raise_for_status(reply: Reply) -> None:
    """Raise the error class of the answer's code; does nothing for a success."""
    if reply.status in {200, 206}:
        return
    if 300 <= reply.status < 400:
        location = printable(
            reply.headers.get("location", "nowhere"), max_length=_MAX_MESSAGE_LENGTH
        )
        raise AnswerInvalid(
            f"The server redirects to {location}; the token is not sent there. "
            "If that is the right address, use it."
        )
    raise _error_of(reply)


def _error_of(reply: Reply) -> RestanteError:
    try:
        fields = msgspec.json.decode(reply.body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = {}
    facts = {key: fact for key, fact in fields.items() if isinstance(fact, str | int | float)}
    code = str(facts.pop("code", ""))
    message = printable(str(facts.pop("error", "")), max_length=_MAX_MESSAGE_LENGTH)
    facts["retry_after"] = number_in(reply, "Retry-After", 0)
    known = _BY_CODE.get(code)
    if known and message:
        return known(message, **facts)
    message = message or f"The server answered with status {reply.status} and no reason."
    return ServerRefused(message, **facts | {"status": reply.status, "refused_as": code})


# Raised on this side only: a server that sends one of these codes is not believed.
_CLIENT_ONLY = {
    errors.AnswerInvalid,
    errors.CommandFailed,
    errors.FileCorrupt,
    errors.FileUnreadable,
    errors.FolderFull,
    errors.FolderInUse,
    errors.FolderUnusable,
    errors.NoRoomForFile,
    errors.ServerRefused,
    errors.ServerUnreachable,
}


def _by_code() -> dict[str, type[RestanteError]]:
    found = (item for item in vars(errors).values() if isinstance(item, type))
    classes = [c for c in found if issubclass(c, RestanteError) and c is not RestanteError]
    return {error.code: error for error in classes if error not in _CLIENT_ONLY}


_BY_CODE = _by_code()
