"""`restante oplog track`, `untrack`, `tables`, `pause` and `resume` in a shell and in a script."""

import json
import re
from typing import Any

import pytest
from oplog.captured import changes_of, log_of
from processes import Outcome, Server, restante

from restante.oplog.positions import Position

pytestmark = pytest.mark.anyio


@pytest.fixture
async def app(connections: Any) -> Any:
    """The application's connection; nothing is tracked."""
    connection = await connections()
    await connection.execute("set search_path = public")
    await connection.execute("create table pages (id text primary key, n integer)")
    return connection


def run(dsn: str, *words: str, **environment: str) -> Outcome:
    return restante("oplog", *words, "--database-url", dsn, seconds=60, **environment)


def output_of(outcome: Outcome) -> str:
    assert (outcome.code, outcome.stderr) == (0, ""), outcome
    assert "\x1b" not in outcome.stdout
    return outcome.stdout


def error_of(outcome: Outcome) -> str:
    """The one line on standard error of a command that failed."""
    assert (outcome.code, outcome.stdout) == (1, ""), outcome
    assert re.fullmatch(r"restante: .*\n", outcome.stderr), outcome.stderr
    return outcome.stderr.strip()


async def test_a_table_is_tracked_paused_resumed_and_untracked(app: Any, dsn: str):
    empty = output_of(run(dsn, "tables"))
    tracked = output_of(run(dsn, "track", "pages", RESTANTE_SELF_URL="https://Node.example/"))
    await app.execute("insert into pages values ('a', 1)")
    (op,) = await log_of(app)
    paused = output_of(run(dsn, "pause", "pages"))
    await app.execute("truncate pages; insert into pages values ('b', 1)")
    resumed = output_of(run(dsn, "resume", "pages"))
    await app.execute("insert into pages values ('c', 1)")
    listed = output_of(run(dsn, "tables"))
    changes = await changes_of(app)
    untracked = output_of(run(dsn, "untrack", "pages"))

    assert "No table is tracked" in empty
    assert tracked == "Changes of public.pages are logged; peers call it pages.\n"
    assert op.host == "https://node.example"
    assert "restante oplog resume pages" in paused
    assert "peers take a snapshot" in resumed
    assert changes == [("c", {"id": "c", "n": 1})]
    assert re.search(r"^tracked +[\d.]+ KiB +\d{4}-.* +id +pages$", listed, re.MULTILINE)
    assert untracked == "pages is not tracked any more; its log is dropped.\n"


async def test_untrack_names_who_has_not_read_everything(app: Any, dsn: str):
    output_of(run(dsn, "track", "pages"))
    await app.execute("insert into pages values ('a', 1)")
    await app.execute(
        "insert into restante.op_peers (host, tables, confirmed, added_at) values"
        " ('https://behind.example', null, '', now()),"
        " ('https://elsewhere.example', '{other}', '', now()),"
        " ('https://done.example', '{pages}', '', now())"
    )
    head = await app.fetchrow("select era, xid, ulid, n from restante.ops")
    await app.execute(
        "update restante.op_peers set confirmed = $1 where host = 'https://done.example'",
        str(Position(*head)),
    )

    untracked = output_of(run(dsn, "untrack", "pages"))

    assert "Note: https://behind.example had not read all of it" in untracked
    assert "elsewhere" not in untracked
    assert "done.example" not in untracked


async def test_options_and_json(app: Any, dsn: str):
    await app.execute("create table files (id serial primary key, slug text unique)")
    await app.execute("insert into files (slug) values ('x')")
    words = ("track", "files", "--as", "Files", "--key-map", "ID=id", "--key-map", "Slug=slug")

    refused = error_of(run(dsn, *words))
    tracked = json.loads(output_of(run(dsn, *words, "--force", "--json")))
    listed = json.loads(output_of(run(dsn, "tables", "--json")))

    assert "--force" in refused
    assert (tracked["name"], tracked["table"]) == ("Files", "public.files")
    assert tracked["key_map"] == {"ID": "id", "Slug": "slug"}
    assert tracked["floor"]
    assert len(tracked["warnings"]) == 2
    assert listed["tables"] == [tracked | {"warnings": []}]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("track", "nothing"),
            "no table public.nothing in the database of Restante. Names are read",
        ),
        (("track", "elsewhere"), "There is one in app, b: write the schema before its name."),
        (("track", "nowhere.elsewhere"), "There is one in app, b: write the schema"),
        (("track", "workspaces"), "There is one in the schema restante, which is Restante's own"),
        (("track", "pages; drop table pages"), "is not the name of a table"),
        (("track", "pages", "--key-map", "broken"), "is not name_in_json=column"),
        (("untrack", "pages"), "pages is not tracked; `restante oplog tables` lists what is."),
        (("pause", "pages"), "pages is not tracked"),
        (("resume", "pages"), "pages is not tracked"),
    ],
)
async def test_errors_are_sentences(app: Any, dsn: str, words: tuple[str, ...], sentence: str):
    await app.execute("create schema app; create table app.elsewhere (id int primary key)")
    await app.execute("create schema b; create table b.elsewhere (id int primary key)")

    assert sentence in error_of(run(dsn, *words))


async def test_a_problem_is_named(app: Any, dsn: str):
    output_of(run(dsn, "track", "pages"))
    await app.execute("drop table pages")

    listed = output_of(run(dsn, "tables"))

    assert "Problem with pages: public.pages was dropped" in listed


def test_it_works_while_a_server_runs(server: Server):
    """Both use the embedded Postgres of the data directory."""
    server.start()

    listed = restante("oplog", "tables", "--data-dir", server.data_dir)

    assert "No table is tracked" in output_of(listed)
