"""An answer to a workspace that the server calls directly is not sent to it a second time."""

from pathlib import Path
from uuid import uuid4

import msgspec
import pytest
from factories import NOW
from impostors import http, impostor, one_after_another

from restante import wire
from restante.client import AsyncClient, Cursor, MessageItem
from restante.client.answering import Answers
from restante.client.progress import Answer, Progress
from restante.errors import OutcomeUnknown, ServerUnreachable

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_delays")]

UNKNOWN = {"error": "Not known.", "code": "outcome_unknown", "delivery_mode": "push"}


@pytest.fixture
def progress(tmp_path: Path) -> Progress:
    return Progress.open(tmp_path / "progress.sqlite")


def message(client: AsyncClient) -> MessageItem:
    """A message of another workspace."""
    row = wire.ActivityRow(
        id=uuid4(),
        workspace_id=client.workspace_id,
        activity_type="a2a_receive",
        source_id=uuid4(),
        target_id=client.workspace_id,
        method="message/send",
        summary=None,
        request_body=msgspec.Raw(b"{}"),
        response_body=msgspec.Raw(b"null"),
        duration_ms=None,
        status="ok",
        error_detail=None,
        created_at=NOW,
        seq=1,
    )
    return MessageItem(client, row)


async def say_done(printed: bytearray) -> None:
    printed += b"Done."


async def test_an_answer_of_an_earlier_run_is_a_repetition_and_may_be_given_up(progress: Progress):
    """That run may have sent it before it was killed."""
    async with (
        impostor(one_after_another(http(503, UNKNOWN))) as server,
        AsyncClient(server.url, token="t", workspace_id=uuid4()) as client,
    ):
        item = message(client)
        progress.keep_answer(Answer(item.row.id, "Done.", Cursor()))

        outcome = await Answers(client, progress).answer(item, say_done)

    assert isinstance(outcome, OutcomeUnknown)
    assert [asked.headers.get(wire.ATTEMPT) for asked in server.asked] == ["2"]


async def test_an_answer_that_did_not_reach_the_server_is_no_repetition(progress: Progress):
    async with AsyncClient("http://127.0.0.1:1", token="t", workspace_id=uuid4()) as nowhere:
        item = message(nowhere)
        answers = Answers(nowhere, progress)
        with pytest.raises(ServerUnreachable):
            await answers.answer(item, say_done)
    async with (
        impostor(one_after_another(http(200, {}))) as server,
        AsyncClient(server.url, token="t", workspace_id=uuid4()) as client,
    ):
        outcome = await answers.answer(MessageItem(client, item.row), say_done)

    assert outcome == "Done."
    assert [asked.headers.get(wire.ATTEMPT) for asked in server.asked] == [None]
