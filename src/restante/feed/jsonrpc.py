"""
JSON-RPC bodies as they are stored and forwarded.

Clients of several generations send several shapes: without an envelope, with `content` instead of
`parts`, with `type` instead of `kind`.  All of them become one shape here.  Fields that we do not
know stay.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard, cast

from restante.errors import BadRequest

Object: TypeAlias = dict[str, Any]

SEND = "message/send"
# What carries a message in `params.message`; other methods pass as they are.
_WITH_MESSAGE = frozenset({SEND, "message/stream"})
# What params have beside the message, also if they are the message otherwise.
_BESIDE_MESSAGE = ("configuration",)
_ENVELOPE = ("jsonrpc", "id", "method")


@dataclass(frozen=True, slots=True)
class Request:
    """A body in its one shape."""

    body: Object
    method: str
    message_id: str | None  # as its sender chose it; None: it chose none


def normalised(sent: Object, *, new_id: Callable[[], str]) -> Request:
    """The body in its one shape, which does not change it any more; raises BadRequest."""
    body = _checked(_wrapped(sent))
    if body["method"] not in _WITH_MESSAGE:
        return Request(with_kinds(body), body["method"], _message_id(_message_of(body)))
    body = {"jsonrpc": "2.0", "id": new_id(), **_with_message(_with_params(body))}
    body, chosen = _completed(body, new_id)
    return Request(with_kinds(body), body["method"], chosen)


def _completed(body: Object, new_id: Callable[[], str]) -> tuple[Object, str | None]:
    """The body, its message with all that readers expect, and the id that the sender chose."""
    params, message = body.get("params"), _message_of(body)
    holder = message or (params if _has_parts(params) else body)
    chosen = _message_id(holder)
    filled = _filled(holder, chosen or new_id())
    if holder is message:
        body = {**body, "params": {**body["params"], "message": filled}}
    else:
        body = {**body, "params": filled} if holder is params else filled
    _check_parts(body)
    return body, chosen


def _wrapped(sent: Object) -> Object:
    """The body with `params`, also if only those or the message itself were sent."""
    if "params" in sent:
        return sent
    if isinstance(sent.get("message"), dict):
        return _enveloped(sent)
    has_envelope = "jsonrpc" in sent or "method" in sent
    if not has_envelope and ("parts" in sent or "content" in sent):
        return {"params": {"message": sent}}
    return sent


def _enveloped(sent: Object) -> Object:
    """The envelope as it was sent, around all other fields as `params`."""
    envelope = {name: sent[name] for name in _ENVELOPE if name in sent}
    rest = {name: sent[name] for name in sent if name not in {*_ENVELOPE, "params"}}
    return {**envelope, "params": rest}


def _with_params(body: Object) -> Object:
    """The body with `params`, if an older message is beside the envelope."""
    is_older = body.get("params") is None and "content" in body and not _has_parts(body)
    return _enveloped(body) if is_older else body


def _with_message(body: Object) -> Object:
    """
    The body with `params.message`, if its params are an older message themselves.

    Params that have `parts` stay: receivers know that shape.
    """
    params = body.get("params")
    if not isinstance(params, dict):
        return body
    sent = cast("Object", params)
    is_read = sent.get("message") is not None or _has_parts(sent)
    if is_read or "content" not in sent:
        return body
    beside = {name: sent[name] for name in _BESIDE_MESSAGE if name in sent}
    message = {name: sent[name] for name in sent if name not in {"message", *_BESIDE_MESSAGE}}
    return {**body, "params": {**beside, "message": message}}


def _checked(body: Object) -> Object:
    """
    The body with its method; of the rest of the envelope only the version is checked.

    A field that is null or empty counts as absent.
    """
    method = body.get("method")
    if method is None or method == "":
        method = SEND
    if not isinstance(method, str) or not method.strip():
        raise BadRequest("method is wrong: it must be the name of a method.")
    version = body.get("jsonrpc")
    if version is None or version == "":
        body = {name: value for name, value in body.items() if name != "jsonrpc"}
    elif version != "2.0":
        raise BadRequest("jsonrpc is wrong: only version 2.0 is supported.")
    return {**body, "method": method}


def _message_of(body: Object) -> Object | None:
    params = body.get("params")
    message = cast("Object", params).get("message") if isinstance(params, dict) else None
    return cast("Object", message) if isinstance(message, dict) else None


def _has_parts(holder: Any) -> TypeGuard[Object]:
    return isinstance(holder, dict) and isinstance(cast("Object", holder).get("parts"), list)


def _message_id(message: Object | None) -> str | None:
    """What identifies the message; an empty one does not."""
    found = message.get("messageId") if message else None
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, str | int | float):
        raise BadRequest("messageId is wrong: it must be a string.")
    return str(found) if str(found).strip() else None


def _filled(message: Object, message_id: str) -> Object:
    """The message with `parts`, a role and an id."""
    role = message.get("role")
    filled = {**_with_parts(message), "messageId": message_id}
    return filled if role else {**filled, "role": "user"}


def _with_parts(message: Object) -> Object:
    """`content` becomes `parts`, in its place; beside `parts` it is just another field."""
    content: Any = message.get("content")
    if message.get("parts") is not None or not isinstance(content, str | list):
        return message
    parts = (
        [{"kind": "text", "text": content}] if isinstance(content, str) else cast("Any", content)
    )
    return {
        ("parts" if name == "content" else name): (parts if name == "content" else value)
        for name, value in message.items()
        if name != "parts"
    }


def _check_parts(body: Object) -> None:
    """Raise BadRequest if a message says nothing; some clients have its parts further out."""
    if not any(map(_has_parts, (_message_of(body), body.get("params"), body))):
        raise BadRequest(
            "The message has neither parts nor content: send a list as params.message.parts."
        )


def with_kinds(message: Mapping[str, Any]) -> dict[str, Any]:
    """
    A JSON-RPC body whose message parts have a `kind`.

    Older senders call it `type`; a part that has both keeps its `kind`.
    """
    body = dict(message)
    params = body.get("params")
    if isinstance(params, dict):
        body["params"] = _renamed_in(cast("dict[str, Any]", params))
    return _with_parts_renamed(body)


def _renamed_in(params: Mapping[str, Any]) -> dict[str, Any]:
    renamed = _with_parts_renamed(params)
    message = renamed.get("message")
    if isinstance(message, dict):
        renamed["message"] = _with_parts_renamed(cast("dict[str, Any]", message))
    return renamed


def _with_parts_renamed(holder: Mapping[str, Any]) -> dict[str, Any]:
    parts = holder.get("parts")
    if not isinstance(parts, list):
        return dict(holder)
    return {**holder, "parts": [_renamed(part) for part in cast("list[Any]", parts)]}


def _renamed(part: Any) -> Any:
    if not isinstance(part, dict) or "type" not in part or "kind" in part:
        return cast("Any", part)
    return {
        ("kind" if key == "type" else key): value
        for key, value in cast("dict[str, Any]", part).items()
    }
