"""
Renders the OpenAPI document as one self-contained HTML page.

It reads nothing but the document, so the two cannot disagree.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from restante.server.docs.examples import curl
from restante.server.docs.kinds import kind, name_of, resolved, text

Json = Mapping[str, Any]

_STYLE = files("restante.server.docs").joinpath("style.css").read_text()


@dataclass(frozen=True, slots=True)
class Page:
    """The page, and the style hash for its Content-Security-Policy."""

    html: bytes
    style_hash: str


def rendered(document: Json) -> Page:
    """The whole page."""
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    html = "\n".join(_page(document)) + "\n"
    return Page(html.encode(), f"sha256-{digest}")


def _page(document: Json) -> Iterator[str]:
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    yield f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}: the HTTP interface</title>
<style>{_STYLE}</style>
</head>
<body>
<nav aria-label="Operations">
<input type="checkbox" id="menu"><label for="menu">Contents</label>
<div>"""
    yield from _menu(document)
    yield f"""</div>
</nav>
<main>
<header>
<h1>{escape(info["title"])} <small>{escape(info["version"])}</small></h1>"""
    yield from (f"<p>{text(part)}</p>" for part in info["description"].strip().split("\n\n"))
    yield """<p>For programs: <a href="openapi.json">openapi.json</a>, OpenAPI 3.1.</p>
</header>"""
    yield from _beginning(document)
    for tag in document["tags"]:
        yield from _section(document, tag)
    yield from _schemas(document)
    yield "</main>\n</body>\n</html>"


def _operations(document: Json, tag: str) -> Iterator[tuple[str, str, Json]]:
    """Path, method and operation, without HEAD."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method != "head" and tag in operation["tags"]:
                yield path, method, operation


def _menu(document: Json) -> Iterator[str]:
    yield '<p><a href="#beginning">Tokens and errors</a></p>'
    for tag in document["tags"]:
        yield f'<h2><a href="#{tag["name"]}">{_title(tag["name"])}</a></h2>\n<ul>'
        for path, method, operation in _operations(document, tag["name"]):
            yield (
                f'<li><a href="#{operation["operationId"]}" title="{escape(operation["summary"])}">'
                f"{_badge(method)} {_short(path)}</a></li>"
            )
        yield "</ul>"
    yield '<h2><a href="#schemas">Shapes</a></h2>'


def _title(tag: str) -> str:
    return escape(tag.capitalize())


def _badge(method: str) -> str:
    return f'<span class="method {method}">{method.upper()}</span>'


def _short(path: str) -> str:
    """A path that fits into the menu: ids become a dot."""
    return _breakable(re.sub(r"{\w+}", "•", path))


def _address(path: str) -> str:
    return re.sub(r"({\w+})", r"<var>\1</var>", _breakable(path))


def _breakable(path: str) -> str:
    return escape(path).replace("/", "/<wbr>")


def _beginning(document: Json) -> Iterator[str]:
    yield """<section id="beginning">
<h2>Tokens and errors</h2>
<p>A token is sent as <code>Authorization: Bearer …</code>. Each operation says which one:</p>"""
    schemes = document["components"]["securitySchemes"]
    yield _table(
        ("token", "what it is"),
        ((f"<b>{escape(name)}</b>", text(one["description"])) for name, one in schemes.items()),
    )
    yield """<p>The examples use these shell variables:</p>
<pre><code>RESTANTE_URL=http://127.0.0.1:8080
WORKSPACE=…    <i># the workspace's id</i>
TOKEN=…        <i># its token</i>
ADMIN_TOKEN=…  <i># the operator's</i></code></pre>
<p>An error looks like this, sometimes with more fields:</p>
<pre><code>HTTP/1.1 410 Gone
Content-Type: application/json
X-Request-ID: 6f1d2a9c0b7e4835

{"error": "since_id is not a row of this feed, or no longer; omit since_id to start over.",
 "code": "cursor_gone", "lowest_seq": 4, "latest_seq": 17}</code></pre>
</section>"""


def _section(document: Json, tag: Json) -> Iterator[str]:
    yield (
        f'<section id="{tag["name"]}">\n<h2>{_title(tag["name"])}</h2>\n'
        f"<p>{text(tag['description'])}</p>"
    )
    for path, method, operation in _operations(document, tag["name"]):
        yield from _article(document, path, method, operation)
    yield "</section>"


def _article(document: Json, path: str, method: str, operation: Json) -> Iterator[str]:
    name = operation["operationId"]
    yield f"""<article id="{name}">
<h3><a href="#{name}">{_badge(method)} <code>{_address(path)}</code></a></h3>
<p class="summary">{text(operation["summary"])}</p>"""
    if "description" in operation:
        yield f"<p>{text(operation['description'])}</p>"
    yield f'<p class="token">Token: {_tokens(operation["security"])}</p>'
    yield f"<pre><code>{escape(curl(document, path, method, operation))}</code></pre>"
    if operation["parameters"]:
        yield "<h4>Parameters</h4>"
        yield _table(("name", "in", "value", "meaning"), map(_parameter, operation["parameters"]))
    yield from _body(document, operation)
    yield "<h4>Answers</h4>"
    yield from _answers(operation)
    yield from _refusals(operation)
    yield "</article>"


def _tokens(security: Iterable[Json]) -> str:
    names = [name for alternative in security for name in alternative]
    if not names:
        return "none"
    wanted = " or ".join(f"<b>{escape(name)}</b>" for name in names)
    return f"none, or {wanted}" if {} in security else wanted


def _parameter(parameter: Json) -> tuple[str, ...]:
    return (
        _named(parameter["name"], is_required=parameter.get("required", False)),
        escape(parameter["in"]),
        kind(parameter["schema"]),
        text(parameter["description"]),
    )


def _named(name: str, *, is_required: bool) -> str:
    mark = ' <em class="required">required</em>' if is_required else ""
    return f"<code>{escape(name)}</code>{mark}"


def _body(document: Json, operation: Json) -> Iterator[str]:
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        schema = content["schema"]
        named = f"{kind(schema)} " if "$ref" in schema else ""
        yield f"<h4>Body <small>{named}{escape(media)}</small></h4>"
        yield _fields(resolved(document, schema))


def _answers(operation: Json) -> Iterator[str]:
    rows: list[tuple[str, str, str]] = []
    for status, answer in operation["responses"].items():
        if "x-codes" not in answer:
            body = " or ".join(
                f"{_shape(content['schema'])} <small>{escape(media)}</small>"
                for media, content in answer.get("content", {}).items()
            )
            rows.append((f"<b>{status}</b>", body or "no body", _own_headers(answer)))
    if any(headers for _status, _body, headers in rows):
        yield _table(("status", "body", "headers"), rows)
    else:
        yield _table(("status", "body"), [row[:2] for row in rows])


def _shape(schema: Json) -> str:
    return kind(schema) if schema and schema != {"type": "string"} else ""


def _own_headers(answer: Json) -> str:
    own = {name: one for name, one in answer["headers"].items() if name != "X-Request-ID"}
    return "<br>".join(
        f"<code>{escape(name)}</code>"
        + (f" {text(one['description'])}" if "$ref" not in one else "")
        for name, one in own.items()
    )


def _refusals(operation: Json) -> Iterator[str]:
    refused = {s: one for s, one in operation["responses"].items() if "x-codes" in one}
    yield f"<details>\n<summary>Errors <small>{' '.join(refused)}</small></summary>"
    yield _table(
        ("status", "code", "meaning"),
        (
            (f"<b>{status}</b>", f"<code>{escape(code)}</code>", text(meaning))
            for status, one in refused.items()
            for code, meaning in one["x-codes"].items()
        ),
    )
    yield "</details>"


def _schemas(document: Json) -> Iterator[str]:
    yield '<section id="schemas">\n<h2>Shapes</h2>\n<p>The types of the JSON bodies.</p>'
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield f"""<article id="{name_of(name)}">
<h3><a href="#{name_of(name)}">{escape(name)}</a></h3>
<p>{text(schema.get("description", ""))}</p>"""
        yield _fields(schema)
        yield "</article>"
    yield "</section>"


def _fields(schema: Json) -> str:
    required = schema.get("required", ())
    return _table(
        ("field", "value", "meaning"),
        (
            (
                _named(name, is_required=name in required),
                kind(one),
                text(one.get("description", "")),
            )
            for name, one in schema.get("properties", {}).items()
        ),
    )


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{one}</th>" for one in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
