"""Everything works through nginx with TLS, as `deploy/nginx.conf` configures it."""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from callers import Caller, Part, ask, pattern, register, registered
from cluster import cloned
from deploy.fronts import NGINX, OPENSSL, Front, in_front_of
from processes import restante
from sites import ADMIN_TOKEN, Site, running_site, settings_for
from waiting import until
from watchers import WAYS, append, is_watched_by, watch

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not NGINX, reason="nginx is not installed (Debian: nginx-light)"),
    pytest.mark.skipif(not OPENSSL, reason="openssl is not installed"),
]

MIB = 1024 * 1024


class Public(NamedTuple):
    """A server and its nginx."""

    front: Front
    site: Site  # as clients see it


@pytest.fixture(scope="module")
async def public(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Public]:
    place = tmp_path_factory.mktemp("front")
    async with cloned(cluster) as dsn:
        settings = settings_for(dsn, place, trusted_proxies="127.0.0.1")
        async with (
            running_site(settings, with_jobs=False) as site,
            in_front_of(site, place) as (front, outside),
        ):
            yield Public(front, outside)


async def command(public: Public, *words: str | Path) -> None:
    """Run a command of a client that trusts the certificate; it must succeed."""
    run = partial(
        restante,
        *words,
        SSL_CERT_FILE=str(public.front.certificate),
        RESTANTE_URL=public.front.url,
        RESTANTE_TOKEN=ADMIN_TOKEN,
    )
    outcome = await asyncio.to_thread(run)
    assert outcome.code == 0, outcome.stderr


async def test_a_file_is_sent_and_received(public: Public, tmp_path: Path):
    file = tmp_path / "a file.txt"
    file.write_text("through nginx")
    connect = ["connect", public.front.url, "--into", tmp_path / "inbox", "--once"]

    await command(public, *connect, "--name", "laptop")
    await command(public, "send", "laptop", file)
    await command(public, *connect)

    assert (tmp_path / "inbox" / "a file.txt").read_text() == "through nginx"


@pytest.mark.parametrize("way", WAYS)
async def test_a_watcher_sees_each_row_at_once(public: Public, way: str):
    """A proxy that buffers would keep events back until there are many."""
    caller = await registered(public.site)
    page = {"Origin": public.front.url}

    async with watch(caller, way, headers=page) as watcher:
        for number in range(3):
            await append(caller, str(number))
            assert await watcher.summaries(1) == [str(number)]


async def test_fifty_mib_go_through_without_touching_a_disk(public: Public):
    caller = await registered(public.site)
    contents = [pattern(25 * MIB, seed) for seed in range(2)]

    files = await caller.staged(*(Part(content) for content in contents))
    fetched = [(await caller.fetch(file)).body for file in files]

    assert fetched == contents
    assert "buffered to a temporary file" not in public.front.said


async def test_a_refusal_of_the_server_reaches_the_sender(public: Public):
    """And is not replaced by a page of nginx's."""
    caller = await registered(public.site)

    answer = await caller.upload(Part(bytes(25 * MIB + 1)))

    assert (answer.status, answer.json["code"]) == (413, "file_too_large")


async def poll(caller: Caller, after: int, seconds: int = 20) -> list[dict[str, Any]]:
    return await caller.feed(since_seq=after, wait=seconds)


async def test_long_polls_outlive_a_reload(public: Public):
    caller = await registered(public.site)
    polls = [asyncio.create_task(poll(caller, 0)) for _ in range(4)]
    await until(partial(is_watched_by, public.site, 4))

    await asyncio.to_thread(public.front.reload)
    await append(caller, "after the reload")

    rows = await asyncio.gather(*polls)
    assert [[row["summary"] for row in page] for page in rows] == [["after the reload"]] * 4


async def test_a_reader_misses_nothing_while_nginx_reloads(public: Public):
    caller = await registered(public.site)
    seen: list[str] = []

    async def read() -> None:
        after = 0
        while len(seen) < 12:
            for row in await poll(caller, after):
                seen.append(row["summary"])
                after = row["seq"]

    reading = asyncio.create_task(read())
    for number in range(12):
        await append(caller, str(number))
        if number % 4 == 0:
            await asyncio.to_thread(public.front.reload)
    await reading

    assert seen == [str(number) for number in range(12)]


async def test_what_a_client_says_about_itself_is_replaced(public: Public):
    """It would be refused as somebody from elsewhere, if nginx passed the header on."""
    sent = {"X-Forwarded-For": "198.51.100.7", "X-Forwarded-Host": "evil.example"}

    answer = await register(public.site, headers=sent)

    assert answer.status == 200


async def test_plain_http_is_sent_to_tls(public: Public):
    plain = f"http://localhost:{public.front.plain}/health?x=1"

    answer = await ask(public.site, "GET", plain, allow_redirects=False)

    assert answer.status == 301
    assert answer.headers["Location"] == "https://localhost/health?x=1"


async def test_the_answers_are_those_of_the_server(public: Public):
    answer = await ask(public.site, "GET", "/health/")

    assert json.loads(answer.body)["status"] == "ok"


async def test_a_token_in_a_query_is_not_in_the_log_of_nginx(public: Public):
    caller = await registered(public.site)
    answer = await ask(public.site, "GET", f"{caller.path}/activity?access_token={caller.token}")
    request_id = answer.headers["X-Request-ID"]
    await until(lambda: request_id in public.front.logged)

    assert f"GET {caller.path}/activity HTTP/1.1" in public.front.logged
    assert caller.token not in public.front.logged
