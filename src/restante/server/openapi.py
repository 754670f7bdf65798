"""
The OpenAPI 3.1 document, generated from the routes and the types that their handlers use.

Everything that is special to an operation is declared at its handler with `@operation`; what all
operations have in common (errors of the server itself, the request id) is added here.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route

from restante import __version__, errors, wire
from restante.delivery.rules import MAX_FILES_PER_REQUEST
from restante.errors import RestanteError
from restante.http.operations import Operation, operation_of
from restante.http.problems import STATUS

Json = dict[str, Any]

_SCHEMA_REF = "#/components/schemas/{name}"
_JSON = "application/json"

_PATH_PARAMETERS = {
    "workspace_id": "The workspace.",
    "file_id": "The file, as its row in the feed names it.",
}

_SECURITY: Mapping[str, list[Json]] = {
    "anyone": [],
    "workspace": [{"workspace": []}],
    "workspace or admin": [{"workspace": []}, {"admin": []}],
    "any workspace or admin": [{"sender": []}, {"admin": []}],
    "peer": [{"peer": []}],
    "admin": [{"admin": []}],
}
_TOKENS = {
    "workspace": "The token of the workspace that the request is about.",
    "sender": "The token of the sending workspace.",
    "peer": "The token of a peer of the op log; also as the password of Basic, with any name.",
    "admin": "The operator's token.",
    "registration": "The token that new workspaces need, if the server requires one.",
}

# Errors that every operation can have; these two codes have no class.
_INTERNAL = {"internal": "A bug in the server; its log has the details under the request id."}
_STOPPING = {"stopping": "The server is stopping; try again in a moment."}
_READING = (errors.DatabaseUnavailable, errors.StatementTimedOut, errors.TableBusy)
_WRITING = (errors.DatabaseFull,)

_DESCRIPTION = """\
Restante stores files and messages for workspaces that cannot be called. A workspace polls its feed,
fetches what is new, and acknowledges it.

An error is a JSON object with a sentence as `error`, a stable `code` that programs can branch on,
and further fields where a program needs them. Every answer has `X-Request-ID`; a request that sends
one keeps it. Every GET route also answers HEAD.
"""


@dataclass(frozen=True, slots=True)
class Described:
    """One method of one route, with its handler's `@operation`."""

    path: str
    method: str  # lower case
    module: str
    name: str
    operation: Operation

    @property
    def id(self) -> str:
        """Unique, and stable as long as the handler keeps its name."""
        plain = f"{self.tag}_{self.name}"
        return f"{plain}_head" if self.method == "head" else plain

    @property
    def tag(self) -> str:
        """The noun, which the handler's module names."""
        return sys.modules[self.module].TAG


def described(routes: Iterable[BaseRoute]) -> Iterator[Described]:
    """Every HTTP operation; raises LookupError for a handler without `@operation`."""
    for route in routes:
        if not isinstance(route, Route):
            continue
        operation = operation_of(route.endpoint)
        if operation is None:
            raise LookupError(f"{route.path} has no @operation")
        for method in sorted(route.methods or ()):
            yield Described(
                route.path,
                method.lower(),
                route.endpoint.__module__,
                route.endpoint.__name__,
                operation,
            )


def document(routes: Sequence[BaseRoute], limits: wire.UploadLimits) -> Json:
    """The whole document; descriptions name a limit as `$per_file_bytes`."""
    every = list(described(routes))
    types, components = _schemas(one.operation for one in every)
    paths: dict[str, Json] = {}
    for one in every:
        paths.setdefault(one.path, {})[one.method] = _operation(one, types, limits)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Restante",
            "version": __version__,
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": _tags(every),
        "paths": paths,
        "components": {
            "schemas": components,
            "headers": _common_headers(),
            "securitySchemes": {
                name: {"type": "http", "scheme": "bearer", "description": described_as}
                for name, described_as in _TOKENS.items()
            },
        },
    }


def _tags(every: Sequence[Described]) -> list[Json]:
    """The nouns; those about the server itself come last."""
    modules = {one.tag: sys.modules[one.module] for one in every}
    guarded = {one.tag for one in every if one.operation.caller != "anyone"}
    return [
        {"name": tag, "description": (module.__doc__ or "").strip().partition("\n\n")[0]}
        for tag, module in sorted(modules.items(), key=lambda pair: pair[0] not in guarded)
    ]


def _schemas(operations: Iterable[Operation]) -> tuple[dict[Any, Json], Json]:
    """A schema for each type on the wire, and the components that they refer to."""
    of_streams = (wire.Event, wire.AgentEvent, wire.NodeEvent)
    types: dict[Any, None] = dict.fromkeys((wire.Problem, *of_streams))
    for operation in operations:
        if operation.body:
            types[operation.body] = None
        types.update(dict.fromkeys(a for a in operation.answers.values() if _is_type(a)))
    found, components = msgspec.json.schema_components(
        types, schema_hook=_any_json, ref_template=_SCHEMA_REF
    )
    return dict(zip(types, found, strict=True)), components


def _is_type(answer: object) -> bool:
    return answer is not None and not isinstance(answer, str)


def _any_json(kind: type) -> Json:
    if kind is msgspec.Raw:
        return {}
    raise NotImplementedError(kind)


def _operation(one: Described, types: Mapping[Any, Json], limits: wire.UploadLimits) -> Json:
    operation = one.operation
    found: Json = {
        "operationId": one.id,
        "tags": [one.tag],
        "summary": operation.summary,
        "parameters": [
            *_path_parameters(one.path),
            *_query_parameters(operation),
            *_header_parameters(operation),
        ],
        "responses": _answers(one, types) | _refusals(one),
        "security": _security(operation),
    }
    if operation.details:
        found["description"] = _with_limits(operation.details, limits)
    if operation.body:
        found["requestBody"] = {
            "required": True,
            "content": {_JSON: {"schema": types[operation.body]}},
        }
    elif operation.files:
        found["requestBody"] = {
            "required": True,
            "content": {"multipart/form-data": {"schema": _FILES}},
        }
    return found


def _with_limits(details: str, limits: wire.UploadLimits) -> str:
    """The sentences with the server's limits; any other `$` stays as it is."""
    for name, value in msgspec.structs.asdict(limits).items():
        details = details.replace(f"${name}", str(value))
    return details


_FILES: Json = {
    "type": "object",
    "required": ["files"],
    "properties": {
        "files": {
            "type": "array",
            "items": {
                "type": "string",
                "contentMediaType": "application/octet-stream",
                "minLength": 1,
            },
            "minItems": 1,
            "maxItems": MAX_FILES_PER_REQUEST,
            "description": "One part for each file, all of them named `files`, none of them empty.",
        }
    },
}


def _security(operation: Operation) -> list[Json]:
    if operation.reads_token:
        return [{}, *({name: []} for name in ("workspace", "registration", "admin"))]
    return _SECURITY[operation.caller]


def _path_parameters(path: str) -> list[Json]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": _PATH_PARAMETERS[name],
            "schema": _UUID,
        }
        for name in re.findall(r"{(\w+)}", path)
    ]


def _query_parameters(operation: Operation) -> Iterator[Json]:
    if operation.query is None:
        return
    _, components = msgspec.json.schema_components([operation.query], schema_hook=_any_json)
    shape = components[operation.query.__name__]
    for name, full in shape["properties"].items():
        schema = _never_null(full)
        parameter = {"name": name, "in": "query", "description": schema.pop("description", "")}
        # A default that the schema does not allow means that the parameter is required.
        default = schema.get("default")
        parameter["required"] = name in shape.get("required", ()) or (
            "const" in schema and schema["const"] != default
        )
        if parameter["required"]:
            schema.pop("default", None)
        else:
            parameter["allowEmptyValue"] = True  # it counts as absent
        yield parameter | {"schema": schema}


def _never_null(schema: Json) -> Json:
    """Query parameters are never null; None is how the handler sees a missing one."""
    kept = {key: value for key, value in schema.items() if key != "anyOf"}
    alternatives = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    if len(alternatives) > 1:
        kept["anyOf"] = alternatives
    elif alternatives:
        kept |= alternatives[0]
    if kept.get("default", ...) is None:
        del kept["default"]
    return kept


def _header_parameters(operation: Operation) -> list[Json]:
    return [
        {
            "name": name,
            "in": "header",
            "description": meaning,
            "schema": _HEADER_SCHEMAS.get(name, {"type": "string"}),
        }
        for name, meaning in operation.headers.items()
    ]


_UUID = {"type": "string", "format": "uuid"}
_HEADER_SCHEMAS: Mapping[str, Json] = {
    wire.IDEMPOTENCY_KEY: {
        "type": "string",
        "minLength": 1,
        "maxLength": wire.MAX_IDEMPOTENCY_KEY,
        "pattern": "^[ -~]+$",
    },
    wire.ATTEMPT: {"type": "integer", "minimum": 1},
}


def _common_headers() -> Json:
    return {
        "X-Request-ID": {
            "description": "The id of this request in the server's log.",
            "required": True,
            "schema": {"type": "string"},
        },
        "WWW-Authenticate": {
            "description": "`Bearer`.",
            "required": True,
            "schema": {"type": "string"},
        },
        "Content-Range": {
            "description": "Which bytes these are, and of how many.",
            "required": True,
            "schema": {"type": "string"},
        },
        "Retry-After": {
            "description": "Seconds until a retry can succeed, if known.",
            "schema": {"type": "integer"},
        },
    }


_HEADERS_OF_STATUS = {
    206: ("Content-Range",),
    401: ("WWW-Authenticate",),
    416: ("Content-Range",),
    429: ("Retry-After",),
    503: ("Retry-After",),
}


def _headers(status: int, always: Mapping[str, str], sometimes: Mapping[str, str]) -> Json:
    common = ("X-Request-ID", *_HEADERS_OF_STATUS.get(status, ()))
    own: Json = {
        name: {
            "description": meaning,
            "required": name in always,
            "schema": _header_schema(name),
        }
        for name, meaning in {**always, **sometimes}.items()
    }
    return own | {name: {"$ref": f"#/components/headers/{name}"} for name in common}


def _header_schema(name: str) -> Json:
    return {"type": "integer", "minimum": 0} if name.endswith("-Seq") else {"type": "string"}


def _answers(one: Described, types: Mapping[Any, Json]) -> Json:
    return {
        str(status): {
            "description": HTTPStatus(status).phrase,
            "headers": _headers(
                status, one.operation.answer_headers, one.operation.optional_headers
            ),
        }
        | ({} if one.method == "head" else _content(answer, types))
        for status, answer in one.operation.answers.items()
    }


def _content(answer: Any, types: Mapping[Any, Json]) -> Json:
    if answer is None:
        return {}
    if not isinstance(answer, str):
        return {"content": {_JSON: {"schema": types[answer]}}}
    is_text = answer.startswith("text/")
    return {"content": {answer: {"schema": {"type": "string"} if is_text else {}}}}


def _refusals(one: Described) -> Json:
    """Each status with the codes that come with it, and what they mean."""
    codes: dict[int, dict[str, str]] = {}
    for error in _errors_of(one):
        codes.setdefault(STATUS[error], {})[error.code] = _meaning(error)
    codes.setdefault(500, {}).update(_INTERNAL)
    codes.setdefault(503, {}).update(_STOPPING)
    return {str(status): _refusal(one, status, codes[status]) for status in sorted(codes)}


def _errors_of(one: Described) -> list[type[RestanteError]]:
    operation = one.operation
    found: list[type[RestanteError]] = []
    for refusal in operation.refusals:
        if isinstance(refusal, int):
            found += [error for error, status in STATUS.items() if status == refusal]
        else:
            found.append(refusal)
    found.append(errors.TooManyConnections)
    if "workspace" in operation.caller:
        found.append(errors.TooManyAtOnce)
    if operation.caller != "anyone" or operation.body:
        found += _READING
        found += () if one.method in {"get", "head"} else _WRITING
    return list(dict.fromkeys(found))


def _meaning(error: type[RestanteError]) -> str:
    return " ".join((error.__doc__ or "").split())


def _refusal(one: Described, status: int, codes: Mapping[str, str]) -> Json:
    lines = [f"- `{code}`: {meaning}" for code, meaning in codes.items()]
    found: Json = {
        "description": "\n".join([f"{HTTPStatus(status).phrase}.", "", *lines]),
        "headers": _headers(status, {}, {}),
        "x-codes": dict(codes),
    }
    if one.method != "head":
        found["content"] = {
            _JSON: {"schema": {"$ref": _SCHEMA_REF.format(name=wire.Problem.__name__)}}
        }
    return found
