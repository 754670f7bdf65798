"""Peers: one spelling of each address, two tokens, and who may change them."""

import asyncio
import json
import re
import sys
from datetime import UTC, datetime
from typing import Any

import pytest
from callers import ADMIN, ask, bearer, registered
from oplog.logs import PEER, SWEEP, Reader, add_table, append, own_reader, peer_row
from sites import ADMIN_TOKEN, Site, SiteFactory
from waiting import until

from restante.database.pool import Database
from restante.errors import BadRequest, PeerUnreachable
from restante.oplog import peers
from restante.oplog.invite import Invitation, join
from restante.oplog.peers import Changes, normalised, normalised_host
from restante.oplog.remote import Remote

pytestmark = pytest.mark.anyio

NOW = datetime(2026, 11, 17, tzinfo=UTC)
PEERS = "/admin/oplog/peers"
STATUS = "/internal/oplog/status"


@pytest.mark.parametrize(
    ("spelt", "expected"),
    [
        ("HTTPS://Node.Example/", "https://node.example"),
        ("https://node.example:443", "https://node.example"),
        ("http://node.example:80//", "http://node.example"),
        ("http://node.example:8080/Path/", "http://node.example:8080/path"),
        (" http://node.example. ", "http://node.example"),
        ("http://[0:0:0:0:0:0:0:1]:80/", "http://[::1]"),
        ("http://127.0.0.1:1991", "http://127.0.0.1:1991"),
    ],
)
def test_an_address_has_one_spelling(spelt: str, expected: str):
    assert normalised(spelt) == expected
    assert normalised(expected) == expected


@pytest.mark.parametrize(
    "spelt",
    [
        "",
        "node.example",
        "ftp://node.example",
        "http://",
        "http://node.example:0",
        "http://node.example:99999",
        "http://name:token@node.example",
        "http://node.example?x=1",
        "http://node.example#x",
        "http://no de.example",
        "http://[::1",
        "http://node\n.example",
        f"http://{'x' * 300}.example",
    ],
)
def test_what_is_no_address_is_refused(spelt: str):
    with pytest.raises(BadRequest):
        normalised(spelt)


def test_the_host_of_an_op_may_be_any_name():
    assert normalised_host("URN:uuid:ABC") == "urn:uuid:abc"
    assert normalised_host("https://Node.example:443/") == "https://node.example"
    assert normalised_host("https://[broken") == "https://[broken"


async def add(db: Database, url: str = PEER, **changes: Any) -> peers.Added:
    async with db.connection() as connection:
        own = ["https://own.example"]
        return await peers.add(connection, url, Changes(**changes), own_hosts=own, now=NOW)


async def test_a_token_is_shown_once_and_stored_as_a_hash(db: Database):
    added = await add(db)

    assert added.token
    assert re.fullmatch("[0-9a-f]{64}", added.token)
    async with db.connection() as connection:
        row = await connection.fetchrow("select * from op_peers")
        found = await peers.find_by_token(connection, added.token)
    assert row is not None
    assert added.token not in str(dict(row))
    assert found == added.peer


async def test_adding_a_peer_again_changes_only_what_is_given(db: Database):
    first = await add(db, tables=["b", "a"], max_ops_per_minute=7)
    again = await add(db, PEER.upper() + "/", token="their-token", relays=["HTTP://C.example/"])
    reset = await add(db, tables=["*"])

    assert again.token is None
    assert again.peer.id == first.peer.id
    assert again.peer.token == "their-token"
    assert again.peer.tables == {"a", "b"}
    assert again.peer.relays == {"http://c.example"}
    assert again.peer.max_ops_per_minute == 7
    assert reset.peer.tables is None
    assert reset.peer.token == "their-token"
    async with db.connection() as connection:
        assert first.token
        assert await peers.find_by_token(connection, first.token) == reset.peer


async def test_a_new_token_replaces_the_old_one(db: Database):
    first = await add(db)
    second = await add(db, renews_token=True)

    assert first.token
    assert second.token
    async with db.connection() as connection:
        assert await peers.find_by_token(connection, first.token) is None
        assert await peers.find_by_token(connection, second.token) == second.peer


@pytest.mark.parametrize(
    "spelt", ["https://own.example", "HTTPS://OWN.example:443/", "http://own.example/"]
)
async def test_a_node_is_no_peer_of_itself(db: Database, spelt: str):
    with pytest.raises(BadRequest, match="this node itself"):
        await add(db, spelt)


async def test_a_peer_that_turns_out_to_be_this_node_is_left_out(db: Database):
    """RESTANTE_SELF_URL may be set after the peer was added."""
    await add(db, "https://b.example")
    await add(db, "https://c.example")
    async with db.connection() as connection:
        number = await connection.fetchval(
            "insert into op_hosts (host) values ('https://b.example') returning id"
        )
        await connection.execute("insert into op_node (host_id) values ($1)", number)

        found = await peers.all_peers(connection)

    assert [peer.host for peer in found] == ["https://c.example"]


@pytest.mark.parametrize("token", ["with space", "new\nline", "é", "x" * 5000, ""])
async def test_a_token_that_no_header_can_have_is_refused(db: Database, token: str):
    with pytest.raises(BadRequest):
        await add(db, token=token)


def test_whose_ops_a_peer_may_pass_on():
    anyone = peers.Peer(1, "http://a")
    some = peers.Peer(1, "http://a", relays=frozenset({"http://b"}))

    assert anyone.may_relay("http://c")
    assert [some.may_relay(host) for host in ("http://a", "http://b", "http://c")] == [
        True,
        True,
        False,
    ]


async def test_the_operator_adds_lists_and_removes_peers_over_http(site: Site):
    added = await ask(
        site, "POST", PEERS, headers=ADMIN, json={"url": "http://B.example/", "tables": ["t"]}
    )
    token = json.loads(added.body)["token"]
    again = await ask(
        site, "POST", PEERS, headers=ADMIN, json={"url": "http://b.example", "token": "abc"}
    )
    listed = await ask(site, "GET", PEERS, headers=ADMIN)
    while_there = await ask(site, "GET", STATUS, headers=bearer(token))
    removed = await ask(site, "DELETE", f"{PEERS}?url=HTTP://b.example:80", headers=ADMIN)
    afterwards = await ask(site, "GET", STATUS, headers=bearer(token))
    missing = await ask(site, "DELETE", f"{PEERS}?url=http://b.example", headers=ADMIN)

    assert json.loads(again.body)["token"] is None
    (peer,) = json.loads(listed.body)["peers"]
    assert (peer["host"], peer["tables"], peer["shows_token"]) == ("http://b.example", ["t"], True)
    assert token not in listed.body.decode()
    assert "abc" not in listed.body.decode()
    assert (while_there.status, removed.status, afterwards.status) == (200, 200, 401)
    assert (missing.status, json.loads(missing.body)["code"]) == (404, "peer_unknown")


async def test_tokens_of_workspaces_and_peers_open_nothing_of_each_other(
    site: Site, connections: Any
):
    connection = await connections()
    await append(connection, await add_table(connection, "files"), {"id": 1})
    workspace = await registered(site)
    peer = await own_reader(site)
    assert peer.token

    for token in (workspace.token, ADMIN_TOKEN, "0" * 64):
        for path in (SWEEP, STATUS):
            refused = await ask(site, "GET", path, headers=bearer(token))
            assert refused.status == 401
            assert b"Bearer <token>" in refused.body
    for path in (f"{workspace.path}/activity", "/admin/status", PEERS):
        assert (await ask(site, "GET", path, headers=bearer(peer.token))).status == 401


async def test_requests_of_a_peer_are_charged_to_it(run_site: SiteFactory, connections: Any):
    """One that opens many long polls runs into its own limit, and no other peer does."""
    await add_table(await connections(), "files")
    async with run_site(max_requests_per_workspace=2) as site:
        greedy, other = await own_reader(site), await own_reader(site, "http://other.example")
        polls = [asyncio.create_task(greedy.read(wait=10)) for _ in range(2)]
        running = site.state.concurrency._running

        async def both_run() -> bool:
            return running.total() == 2

        await until(both_run)

        refused, fine = await greedy.read(), await other.read()

        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
    assert refused.status == 429
    assert fine.status == 200


async def test_one_command_joins_two_nodes_and_can_be_repeated(site: Site, dsn: str, db: Database):
    """Here both nodes have the same database, under two addresses."""
    own_url = "http://here.example"
    async with Remote.opened(own_host=own_url, clock=lambda: NOW) as remote:
        invitation = Invitation(site.url, ADMIN_TOKEN)
        await join(db, remote, invitation, Changes(), own_url=own_url, now=NOW)
        added = await join(db, remote, invitation, Changes(), own_url=own_url, now=NOW)
        wrong = Invitation(site.url, "wrong")
        with pytest.raises(PeerUnreachable, match="401"):
            await join(db, remote, wrong, Changes(), own_url=own_url, now=NOW)

    ours, theirs = await peer_row(db, site.url), await peer_row(db, own_url)
    assert added.peer.token
    assert peers.token_hash(added.peer.token) == theirs["token_hash"]
    assert peers.token_hash(theirs["token"]) == ours["token_hash"]
    page = await Reader(site, added.peer.token).read()
    assert page.status == 200


async def run_cli(dsn: str, *arguments: str, given: str = "") -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "restante", "oplog", "peers", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={"RESTANTE_DATABASE_URL": dsn, "RESTANTE_SELF_URL": "http://a.example", "PATH": ""},
    )
    out, _ = await process.communicate(given.encode())
    return process.returncode or 0, out.decode()


async def test_the_commands_of_the_operator(site: Site, dsn: str, db: Database):
    code, out = await run_cli(dsn, "add", "http://b.example", "--tables", "x,y", "--json")
    token = json.loads(out)["token"]
    read = await ask(site, "GET", SWEEP, headers=bearer(token))
    _, again = await run_cli(
        dsn,
        "add",
        "http://B.example/",
        "--token",
        "their-token",
        "--evict-after-days",
        "7",
        "--json",
    )
    _, joined = await run_cli(dsn, "add", site.url, "--invite", "-", given=f"{ADMIN_TOKEN}\n")
    _, listed = await run_cli(dsn, "list")
    _, removed = await run_cli(dsn, "remove", "http://b.example")
    failed, sentence = await run_cli(dsn, "remove", "http://b.example")
    itself, refusal = await run_cli(dsn, "add", "http://A.example:80")

    assert (code, read.status) == (0, 200)
    assert json.loads(again)["token"] is None
    assert "are peers of each other" in joined
    assert "http://b.example" in listed
    assert (
        "  tokens: both; tables: x, y; relays: any; limits a minute: none; "
        "evicted: after 7 days without reading\n" in listed
    )
    assert "no peer any more" in removed
    assert (failed, itself) == (1, 1)
    assert sentence == "restante: There is no peer http://b.example.\n"
    assert "this node itself" in refusal
