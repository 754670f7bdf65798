"""`restante send` on a terminal, in a pipe and in a script."""

import asyncio
import json
import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from callers import ADMIN_TOKEN, Caller, ask, bearer, registered
from hypothesis import given, strategies as st
from impostors import Asked, http, impostor, one_after_another, relay
from listeners import Request
from processes import Outcome, on_a_terminal, restante
from proxies import CALM, Fault, Proxy
from sites import Site

from restante.cli.send import batches
from restante.client.calls import Part
from restante.client.sending import DEFAULT_UPLOAD_LIMITS, Outgoing
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
    """Run the command with its output in pipes."""
    return await asyncio.to_thread(
        restante, "send", *map(str, words), RESTANTE_URL=url, RESTANTE_TOKEN=token
    )


async def waiting(caller: Caller) -> list[str]:
    return [upload["name"] for upload in (await caller.waiting(limit=500)).json["uploads"]]


def error_of(outcome: Outcome) -> str:
    """The one line on standard error of a command that failed."""
    assert (outcome.code, outcome.stdout) == (1, ""), outcome
    assert re.fullmatch(r"restante: .*\n", outcome.stderr), outcome.stderr
    return outcome.stderr


# Sending


async def test_each_accepted_file_is_printed_on_a_line(caller: Caller, letter: Path):
    done = await send(caller.site.url, caller.id, letter, letter, token=caller.token)

    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "sent            13 B  a letter.txt",
        "sent            13 B  a letter.txt as a letter (2).txt",
        "2 files sent, 26 B.",
    ]
    assert sorted(await waiting(caller)) == ["a_letter.txt", "a_letter__2_.txt"]


async def test_json_lists_the_accepted_files(caller: Caller, letter: Path):
    done = await send(caller.site.url, caller.id, letter, "--json")

    (file,) = json.loads(done.stdout)
    assert {name: file[name] for name in ("name", "mimeType", "size")} == {
        "name": "a_letter.txt",
        "mimeType": "text/plain",
        "size": 13,
    }
    (upload,) = (await caller.waiting()).json["uploads"]
    assert file["uri"] == upload["uri"]


async def test_more_files_than_fit_into_one_request(caller: Caller, tmp_path: Path):
    """For example, all files of a directory."""
    paths = [tmp_path / f"{number:03}" for number in range(MAX_FILES_PER_REQUEST + 6)]
    for path in paths:
        path.write_bytes(b"x")

    done = await send(caller.site.url, caller.id, *paths)

    *lines, summary = done.stdout.splitlines()
    names = [line.split()[-1] for line in lines]
    assert (done.code, done.stderr) == (0, "")
    assert summary.startswith(f"{len(paths)} files sent, {len(paths)} B")
    assert names == [path.name for path in paths]
    assert sorted(await waiting(caller)) == names


async def test_files_accepted_before_a_failure_are_printed(caller: Caller, tmp_path: Path):
    """Otherwise the user would send them again."""
    paths = [tmp_path / f"{number:03}" for number in range(MAX_FILES_PER_REQUEST + 6)]
    for path in paths:
        path.write_bytes(b"x")
    pass_on = relay(caller.site)
    full = http(507, {"error": "There is no more room.", "code": "server_full"})
    requests: list[Asked] = []

    async def accept_one_request(request: Asked) -> bytes:
        if request.method == "GET":
            return await pass_on(request)
        requests.append(request)
        return await pass_on(request) if len(requests) == 1 else full

    async with impostor(accept_one_request) as proxy:
        done = await send(proxy.url, caller.id, *paths, "--json")

    names = [path.name for path in paths[:MAX_FILES_PER_REQUEST]]
    assert (done.code, done.stderr) == (1, "restante: There is no more room.\n")
    assert [file["name"] for file in json.loads(done.stdout)] == names
    assert len(await waiting(caller)) == MAX_FILES_PER_REQUEST


async def test_ttl_seconds_sets_when_the_files_expire(caller: Caller, letter: Path):
    accepted, refused = await asyncio.gather(
        send(caller.site.url, caller.id, letter, "--ttl-seconds", 90),
        send(caller.site.url, caller.id, letter, "--ttl-seconds", 0),
    )

    assert accepted.code == 0
    assert "ttl_seconds" in error_of(refused)
    (upload,) = (await caller.waiting()).json["uploads"]
    made, ends = (datetime.fromisoformat(upload[at]) for at in ("created_at", "expires_at"))
    assert timedelta(seconds=89) < ends - made < timedelta(seconds=91)


# Lost answers


async def test_a_lost_answer_is_retried_with_the_same_key_and_stored_once(
    caller: Caller, letter: Path
):
    """Each batch is a request of its own, and has a key of its own."""
    lost = list[str]()

    def loses_the_first_answers(request: Request) -> Fault:
        key = request.headers.get("idempotency-key", "")
        if request.path.endswith("/chat/uploads") and lost.count(key) < 2:
            lost.append(key)
            return Fault(is_unanswered=True)
        return CALM

    port = int(caller.site.url.rpartition(":")[2])
    many = [letter] * (MAX_FILES_PER_REQUEST + 1)
    with Proxy(port) as proxy:
        proxy.weather = loses_the_first_answers
        done = await send(proxy.address, caller.id, *many)

    assert done.code == 0, done
    assert len(await waiting(caller)) == len(many)
    first, again, second, second_again = lost
    assert first == again != second == second_again


async def test_an_unknown_outcome_is_retried_with_the_same_key(letter: Path):
    no_limits = http(404, {"error": "There is nothing here.", "code": "no_such_route"})
    unknown = http(503, {"error": "It may be stored.", "code": "outcome_unknown"})
    accepted = http(200, {"files": []})

    async with impostor(one_after_another(no_limits, unknown, accepted)) as other:
        assert (await send(other.url, NOBODY, letter)).code == 0

    first, second = (asked.headers["Idempotency-Key"] for asked in other.asked[1:])
    assert first == second


# The recipient


async def test_the_admin_can_use_a_name(shared_site: Site, letter: Path):
    named = await registered(shared_site, agent_card={"name": "the only laptop"})

    done = await send(shared_site.url, "the only laptop", letter)

    assert done.code == 0
    assert await waiting(named) == ["a_letter.txt"]


async def test_of_workspaces_with_one_name_the_last_seen_comes_first(
    shared_site: Site, letter: Path
):
    """Anybody may register a name again; `send` never guesses, and shows what tells them apart."""
    impostors = [await registered(shared_site, agent_card={"name": "popular"}) for _ in range(11)]
    online = impostors[4]
    sent = {"workspace_id": online.id, "active_tasks": 1}  # an unchanged one might not be written
    beat = await ask(
        shared_site, "POST", "/registry/heartbeat", json=sent, headers=bearer(online.token)
    )
    assert beat.status == 200

    said = error_of(await send(shared_site.url, "popular", letter))

    assert re.search(
        rf"Use the id: {online.id}, last seen \d{{4}}-[^;]*, registered \d{{4}}-", said
    )
    assert "More than 10 workspaces are named popular." in said
    assert said.count("last seen") == 10
    assert (await send(shared_site.url, online.id, letter)).code == 0
    assert await waiting(online) == ["a_letter.txt"]


async def test_an_unknown_or_ambiguous_recipient_is_refused(shared_site: Site, letter: Path):
    twins = [await registered(shared_site, agent_card={"name": "twin"}) for _ in range(2)]

    unknown, ambiguous, forbidden, nobody = await asyncio.gather(
        send(shared_site.url, "nobody", letter),
        send(shared_site.url, "twin", letter),
        send(shared_site.url, "twin", letter, token=twins[0].token),
        send(shared_site.url, NOBODY, letter),
    )

    assert "no workspace with the id or name nobody" in error_of(unknown)
    assert all(twin.id in error_of(ambiguous) for twin in twins)
    assert "2 workspaces are named twin. Use the id: " in error_of(ambiguous)
    assert "only the admin can look one up" in error_of(forbidden)
    assert "There is no such workspace" in error_of(nobody)
    assert [await waiting(twin) for twin in twins] == [[], []]


# The server's limits


def limited(per_file: int, per_request: int, files: int) -> bytes:
    """The answer of a server whose operator has set other limits."""
    limits = {"per_file_bytes": per_file, "per_request_bytes": per_request}
    return http(200, limits | {"max_attachments_per_message": files})


async def sizes_sent(answer: bytes, *paths: Path) -> tuple[Outcome, list[int]]:
    """Send to a server with these limits; returns how many files each request had."""

    def accept(asked: Asked) -> bytes:
        return answer if asked.path == "/uploads/limits" else http(200, {"files": []})

    async with impostor(accept) as other:
        done = await send(other.url, NOBODY, *paths)
    return done, [asked.body.count(b"filename=") for asked in other.asked if asked.body]


async def test_requests_are_as_large_as_the_server_takes_them(tmp_path: Path):
    paths = [tmp_path / f"{number}.bin" for number in range(5)]
    for path in paths:
        path.write_bytes(bytes(100_000))

    fewer, larger, smaller, nonsense = await asyncio.gather(
        sizes_sent(limited(10**6, 10**6, 2), *paths),
        sizes_sent(limited(10**6, 10**6, 100), *paths),
        sizes_sent(limited(10**6, 300_000, 100), *paths),
        sizes_sent(limited(10**6, -1, 0), *paths),
    )

    assert [done.code for done, _ in (fewer, larger, smaller, nonsense)] == [0] * 4
    assert fewer[1] == [2, 2, 1]
    assert larger[1] == [5]
    assert smaller[1] == [2, 2, 1]
    assert nonsense[1] == [1] * 5


async def test_a_file_above_the_servers_limit_is_not_sent(letter: Path):
    done, sent = await sizes_sent(limited(12, 100, 1), letter)

    assert "a letter.txt has 13 bytes; the server accepts at most 12" in error_of(done)
    assert sent == []


@pytest.mark.parametrize(
    "answer", [http(404, {"error": "x", "code": "no_such_route"}), http(200, b"<html>")]
)
async def test_a_server_that_says_no_limits_has_the_default_ones(letter: Path, answer: bytes):
    """An earlier one has no such route, and some answer with a page of their own."""
    done, sent = await sizes_sent(answer, *[letter] * (MAX_FILES_PER_REQUEST + 1))

    assert done.code == 0
    assert sent == [MAX_FILES_PER_REQUEST, 1]


# Mistakes


async def test_all_files_are_checked_before_the_first_is_sent(
    caller: Caller, letter: Path, tmp_path: Path
):
    with (tmp_path / "big").open("wb") as big:
        big.truncate(MAX_FILE_BYTES + 1)

    missing, large, none = await asyncio.gather(
        send(caller.site.url, caller.id, letter, tmp_path / "missing"),
        send(caller.site.url, caller.id, letter, tmp_path / "big"),
        send(caller.site.url, caller.id),
    )

    assert f"{tmp_path / 'missing'} is not there" in error_of(missing)
    assert f"big has {MAX_FILE_BYTES + 1} bytes" in error_of(large)
    assert "which files" in error_of(none)
    assert await waiting(caller) == []


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["lines", "json"])
async def test_control_characters_from_the_server_are_not_printed(letter: Path, form: list[str]):
    evil = "\x1b]0;owned\x07\x9b2Ja\u202e\x7f\r"
    accepted = {"files": [{"uri": evil, "name": evil, "mimeType": evil, "size": 1}]}

    async with impostor(lambda _: http(200, accepted)) as liar:
        done = await send(liar.url, NOBODY, letter, *form)

    assert done.code == 0
    assert done.stdout.replace("\n", "").isprintable()
    if form:
        assert json.loads(done.stdout)[0]["name"] == evil


# On a terminal


COLOURED = re.compile(r"\x1b\[[0-9;]*(3[0-9]|4[0-9]|9[0-7])[0-9;]*m")


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}], ids=["colours", "none"])
async def test_a_terminal_shows_a_live_line_and_honours_no_color(
    caller: Caller, letter: Path, environment: dict[str, str]
):
    seen = await asyncio.to_thread(
        on_a_terminal,
        *("send", caller.id, letter),
        RESTANTE_URL=caller.site.url,
        RESTANTE_TOKEN=ADMIN_TOKEN,
        **environment,
    )

    assert "sending 1 of 1 file · " in seen
    assert "13 B  a letter.txt\r\n" in seen
    assert "\x1b[2K1 file sent, 13 B" in seen  # the live line is erased before
    assert bool(COLOURED.search(seen)) is not bool(environment)


# Batches


def outgoing(sizes: Sequence[int]) -> list[Outgoing]:
    return [Outgoing(Part(str(n), "", size), b"") for n, size in enumerate(sizes)]


@given(st.lists(st.integers(1, MAX_FILE_BYTES), max_size=200))
def test_every_batch_is_within_the_limits_of_a_request(sizes: list[int]):
    """The order is kept, no file is lost, no batch is empty, and there are as few as possible."""
    files = outgoing(sizes)

    made = list(batches(files, DEFAULT_UPLOAD_LIMITS)) if files else []

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
        ([1] * MAX_FILES_PER_REQUEST, [MAX_FILES_PER_REQUEST]),
        ([1] * (MAX_FILES_PER_REQUEST + 1), [MAX_FILES_PER_REQUEST, 1]),
        ([MAX_FILE_BYTES] * 3, [1, 1, 1]),
        ([MAX_FILE_BYTES, 1, MAX_FILE_BYTES], [2, 1]),
        ([10_000_000] * 11, [5, 5, 1]),
    ],
)
def test_a_batch_holds_as_many_files_as_fit(sizes: list[int], lengths: list[int]):
    assert [len(batch) for batch in batches(outgoing(sizes), DEFAULT_UPLOAD_LIMITS)] == lengths
