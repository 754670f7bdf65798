"""Describes a JSON schema in a few words of HTML."""

import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any
from uuid import UUID

import msgspec

Json = Mapping[str, Any]


def text(plain: str) -> str:
    """A sentence as HTML; text in backticks becomes code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(plain))


def name_of(schema: str) -> str:
    """The anchor of a named schema."""
    return f"shape-{escape(schema)}"


def resolved(document: Json, schema: Json) -> Json:
    """The schema, with a `$ref` resolved."""
    if "$ref" not in schema:
        return schema
    return document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]


def kind(schema: Json) -> str:
    """The type of a value and its limits."""
    limits = list(_limits(schema))
    return _base(schema) + (f" <small>{', '.join(limits)}</small>" if limits else "")


def _base(schema: Json) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#{name_of(name)}">{escape(name)}</a>'
    if "anyOf" in schema:
        return " or ".join(kind(one) for one in schema["anyOf"])
    if "const" in schema:
        return _code(schema["const"])
    if "enum" in schema:
        return " or ".join(_code(one) for one in schema["enum"])
    if schema.get("type") == "array":
        return f"array of {kind(schema.get('items', {}))}"
    return _plain(schema)


def _plain(schema: Json) -> str:
    if "contentMediaType" in schema:
        return "bytes"
    if "format" in schema:
        return escape(schema["format"])
    return escape(schema.get("type", "any JSON"))


def _limits(schema: Json) -> Iterator[str]:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        yield f"{low} to {high}"
    elif low is not None:
        yield f"at least {low}"
    if "maxItems" in schema:
        yield f"{schema.get('minItems', 0)} to {schema['maxItems']}"
    if schema.get("default") not in {None, "", str(UUID(int=0))}:
        yield f"else {_code(schema['default'])}"


def _code(value: object) -> str:
    shown = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return f"<code>{escape(shown)}</code>"
