"""
Answers messages with what the user's command printed.

An answer is recorded before it is sent, so that a crash repeats neither the command nor the answer.
To a workspace it is a message whose id is derived from the message that it answers: the server
queues it once, and forwards no repetition to one that it calls.  To the canvas it has no id, but
the feed tells whether it arrived.
"""

from collections.abc import Awaitable, Callable
from uuid import UUID, uuid5

from restante import errors
from restante.client import commands, notifying
from restante.client.aio import AsyncClient
from restante.client.calls import Cursor
from restante.client.messages import text_from
from restante.client.poller import MessageItem
from restante.client.progress import Answer, Progress
from restante.client.retry import is_retryable
from restante.errors import BadRequest, NotAuthenticated, RestanteError

# The server is full, for everybody; the answer is sent when there is room again.
_NO_ROOM = (errors.DatabaseFull, errors.DiskLow, errors.ServerFull, errors.TooMuchWritten)
# The workspace that asked cannot be reached now.
_NOT_NOW = (errors.FeedFull, errors.WorkspaceUnreachable)

# A workspace must not keep the messages of others waiting by refusing its answer.
_MAX_ATTEMPTS = 8

_ANSWER_OF = "answer"


# Runs the command of a message; what it prints goes to the argument.
RunCommand = Callable[[bytearray], Awaitable[None]]


class Answers:
    """Records and sends the answers to a workspace's messages."""

    def __init__(self, client: AsyncClient, progress: Progress) -> None:
        self._client = client
        self._progress = progress
        self._failed_for: UUID | None = None
        self._failures = 0
        self._may_have_arrived = False

    async def answer(self, item: MessageItem, run: RunCommand) -> str | RestanteError | None:
        """
        Run the command of a message and send what it prints; returns that, None for nothing.

        A failure that a retry may fix is raised.  Any other one is returned: the answer is given
        up, so that the messages behind this one are handled.
        """
        answer = self._progress.answer_to(item.row.id)
        if self._failed_for != item.row.id:
            # An earlier run may have sent what it recorded.
            self._may_have_arrived = answer is not None
        if answer is None:
            printed = bytearray()
            await run(printed)
            try:
                text = _text(bytes(printed))
            except BadRequest as error:
                return error
            if not text.strip():
                return None
            answer = await self._recorded(item, text)
        return await self._sent(item, answer)

    async def _recorded(self, item: MessageItem, text: str) -> Answer:
        is_for_canvas = item.row.source_id is None
        since = await notifying.end_of_feed(self._client) if is_for_canvas else Cursor()
        answer = Answer(item.row.id, text, since)
        self._progress.keep_answer(answer)
        return answer

    async def _sent(self, item: MessageItem, answer: Answer) -> str | RestanteError:
        try:
            if item.row.source_id is None:
                await self._client.notify(answer.text, since=answer.since)
            else:
                await item.reply(
                    answer.text,
                    message_id=answer_id(item.row.id),
                    is_repetition=self._may_have_arrived,
                )
        except RestanteError as error:
            self._may_have_arrived = bool(error.facts.get("may_have_arrived", True))
            if self._is_given_up(item, error):
                return error
            raise
        return answer.text

    def _is_given_up(self, item: MessageItem, error: RestanteError) -> bool:
        self._failures = self._failures + 1 if self._failed_for == item.row.id else 1
        self._failed_for = item.row.id
        is_from_peer = item.row.source_id is not None
        if isinstance(error, NotAuthenticated):
            return False
        if is_from_peer and self._failures >= _MAX_ATTEMPTS:
            return True
        may_pass = is_retryable(error) or isinstance(error, _NO_ROOM)
        return not may_pass and not (is_from_peer and isinstance(error, _NOT_NOW))


def answer_id(row_id: UUID) -> str:
    """The id of the answer to a message: the same one in every attempt."""
    return str(uuid5(row_id, _ANSWER_OF))


def _text(printed: bytes) -> str:
    if len(printed) > commands.MAX_PRINTED_BYTES:
        raise BadRequest(
            f"The command printed more than {commands.MAX_PRINTED_BYTES} bytes, which is too long "
            "for an answer."
        )
    return text_from(printed)
