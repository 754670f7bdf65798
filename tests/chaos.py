"""
Clients of one workspace that go on whatever happens to the servers, and record what they were told.

They work at any of several servers on one database.  A request without an answer is repeated where
that is safe, and is counted as doubtful where it is not.
"""

import asyncio
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import uuid4

from aiohttp import ClientError
from senders import LOST, UNAVAILABLE, Mailbox, Request, some_request

ABORTED_SHARE = 0.2
LEFT_SHARE = 0.15
REOPENED_SHARE = 0.1
LONG_POLL = "2"

# An answer that says nothing about whether the request was carried out.
NO_ANSWER = {LOST, UNAVAILABLE}
# Of the files' size, of the quotas, or of the time that an upload may take.
REFUSED = {408, 413, 429, 507}
GONE = 404


class Answer(NamedTuple):
    status: int
    body: bytes


@dataclass(slots=True)
class Ledger:
    """What the clients of a workspace sent, and what they were told about it."""

    requests: list[Request] = field(default_factory=list[Request])
    messages: dict[str, int] = field(default_factory=dict[str, int])  # the status of each text
    statuses: Counter[int] = field(default_factory=Counter[int])
    unconfirmed_bytes: int = 0  # of uploads that may have stored bytes and no file

    def sha256_of(self, name: str) -> str:
        (found,) = {
            file.sha256 for request in self.requests for file in request.files if file.name == name
        }
        return found


class Clients:
    """The senders and readers of one workspace."""

    def __init__(self, mailboxes: Sequence[Mailbox], chance: random.Random) -> None:
        self.ledger = Ledger()
        self.id = mailboxes[0].id
        self.readers = [Reader(self), Reader(self)]
        self.is_sending = self.is_reading = True
        self._mailboxes = mailboxes
        self._chance = chance

    @property
    def mailbox(self) -> Mailbox:
        """The workspace at one of the servers."""
        return self._chance.choice(self._mailboxes)

    async def ask(self, method: str, path: str, **options: Any) -> Answer:
        """A request to one of the servers; the status is LOST without an answer."""
        mailbox = self.mailbox
        try:
            async with mailbox.http.request(
                method, mailbox.path + path, headers=mailbox.headers, **options
            ) as answer:
                found = Answer(answer.status, await answer.read())
        except (ClientError, OSError, TimeoutError):
            found = Answer(LOST, b"")
        self.ledger.statuses[found.status] += 1
        return found

    async def insist(self, method: str, path: str, **options: Any) -> Answer:
        """Repeat an idempotent request until there is an answer."""
        while (answer := await self.ask(method, path, **options)).status in NO_ANSWER:
            await self.pause()
        return answer

    async def pause(self) -> None:
        """A server that is away is not asked without a pause."""
        await asyncio.sleep(self._chance.uniform(0.01, 0.1))

    async def send_files(self) -> None:
        """Upload, some with a key; some uploads are aborted, wherever they are."""
        while self.is_sending:
            request = some_request(self._chance)
            self.ledger.requests.append(request)
            if self._chance.random() < ABORTED_SHARE:
                await self._abort(request)
            else:
                await self.send(request)
            await self.pause()

    async def _abort(self, request: Request) -> None:
        try:
            async with asyncio.timeout(self._chance.uniform(0, 0.3)):
                await self._send_once(request)
        except TimeoutError:
            self.ledger.statuses[LOST] += 1

    async def send(self, request: Request) -> None:
        """With a key, until there is an answer; without one, once."""
        await self._send_once(request)
        while request.key and request.status in NO_ANSWER:
            await self.pause()
            await self._send_once(request)

    async def _send_once(self, request: Request) -> None:
        size = sum(len(file.content) for file in request.files)
        self.ledger.unconfirmed_bytes += size
        await self.mailbox.send(request)
        self.ledger.statuses[request.status] += 1
        if request.is_confirmed:
            self.ledger.unconfirmed_bytes -= size
        assert request.status in {200, *NO_ANSWER, *REFUSED}, request.status

    async def send_messages(self) -> None:
        while self.is_sending:
            text = uuid4().hex
            self.ledger.messages[text] = LOST
            parts = {"message": {"parts": [{"kind": "text", "text": text}]}}
            body = {"jsonrpc": "2.0", "method": "message/send", "params": parts}
            answer = await self.ask("POST", "/a2a", json=body)
            self.ledger.messages[text] = answer.status
            assert answer.status in {200, *NO_ANSWER, *REFUSED}, answer
            await self.pause()

    async def take(self, row: dict[str, Any]) -> None:
        """Fetch the file of a row, compare it with what was sent, and acknowledge it."""
        if row["method"] != "chat_upload_receive" or self._chance.random() < LEFT_SHARE:
            return
        file = row["request_body"]
        path = f"/pending-uploads/{file['file_id']}"
        fetched = await self.insist("GET", path + "/content")
        if fetched.status == GONE:  # it was acknowledged after an earlier row about it
            return
        assert fetched.status == 200, fetched
        assert hashlib.sha256(fetched.body).hexdigest() == self.ledger.sha256_of(file["name"])
        acked = await self.insist("POST", path + "/ack")
        assert acked.status == 200, acked
        if self.is_sending and self._chance.random() < REOPENED_SHARE:
            reopened = await self.ask("POST", path + "/reopen")
            assert reopened.status in {200, *NO_ANSWER, *REFUSED}, reopened


class Reader:
    """Follows the feed by its cursor; checks that no row is missing and none comes twice."""

    def __init__(self, clients: Clients) -> None:
        self.last_seq = 0
        self._clients = clients
        self._cursor = {"since_seq": "0"}

    async def follow(self, use: Callable[[dict[str, Any]], Any] | None = None) -> None:
        while self._clients.is_reading:
            query = {**self._cursor, "limit": "20", "wait": LONG_POLL}
            answer = await self._clients.insist("GET", "/activity", params=query)
            assert answer.status == 200, answer
            for row in json.loads(answer.body):
                assert row["seq"] == self.last_seq + 1
                if use:
                    await use(row)
                self.last_seq = row["seq"]
                self._cursor = {"since_id": row["id"]}
