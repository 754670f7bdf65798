"""The acknowledged mark of a feed over HTTP."""

import asyncio
from typing import Any

import pytest
from callers import ADMIN, Answer, Caller, Part, ask, bearer, registered
from sites import Site

pytestmark = pytest.mark.anyio


@pytest.fixture
async def caller(site: Site) -> Caller:
    return await registered(site)


@pytest.fixture
async def connection(connections: Any) -> Any:
    return await connections()


async def acked(caller: Caller, seq: Any) -> Answer:
    return await caller.ask("POST", "/activity/ack", json={"acked_seq": seq})


def mark(seq: int) -> dict[str, int]:
    return {"acked_seq": seq, "last_acked_seq": seq}


async def test_the_acknowledged_mark_only_moves_forward(caller: Caller, connection: Any):
    await caller.staged(*[Part()] * 5)

    for sent, expected in ((2, 2), (2, 2), (1, 2), (0, 2), (4, 4), (5, 5), (3, 5)):
        answer = await acked(caller, sent)
        assert (answer.status, answer.json) == (200, mark(expected))
        assert await connection.fetchval("select acked_seq from feeds") == expected
    assert len(await caller.feed()) == 5


async def test_the_mark_never_passes_the_newest_row(caller: Caller):
    await caller.staged(*[Part()] * 2)

    assert (await acked(caller, 2**63 - 1)).json == mark(2)
    await caller.staged()
    assert (await acked(caller, 3)).json == mark(3)


async def test_the_operator_may_move_the_mark_and_nobody_else(caller: Caller):
    """A canvas acknowledges for an agent that does not."""
    await caller.staged(*[Part()] * 3)
    other, path = await registered(caller.site), f"{caller.path}/activity/ack"

    def moved(seq: int, **headers: str) -> Any:
        return ask(caller.site, "POST", path, json={"acked_seq": seq}, headers=headers)

    assert (await moved(3)).status == 401
    assert (await moved(3, **bearer(other.token))).status == 401
    answer = await moved(2, **ADMIN)

    assert (answer.status, answer.json) == (200, mark(2))
    assert (await acked(caller, 0)).json == mark(2)


async def test_of_concurrent_marks_the_highest_stays(caller: Caller):
    await caller.staged(*[Part()] * 20)

    await asyncio.gather(*(acked(caller, seq) for seq in (7, 19, 3, 20, 11)))

    assert (await acked(caller, 0)).json == mark(20)


async def test_a_wrong_mark_is_a_400_that_names_the_field(caller: Caller):
    for wrong in (-1, "5", 1.5, None, 2**63, 10**40, [1]):
        answer = await acked(caller, wrong)
        assert answer.status == 400, wrong
        assert "acked_seq" in answer.json["error"]
    missing = await caller.ask("POST", "/activity/ack", json={})
    assert (missing.status, "acked_seq" in missing.json["error"]) == (400, True)


async def test_a_mark_from_before_a_restore_does_not_move(caller: Caller):
    """Its seq belongs to another row now, which nobody has handled."""
    await caller.staged(*[Part()] * 3)
    newest, *_ = await caller.feed()

    lost = {"acked_seq": 3, "acked_id": "01900000-0000-0000-0000-000000000000"}
    assert (await caller.ask("POST", "/activity/ack", json=lost)).json == mark(0)
    other = {"acked_seq": 2, "acked_id": newest["id"]}
    assert (await caller.ask("POST", "/activity/ack", json=other)).json == mark(0)
    right = {"acked_seq": 3, "acked_id": newest["id"]}
    assert (await caller.ask("POST", "/activity/ack", json=right)).json == mark(3)
