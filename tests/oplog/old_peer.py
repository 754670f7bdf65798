"""
A node that speaks only the older protocol: it keeps ops and cursors by ULID, knows no versions,
shows no credentials, and asks for one page at a time.
"""

import asyncio
import itertools
import json
import random
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit
from urllib.request import Request as HttpRequest, urlopen
from uuid import UUID, uuid4

from listeners import Listener, Request

from restante.oplog import ulids

_PAGE = 10_000
_LAST_SCANNED = "X-Crud-Sweep-Last-Scanned-Ulid"


class OldPeer(Listener):
    """Serves its ops in the order of their ULIDs, and applies what it reads as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: dict[str, Any] = {}  # by ULID
        self.rows: dict[str, Any] = {}
        self.cursors: dict[str, str] = {}
        self.gaps = 0
        self.is_reading = True
        self.failures: list[str] = []

    def write(self, *records: dict[str, Any], action: str = "update") -> None:
        """Change records of its own table; one op."""
        now = ulids.lowest_at(datetime.now(UTC)).int
        ulid = ulids.text_of(UUID(int=now | uuid4().int & (2**80 - 1)))
        self._apply(
            {
                "ulid": ulid,
                "host": self.address,
                "action": action,
                "table": "notes",
                "data": list(records),
                "transient": False,
            }
        )

    async def exchange(self, url: str, chance: random.Random) -> None:
        """Read from a node, and write records of its own, until it is told to stop."""
        for number in itertools.takewhile(lambda _: self.is_reading, itertools.count()):
            self.write({"id": f"old{number % 7}", "body": f"old-{number}", "size": number})
            if chance.random() < 0.2:
                self.write({"id": f"old{chance.randrange(7)}"}, action="delete")
            await asyncio.to_thread(self.pull, url)
            await asyncio.sleep(chance.uniform(0, 0.3))

    def pull(self, url: str) -> None:
        """One page of a node; a node that does not answer is asked again later."""
        after = self.cursors.get(url, "")
        request = HttpRequest(
            f"{url}/internal/crud/sweep?after={after}",
            headers={"User-Agent": f"mediorum {self.address}"},
        )
        try:
            with urlopen(request, timeout=10) as answer:
                headers, ops = answer.headers, json.load(answer)
        except (OSError, ValueError) as error:
            self.failures.append(str(error))
            return
        if after and headers.get("X-Mediorum-Retention-Gap") == "true":
            self.gaps += 1
            after = max(after, headers.get("X-Mediorum-Available-Min-Ulid", ""))
        for op in ops:
            self._apply(op)
            after = op["ulid"]
        scanned = headers.get(_LAST_SCANNED, "")
        self.cursors[url] = scanned if not ops and scanned > after else after

    def _apply(self, op: dict[str, Any]) -> None:
        if op["ulid"] in self.ops:
            return
        self.ops[op["ulid"]] = op
        for record in op["data"]:
            match op["action"]:
                case "create":
                    self.rows.setdefault(record["id"], record)
                case "update":
                    self.rows[record["id"]] = record
                case _:
                    self.rows.pop(record["id"], None)

    async def _answer_each(
        self, asked: "asyncio.Queue[Request]", writer: asyncio.StreamWriter
    ) -> None:
        while True:
            request = await asked.get()
            status, body = self._answer(request.path)
            head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n"
            writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)

    def _answer(self, path: str) -> tuple[str, bytes]:
        asked = urlsplit(path)
        if asked.path != "/internal/crud/sweep":
            return "404 Not Found", b""
        after = parse_qs(asked.query).get("after", [""])[0]
        page = [op for ulid, op in sorted(self.ops.items()) if ulid > after][:_PAGE]
        return "200 OK", json.dumps(page).encode()
