"""Server addresses: validation, proxies, and whether a token would be sent unencrypted."""

import ipaddress
import re
from urllib.parse import urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from restante.errors import BadRequest

_NAME = re.compile(r"[\w.-]+")


def server_url(text: str) -> str:
    """Validate an address and bring it to one form; raises BadRequest."""
    given = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(given.strip())
        port = parts.port
        host = _host(parts.hostname or "")
    except ValueError as error:
        raise BadRequest(f"{text!r} is not a valid address: {error}.") from error
    if parts.scheme not in {"http", "https"} or not host or not given.isprintable() or port == 0:
        raise BadRequest(f"{text!r} is not the address of a server, such as http://host:8080.")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise BadRequest(f"{parts.hostname}: remove the user, query or fragment from the address.")
    netloc = f"{host}:{port}" if port else host
    return urlunsplit((parts.scheme, netloc, parts.path.rstrip("/"), "", ""))


def _host(name: str) -> str:
    """The host part of a URL, empty if invalid; raises ValueError for a name IDNA rejects."""
    if ":" in name:
        return f"[{name}]"
    name.encode("idna")
    return name if _NAME.fullmatch(name) else ""


def is_exposed(url: str) -> bool:
    """Whether a token would be sent unencrypted over a network."""
    return url.startswith("http:") and not is_here(url)


def is_here(url: str) -> bool:
    """Whether the server is on this machine."""
    return _is_loopback(urlsplit(url).hostname or "")


def proxy_for(url: str) -> str | None:
    """The proxy from the environment for this address; None for loopback."""
    parts = urlsplit(url)
    if _is_loopback(parts.hostname or "") or proxy_bypass(parts.netloc):
        return None
    return getproxies().get(parts.scheme)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
