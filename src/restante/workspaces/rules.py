"""What a workspace is, which registrations are accepted, and how its token is checked."""

import hashlib
import hmac
import re
import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from ipaddress import ip_address
from typing import Literal
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID

from msgspec import UNSET, UnsetType

from restante.errors import BadRequest, NotJson, OriginRefused
from restante.ids import WorkspaceId, as_uuid
from restante.text import MAX_QUOTED, printable
from restante.wire import Mode, WorkspaceEntry

MAX_LABEL = 1000
MAX_TASKS = 2**31 - 1
MAX_CARD_BYTES = 64 * 1024  # it is kept as long as its workspace
MAX_CALLS_TO_WORKSPACE = 8
MAX_CALLS_BY_SENDER = 32
MAX_CALLS_TO_HOST = 64
MAX_CALLS = 512
_MAX_URL = 2048
_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")
_SMALL_CARD = 4096
_INGEST = "/internal/chat/uploads/ingest"
_SHORT_ID = 8

MAX_CANDIDATES = 10  # workspaces of one name that are listed

# A workspace that polls or watches is seen at least this often: a poll takes a minute at most, the
# time is written once a minute, and a little later.
ONLINE_WITHIN = timedelta(seconds=150)


@dataclass(frozen=True, slots=True)
class Workspace:
    """A receiver, as the store has it, without its card."""

    id: WorkspaceId
    name: str
    delivery_mode: Mode
    url: str | None
    parent_id: UUID | None
    status: Literal["active", "removed"]
    token_hash: bytes | None
    inbound_secret: str


@dataclass(frozen=True, slots=True)
class Details:
    """What a registration or the operator can set."""

    name: str
    delivery_mode: Mode
    url: str | None
    agent_card: str | None  # JSON; None keeps the stored one
    parent_id: UUID | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes to the details; None keeps the stored value, except the parent's."""

    name: str | None = None
    delivery_mode: Mode | None = None
    url: str | None = None
    agent_card: str | None = None
    parent_id: UUID | UnsetType | None = UNSET  # None: it has no parent any more
    card_url: str | None = None  # as the agent card has it, for a registration without a good url


@dataclass(frozen=True, slots=True)
class Sender:
    """What a request's headers tell about the program that sent it; None: not sent."""

    host: str | None = None
    origin: str | None = None
    content_type: str | None = None
    origin_is_listed: bool = False  # by the operator
    is_from_elsewhere: bool = False  # a proxy has passed it on, for another machine


def refuse_web_pages(sender: Sender) -> None:
    """
    Refuse what a web page can make a browser on this machine send without asking us first.

    Any page can send to loopback.  The browser then names the page's origin.  A page whose own name
    was made to resolve to loopback (DNS rebinding) counts as same-origin, but the Host is that
    name.  The JSON type is a second line: a page needs our permission to send it.
    """
    if sender.is_from_elsewhere:
        raise OriginRefused(
            "Registration is open to programs on the server's machine only, and a proxy has passed "
            "this on for another one. Send a token that may register."
        )
    if sender.host is not None and not _is_loopback(sender.host):
        host = printable(sender.host, max_length=MAX_QUOTED)
        raise OriginRefused(
            f"Registration is open under a loopback address only, not as {host}. "
            "Use http://127.0.0.1 and the port, or send a token that may register."
        )
    if sender.origin is not None and not _is_trusted(sender, sender.origin):
        page = printable(sender.origin, max_length=MAX_QUOTED)
        raise OriginRefused(f"The web page {page} may not register workspaces without a token.")
    if (sender.content_type or "").partition(";")[0].strip().lower() != "application/json":
        raise NotJson("Registration without a token needs `Content-Type: application/json`.")


def _is_loopback(host: str) -> bool:
    """Whether a Host header names this machine."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def _is_trusted(sender: Sender, origin: str) -> bool:
    is_ours = sender.host is not None and origin.lower() == f"http://{sender.host.lower()}"
    return is_ours or sender.origin_is_listed


def registered(workspace_id: WorkspaceId, stored: Workspace | None, sent: Changes) -> Details:
    """
    The details after a registration, which may be less exact than an operator's change.

    Programs in the field leave the url of push mode to their card, and send none, or one that
    nobody can call.  Without a name, the first one is the beginning of the id.
    """
    is_push = _mode_after(stored, sent) == "push"
    if is_push and not _is_plain(sent.url) and _is_plain(sent.card_url):
        sent = replace(sent, url=sent.card_url)
    after = details_of(stored, sent)
    return after if after.name else replace(after, name=str(workspace_id)[:_SHORT_ID])


def _mode_after(stored: Workspace | None, changes: Changes) -> Mode:
    return changes.delivery_mode or (stored.delivery_mode if stored else "push")


def details_of(stored: Workspace | None, changes: Changes) -> Details:
    """
    The details after the changes; fields that were not sent keep their values.

    A url that nobody can call is ignored in poll mode, where programs in the field send one.
    Raises BadRequest for a push workspace without a url that can be called.
    """
    if _mode_after(stored, changes) == "poll" and not _is_plain(changes.url):
        changes = replace(changes, url=None)
    if stored:
        before = Details(stored.name, stored.delivery_mode, stored.url, None, stored.parent_id)
    else:
        before = Details(name="", delivery_mode="push", url=None, agent_card="{}")
    after = replace(
        before,
        **{
            field: value
            for field in ("name", "delivery_mode", "url", "agent_card")
            if (value := getattr(changes, field)) is not None
        },
        parent_id=before.parent_id if changes.parent_id is UNSET else changes.parent_id,
    )
    if after.url is not None:
        check_url(after.url)
    elif after.delivery_mode == "push":
        raise BadRequest("A workspace with delivery_mode push needs a url.")
    return after


def is_large(card: str | None) -> bool:
    """Whether this card is refused on a low disk, where a workspace may still come back."""
    return len(card or "") > _SMALL_CARD


def check_url(url: str) -> None:
    """Raise BadRequest for anything but a plain http or https URL."""
    if not _is_plain(url):
        raise BadRequest("The url must be an http or https address without a user name.")


def _is_plain(url: str | None) -> bool:
    if url is None or len(url) > _MAX_URL or not url.isprintable() or " " in url:
        return False
    try:
        parts = urlsplit(url)
        callable_at = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and callable_at and parts.username is None


@dataclass(frozen=True, slots=True)
class PushCalls:
    """How many push calls are running."""

    to_workspace: int
    to_host: int
    by_sender: int
    in_all: int


def push_refusal(running: PushCalls) -> str | None:
    """
    Why one more push call must not begin, None if it may.

    A stalled workspace fills only its own limit, and the calls of one sender or to one host are
    bounded as well.  While half of all calls are running, only who has none may begin another:
    so many stalled workspaces cannot keep the others from being called.
    """
    if running.to_workspace >= MAX_CALLS_TO_WORKSPACE:
        return f"{running.to_workspace} push calls to this workspace are running"
    if running.by_sender >= MAX_CALLS_BY_SENDER:
        return f"{running.by_sender} push calls of this sender are running"
    if running.to_host >= MAX_CALLS_TO_HOST:
        return f"{running.to_host} push calls to the workspace's host are running"
    if running.in_all >= MAX_CALLS:
        return f"{running.in_all} push calls of this server are running"
    if running.in_all >= MAX_CALLS // 2 and (running.to_workspace or running.by_sender):
        return "The server is busy, and a push call to this workspace or of this sender is running"
    return None


def ingest_url(url: str) -> str:
    """Where a push workspace with this URL accepts files."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") + _INGEST, fragment=""))


def clean_label(text: str) -> str:
    """One line of printable text of bounded length that can be stored as UTF-8."""
    return printable(text[:MAX_LABEL]).encode("utf-8", "replace").decode()


def new_name(text: str) -> str:
    """A name that an operator chooses; raises BadRequest if it could not be used to find it."""
    if len(text) > MAX_LABEL:
        raise BadRequest(f"A name has at most {MAX_LABEL} characters; this one has {len(text)}.")
    name = clean_label(text).strip()
    if not name:
        raise BadRequest("A name needs at least one character that can be seen.")
    if as_uuid(name):
        raise BadRequest("This name looks like an id, and would be taken for one; choose another.")
    return name


def ambiguous(name: str, found: Sequence[WorkspaceEntry]) -> str:
    """Which workspaces have the name; a name proves nothing, because anybody may choose it."""
    shown = "; ".join(
        f"{one.id}, last seen {one.last_seen_at:%Y-%m-%d %H:%M:%S}, "
        f"registered {one.created_at:%Y-%m-%d %H:%M:%S}"
        for one in found[:MAX_CANDIDATES]
    )
    several = f"More than {MAX_CANDIDATES}" if len(found) > MAX_CANDIDATES else str(len(found))
    name = printable(name, max_length=MAX_QUOTED)
    return f"{several} workspaces are named {name}. Use the id: {shown}."


def labels(ids: Collection[UUID], names: Mapping[UUID, str]) -> dict[UUID, str]:
    """
    What to call these workspaces in print.

    The name; with the beginning of the id if another workspace has the name; in quotes if it looks
    like an id; and the id of a workspace that is not known any more.
    """
    count = Counter(names.values())

    def label(workspace_id: UUID) -> str:
        name = names.get(workspace_id)
        if name is None:
            return str(workspace_id)
        shown = quoted_if_odd(name)
        return f"{shown} ({str(workspace_id)[:_SHORT_ID]})" if count[name] > 1 else shown

    return {one: label(one) for one in ids}


def quoted_if_odd(name: str) -> str:
    """A name for print; in quotes if it could be taken for something else."""
    shown = printable(name)
    return f'"{shown}"' if as_uuid(shown) or shown != shown.strip() or not shown else shown


def task_count(reported: float | None) -> int:
    """The tasks that a heartbeat reports, as they are stored; raises BadRequest for a fraction."""
    if reported is None:
        return 0
    if reported % 1:
        raise BadRequest("active_tasks is wrong: it must be an integer.")
    return min(max(int(reported), 0), MAX_TASKS)


def new_token() -> str:
    """A random token; it is shown once and stored only as a hash."""
    return secrets.token_urlsafe(32)  # 43 characters


def is_token(text: str) -> bool:
    """Whether it can be a token at all; anything else is refused without a look-up."""
    return _TOKEN.fullmatch(text) is not None


def token_hash(token: str) -> bytes:
    """How a token is stored and looked up.  It is long and random, so a plain hash is enough."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def token_matches(workspace: Workspace, token: str) -> bool:
    """Whether the token is this workspace's, compared in constant time."""
    stored = workspace.token_hash or bytes(32)
    same = hmac.compare_digest(stored, token_hash(token))
    return same and workspace.token_hash is not None and workspace.status == "active"


def is_repetition(attempt: str | None) -> bool:
    """Whether the number of an attempt says that an earlier one may have arrived."""
    return attempt is not None and attempt.strip() not in {"", "1"}
