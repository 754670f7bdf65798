"""`restante send`, as a person, a pipe and a script meet it."""

import asyncio
import json
import os
import pty
import re
import subprocess
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from callers import ADMIN_TOKEN, Caller, registered
from hypothesis import given
from hypothesis import strategies as st
from impostors import Asked, http, impostor, relay
from processes import RESTANTE, Outcome, clean_environment, restante
from sites import Site

from restante.cli.send import batches
from restante.client.calls import Part
from restante.client.sending import Outgoing
from restante.delivery.rules import MAX_FILE_BYTES, MAX_FILES_PER_REQUEST, MAX_REQUEST_BYTES

pytestmark = pytest.mark.anyio

NOBODY = "11111111-2222-3333-4444-555555555555"


@pytest.fixture
async def caller(shared_site: Site) -> Caller:
    return await registered(shared_site)


@pytest.fixture
def letter(tmp_path: Path) -> Path:
    path = tmp_path / "a letter.txt"
    path.write_bytes(b"Good morning.")
    return path


async def send(url: str, *words: object, token: str = ADMIN_TOKEN) -> Outcome:
    """What a pipe gets."""
    return await asyncio.to_thread(
        restante, "send", *map(str, words), RESTANTE_URL=url, RESTANTE_TOKEN=token
    )


async def waiting(caller: Caller) -> list[str]:
    return [upload["name"] for upload in (await caller.waiting(limit=500)).json["uploads"]]


def told_by(outcome: Outcome) -> str:
    """The one sentence of a refusal."""
    assert (outcome.code, outcome.stdout) == (1, ""), outcome
    assert re.fullmatch(r"restante: .*\n", outcome.stderr), outcome.stderr
    return outcome.stderr


# What is sent


async def test_what_was_accepted_is_printed_a_line_each(caller: Caller, letter: Path):
    done = await send(caller.site.url, caller.id, letter, letter, token=caller.token)

    lines = done.stdout.splitlines()
    assert (done.code, done.stderr) == (0, "")
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("accepted a_letter.txt (13 B): platform-pending:" + caller.id)
    assert await waiting(caller) == ["a_letter.txt"] * 2


async def test_a_script_gets_json(caller: Caller, letter: Path):
    done = await send(caller.site.url, caller.id, letter, "--json")

    (file,) = json.loads(done.stdout)
    assert {name: file[name] for name in ("name", "mimeType", "size")} == {
        "name": "a_letter.txt",
        "mimeType": "text/plain",
        "size": 13,
    }
    (upload,) = (await caller.waiting()).json["uploads"]
    assert file["uri"] == upload["uri"]


async def test_more_files_than_one_request_carries(caller: Caller, tmp_path: Path):
    """Somebody sends a directory full of them."""
    paths = [tmp_path / f"{number:03}" for number in range(70)]
    for path in paths:
        path.write_bytes(b"x")

    done = await send(caller.site.url, caller.id, *paths)

    names = [line.split()[1] for line in done.stdout.splitlines()]
    assert (done.code, done.stderr) == (0, "")
    assert names == [path.name for path in paths]
    assert sorted(await waiting(caller)) == names


async def test_what_was_accepted_before_a_failure_is_told_all_the_same(
    caller: Caller, tmp_path: Path
):
    """Else it would be sent twice the next time."""
    paths = [tmp_path / f"{number:03}" for number in range(70)]
    for path in paths:
        path.write_bytes(b"x")
    pass_on = relay(caller.site)
    full = http(507, {"error": "There is no more room.", "code": "server_full"})
    asked: list[Asked] = []

    async def room_for_one(request: Asked) -> bytes:
        asked.append(request)
        return await pass_on(request) if len(asked) == 1 else full

    async with impostor(room_for_one) as line:
        done = await send(line.url, caller.id, *paths, "--json")

    assert (done.code, done.stderr) == (1, "restante: There is no more room.\n")
    assert [file["name"] for file in json.loads(done.stdout)] == [path.name for path in paths[:64]]
    assert len(await waiting(caller)) == 64


async def test_how_long_they_wait_can_be_said(caller: Caller, letter: Path):
    accepted, refused = await asyncio.gather(
        send(caller.site.url, caller.id, letter, "--ttl-seconds", 90),
        send(caller.site.url, caller.id, letter, "--ttl-seconds", 0),
    )

    assert accepted.code == 0
    assert "ttl_seconds" in told_by(refused)
    (upload,) = (await caller.waiting()).json["uploads"]
    made, ends = (datetime.fromisoformat(upload[at]) for at in ("created_at", "expires_at"))
    assert timedelta(seconds=89) < ends - made < timedelta(seconds=91)


# To whom


async def test_the_admin_can_say_a_name(shared_site: Site, letter: Path):
    named = await registered(shared_site, agent_card={"name": "the only laptop"})

    done = await send(shared_site.url, "the only laptop", letter)

    assert done.code == 0
    assert await waiting(named) == ["a_letter.txt"]


async def test_a_name_that_does_not_tell_is_refused(shared_site: Site, letter: Path):
    twins = [await registered(shared_site, agent_card={"name": "twin"}) for _ in range(2)]

    unknown, doubled, forbidden, nobody = await asyncio.gather(
        send(shared_site.url, "nobody", letter),
        send(shared_site.url, "twin", letter),
        send(shared_site.url, "twin", letter, token=twins[0].token),
        send(shared_site.url, NOBODY, letter),
    )

    assert "no workspace with the id or name nobody" in told_by(unknown)
    assert all(twin.id in told_by(doubled) for twin in twins)
    assert "only the admin can look one up" in told_by(forbidden)
    assert "There is no such workspace" in told_by(nobody)
    assert [await waiting(twin) for twin in twins] == [[], []]


# Mistakes


async def test_a_mistake_in_the_files_is_found_before_anything_is_sent(
    caller: Caller, letter: Path, tmp_path: Path
):
    with (tmp_path / "big").open("wb") as big:
        big.truncate(MAX_FILE_BYTES + 1)

    missing, directory, large, none = await asyncio.gather(
        send(caller.site.url, caller.id, letter, tmp_path / "missing"),
        send(caller.site.url, caller.id, letter, tmp_path),
        send(caller.site.url, caller.id, letter, tmp_path / "big"),
        send(caller.site.url, caller.id),
    )

    assert f"{tmp_path / 'missing'} is not there" in told_by(missing)
    assert "is not a file" in told_by(directory)
    assert f"big has {MAX_FILE_BYTES + 1} bytes" in told_by(large)
    assert "which files" in told_by(none)
    assert await waiting(caller) == []


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["lines", "json"])
async def test_what_a_server_calls_a_file_cannot_steer_a_terminal(letter: Path, form: list[str]):
    evil = "\x1b]0;owned\x07\x9b2Ja\u202e\x7f\r"
    accepted = {"files": [{"uri": evil, "name": evil, "mimeType": evil, "size": 1}]}

    async with impostor(lambda _: http(200, accepted)) as liar:
        done = await send(liar.url, NOBODY, letter, *form)

    assert done.code == 0
    assert done.stdout.replace("\n", "").isprintable()
    if form:
        assert json.loads(done.stdout)[0]["name"] == evil


# On a terminal


def on_a_terminal(url: str, *words: str, **environment: str) -> str:
    """Everything that a person at a terminal sees."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [RESTANTE, "send", *words],
        env=clean_environment(
            TERM="xterm-256color", RESTANTE_URL=url, RESTANTE_TOKEN=ADMIN_TOKEN, **environment
        ),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ):
        os.close(theirs)
        seen = b""
        try:
            while piece := os.read(ours, 4096):
                seen += piece
        except OSError:  # how Linux says that nobody writes any more
            pass
    os.close(ours)
    return seen.decode()


COLOURED = re.compile(r"\x1b\[[0-9;]*(3[0-9]|4[0-9]|9[0-7])[0-9;]*m")


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}], ids=["colours", "none"])
async def test_a_person_sees_a_bar_in_the_colours_they_want(
    caller: Caller, letter: Path, environment: dict[str, str]
):
    seen = await asyncio.to_thread(
        on_a_terminal, caller.site.url, caller.id, str(letter), **environment
    )

    assert "13/13 bytes" in seen
    assert "accepted a_letter.txt" in seen
    assert bool(COLOURED.search(seen)) is not bool(environment)


# Batches


def outgoing(sizes: Sequence[int]) -> list[Outgoing]:
    return [Outgoing(Part(str(n), "", size), b"") for n, size in enumerate(sizes)]


@given(st.lists(st.integers(1, MAX_FILE_BYTES), max_size=200))
def test_every_batch_is_one_that_a_server_takes(sizes: list[int]):
    """In their order, none lost, none empty, and no more requests than need be."""
    files = outgoing(sizes)

    made = list(batches(files)) if files else []

    assert [file for batch in made for file in batch] == files
    assert all(1 <= len(batch) <= MAX_FILES_PER_REQUEST for batch in made)
    totals = [sum(file.part.size for file in batch) for batch in made]
    assert all(total < MAX_REQUEST_BYTES for total in totals)
    for batch, total, following in zip(made, totals, made[1:], strict=False):
        is_full = len(batch) == MAX_FILES_PER_REQUEST
        assert is_full or total + following[0].part.size > MAX_REQUEST_BYTES - 100_000


@pytest.mark.parametrize(
    ("sizes", "lengths"),
    [
        ([1] * 64, [64]),
        ([1] * 65, [64, 1]),
        ([MAX_FILE_BYTES] * 3, [1, 1, 1]),
        ([MAX_FILE_BYTES, 1, MAX_FILE_BYTES], [2, 1]),
        ([10_000_000] * 11, [5, 5, 1]),
    ],
)
def test_files_are_put_together_as_far_as_they_fit(sizes: list[int], lengths: list[int]):
    assert [len(batch) for batch in batches(outgoing(sizes))] == lengths
