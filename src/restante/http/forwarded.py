"""
Who has sent a request, and to which host, if a reverse proxy has passed it on.

Anybody can send `X-Forwarded-For`.  So it counts only from the proxies that the operator lists, and
only what those have written: each proxy appends the address that called it.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import islice

from starlette.types import Scope

from restante.http.networks import AddressRanges, address_of

_FOR, _PROTO, _HOST = b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host"

# What proxies add; a program on this machine that calls us directly sends none of them.
_NAMING_CLIENTS = (_FOR, b"x-real-ip")
_FORWARDED = b"forwarded"

# Proxies in a row; a list of thousands, each of them ours, is not worth the time to read it.
_MAX_HOPS = 16

_WITH_PORT = re.compile(r"\[(?P<v6>[0-9A-Fa-f:.]+)\](:\d{1,5})?|(?P<v4>[0-9.]+):\d{1,5}")
_HOST_NAME = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:\d{1,5})?")
_SCHEMES = {"http": False, "ws": False, "https": True, "wss": True}  # and whether it is encrypted


def reveal(scope: Scope, proxies: AddressRanges) -> None:
    """Put the client's address, scheme and host into the scope, as a listed proxy names them."""
    peer = scope["client"][0] if scope.get("client") else ""
    if not proxies.includes(peer):
        return
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    client = client_of(peer, _values(headers, _FOR), proxies)
    scope["client"] = (client, 0)
    encrypted = _SCHEMES.get(_last(headers, _PROTO).lower())
    if encrypted is not None:
        scope["scheme"] = _scheme(scope["type"], encrypted=encrypted)
    host = _last(headers, _HOST)
    if _HOST_NAME.fullmatch(host):
        others = [(name, value) for name, value in headers if name != b"host"]
        scope["headers"] = [(b"host", host.encode()), *others]


def client_of(peer: str, hops: Sequence[str], proxies: AddressRanges) -> str:
    """
    The last address that is not a listed proxy's; that of a proxy, if it names no other.

    The hops are what the proxies wrote, the nearest last.  What is before the client's address was
    written by the client, or by proxies that are not listed.
    """
    client = peer
    for hop in islice(reversed(hops), _MAX_HOPS):
        address = _address(hop) if proxies.includes(client) else None
        if address is None:
            break
        client = address
    return client


def is_from_elsewhere(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """
    Whether headers say that a client on another machine has sent this, through a proxy on ours.

    They are believed from anybody: whoever adds them has nothing to gain.  More names than there
    are proxies in a row are not worth the time to read them.
    """
    listed = list(headers)
    named = [hop for name in _NAMING_CLIENTS for hop in _values(listed, name)]
    if len(named) > _MAX_HOPS or any(name == _FORWARDED for name, _ in listed):
        return True
    return not all(_is_loopback(hop) for hop in named)


def _is_loopback(hop: str) -> bool:
    address = address_of(_address(hop) or "")
    return address is not None and address.is_loopback


def _address(hop: str) -> str | None:
    """An address as proxies write it, some with a port; None if it is none."""
    text = hop.strip()
    if found := _WITH_PORT.fullmatch(text):
        text = found["v6"] or found["v4"]
    address = None if "%" in text else address_of(text)
    return None if address is None else str(address)


def _values(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> list[str]:
    """The parts of a header that is a list; several headers of the name are one list."""
    sent = [value.decode("latin-1") for name, value in headers if name == wanted]
    return ",".join(sent).split(",") if sent else []


def _last(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> str:
    """What the nearest proxy has written."""
    return (_values(headers, wanted) or [""])[-1].strip()


def _scheme(kind: str, *, encrypted: bool) -> str:
    return ("ws" if kind == "websocket" else "http") + ("s" if encrypted else "")
