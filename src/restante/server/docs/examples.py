"""A curl command for every operation."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

import msgspec

from restante.server.docs.kinds import resolved

Json = Mapping[str, Any]

_VARIABLES = {"workspace_id": "$WORKSPACE", "file_id": "$FILE"}
_SOME_ID = "5f0c6a52-3d1e-4b7a-9c1d-2e8f4a6b7c90"


def curl(document: Json, path: str, method: str, operation: Json) -> str:
    """The operation as a curl command, with its required parameters."""
    return " \\\n  ".join(_words(document, path, method, operation))


def _words(document: Json, path: str, method: str, operation: Json) -> Iterator[str]:
    sends = operation.get("requestBody", {}).get("content", {})
    implied = "post" if sends else "get"
    verb = "" if method == implied else f" -X {method.upper()}"
    address = f"$RESTANTE_URL{_filled(path)}{_query(operation)}"
    yield f'curl{_flags(operation)}{verb} "{address}"'
    token = _token(operation["security"])
    if token:
        yield f'-H "Authorization: Bearer {token}"'
    if "multipart/form-data" in sends:
        yield "-F files=@report.pdf -F files=@photo.jpg"
    elif sends:
        body = _sample(document, sends["application/json"]["schema"])
        yield '-H "Content-Type: application/json"'
        yield f"-d '{msgspec.json.encode(body).decode()}'"


def _flags(operation: Json) -> str:
    media = operation["responses"].get("200", {}).get("content", {})
    if "text/event-stream" in media:
        return " --no-buffer"
    return " -O -J" if "*/*" in media else ""


def _filled(path: str) -> str:
    for name, variable in _VARIABLES.items():
        path = path.replace(f"{{{name}}}", variable)
    return path


def _query(operation: Json) -> str:
    needed = {
        one["name"]: msgspec.json.encode(one["schema"].get("const")).decode()
        for one in operation["parameters"]
        if one["in"] == "query" and one["required"]
    }
    return f"?{urlencode(needed)}" if needed else ""


def _token(security: list[Json]) -> str | None:
    if not security or {} in security:
        return None
    return "$ADMIN_TOKEN" if security == [{"admin": []}] else "$TOKEN"


def _sample(document: Json, schema: Json) -> Any:
    """A valid value: required fields, and fields that have an example."""
    schema = resolved(document, schema)
    if "examples" in schema:
        return schema["examples"][0]
    if schema.get("type") == "object":
        required = schema.get("required", ())
        return {
            name: _sample(document, one)
            for name, one in schema.get("properties", {}).items()
            if name in required or "examples" in one
        }
    return _SOME_ID if schema.get("format") == "uuid" else schema.get("default", "…")
