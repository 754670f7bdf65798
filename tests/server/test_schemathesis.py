"""
The server does what the OpenAPI document says.

schemathesis makes valid and invalid requests from the document, and checks every answer of a real
server against it: statuses, media types, headers, bodies, who is authorized, and no 5xx.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from callers import ADMIN, Caller, ask, registered
from sites import ADMIN_TOKEN, Site

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

# The same requests in every run; more of them, or others, when asked for.
SEED = int(os.environ.get("SOAK_SEED", "1"))
EXAMPLES = 3 * int(os.environ.get("SOAK_RUNS", "1"))

# Requests that the schema allows and the server refuses, because of what is not in the schema:
# whether a row or byte exists, whether a key is new, which addresses can be called, how long files
# may wait here, that of two cursors one is sent, that 1.0 is not an integer here, that messages
# have parts, what is the address of a node, an op or a position of its log.
REFUSED_THOUGH_VALID = {
    "feed_read": ["400", "410"],
    "feed_acknowledge": ["400"],
    "messages_send": ["400"],
    "oplog_add_peer": ["400"],
    "oplog_sweep": ["400"],
    "oplog_push": ["400", "406", "422"],
    "oplog_begin": ["400"],
    "oplog_page": ["400", "410"],
    "oplog_missing": ["400", "410"],
    "oplog_cursors": [],
    "oplog_digest": ["400"],
    "oplog_records": ["400"],
    "oplog_tables": [],
    "workspaces_heartbeat": ["400"],
    "workspaces_register": ["400"],
    "workspaces_change": ["400"],
    "uploads_upload": ["400", "422"],
    "uploads_content": ["416"],
    "uploads_content_head": ["416"],
    "events_stream_head": ["400", "410"],
    "events_stream_any_head": ["400", "410"],
}
# An empty Last-Event-ID counts as none; any part of a form is bytes, and so can be a file; messages
# may have older shapes; an empty parent_id counts as not sent, and no body as an empty object.
ACCEPTED_THOUGH_INVALID = {
    "events_stream_head",
    "events_stream_any_head",
    "messages_send",
    "oplog_tables",
    "uploads_upload",
    "workspaces_change",
}
ACCEPTED = ["2xx", "3xx", "401", "404", "429"]

# These answers do not end.
ENDLESS = {"events_stream", "events_stream_any"}
# HEAD is the same handler; it is tested where it does more than leave out the body.
HEADS = {"uploads_content_head", "events_stream_head", "events_stream_any_head"}


@dataclass(frozen=True, slots=True)
class Known:
    """What exists on the server, so that not every request is refused."""

    workspace: Caller
    doomed: Caller  # requests that remove a workspace or its token use this one
    fetched: str
    acked: str


@pytest.fixture
async def known(site: Site) -> Known:
    workspace, doomed = await registered(site), await registered(site)
    fetched, acked = [(await workspace.staged())[0] for _ in range(2)]
    return Known(workspace, doomed, fetched, acked)


async def test_a_workspace_is_answered_as_described(site: Site, known: Known, tmp_path: Path):
    names = await operations(site, {"workspace", "sender", None})

    await conforms(site, configuration(known, known.workspace.token), names, tmp_path)


async def test_an_operator_is_answered_as_described(site: Site, known: Known, tmp_path: Path):
    names = ["workspaces_remove", *await operations(site, {"admin"})]

    await conforms(site, configuration(known, ADMIN_TOKEN), names, tmp_path)


async def test_a_peer_is_answered_as_described(site: Site, known: Known, tmp_path: Path):
    added = await ask(
        site, "POST", "/admin/oplog/peers", headers=ADMIN, json={"url": "http://127.0.0.1:9"}
    )
    token = added.json["token"]

    await conforms(site, configuration(known, token), await operations(site, {"peer"}), tmp_path)


async def operations(site: Site, tokens: set[str | None]) -> list[str]:
    """
    The operations that name one of these tokens first; None is for those that need no token.

    What both the workspace and the operator may call is called as the workspace only.
    """
    document = (await ask(site, "GET", "/openapi.json")).json
    found: list[str] = []
    for methods in document["paths"].values():
        for method, operation in methods.items():
            first_choice = next(iter([*operation["security"], {}][0]), None)
            name = operation["operationId"]
            if (
                first_choice in tokens
                and name not in ENDLESS
                and (method != "head" or name in HEADS)
            ):
                found.append(name)
    return found


def configuration(known: Known, token: str) -> str:
    """The token, the number of requests and the parameters for schemathesis."""
    lines = [
        f"seed = {SEED}",
        f"generation = {toml({'max-examples': EXAMPLES, 'database': 'none'})}",
        f"headers = {toml({'Authorization': f'Bearer {token}'})}",
        "phases.stateful.enabled = false",
        'phases.coverage.unexpected-methods = ["OPTIONS", "PUT"]',
        f"dictionaries.known.values = {json.dumps([known.workspace.id])}",
    ]
    everywhere = {
        "path.workspace_id": known.workspace.id,
        "path.file_id": known.fetched,
        "query.wait": 0,  # it would wait for rows that nobody sends
    }
    lines.append(f"parameters = {toml(everywhere)}")
    for name, statuses in REFUSED_THOUGH_VALID.items():
        lines += of_operation(name)
        expected = json.dumps([*ACCEPTED, *statuses])
        lines.append(f"checks.positive_data_acceptance.expected-statuses = {expected}")
        if name in ACCEPTED_THOUGH_INVALID:
            lines.append("checks.negative_data_rejection.enabled = false")
    for name, instead in {
        "workspaces_heartbeat": {"body.workspace_id": {"dictionary": "known"}},
        "workspaces_remove": {"path.workspace_id": known.doomed.id},
        "workspaces_reissue_token": {"path.workspace_id": known.doomed.id},
        "workspaces_revoke_token": {"path.workspace_id": known.doomed.id},
        "uploads_acknowledge": {"path.file_id": known.acked},
    }.items():
        lines += [*of_operation(name), f"parameters = {toml(instead)}"]
    return "\n".join(lines) + "\n"


def of_operation(name: str) -> list[str]:
    return ["[[operations]]", f'include-operation-id = "{name}"']


def toml(value: Any) -> str:
    """A value on one line; only tables differ from JSON."""
    if not isinstance(value, Mapping):
        return json.dumps(value)
    return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"


async def conforms(site: Site, config: str, names: Iterable[str], directory: Path) -> None:
    """Run schemathesis against the server; a failure shows its output and the seed."""
    assert names
    (directory / "schemathesis.toml").write_text(config)
    included = [word for name in names for word in ("--include-operation-id", name)]
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli"),
        *("--config-file", "schemathesis.toml", "run", "--no-color", "--warnings", "off"),
        *("--output-sanitize", "false", "--request-timeout", "20", *included),
        f"{site.url}/openapi.json",
        cwd=directory,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await running.communicate()
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()
    if running.returncode != 0:
        pytest.fail(f"SOAK_SEED={SEED}\n{output.decode(errors='replace')}", pytrace=False)
