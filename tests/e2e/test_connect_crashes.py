"""
Two workspaces receive while they are killed with -9, the network fails and the server crashes.

Faults are random.  In the end every file that the server accepted is in the folder of its workspace
exactly once, byte for byte, and nothing is pending.  Each run kills a few times; a long run prints
between which steps of `restante connect` the kills happened.
"""

import hashlib
import random
import shutil
import sqlite3
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest
import soak
from connecting import ARRIVED, Connect, Office, size_of
from listeners import Request, reserved_port
from processes import Server, wait_until
from proxies import CALM, Fault, Proxy, calm, stalled_files

from restante.client import Bytes
from restante.errors import RestanteError

SHORT = 5
MIB = 1024 * 1024
LONGEST_WAIT_SECONDS = 1.5
DRAINED_SECONDS = 90

_RANDOM_BYTES = random.Random("Restante").randbytes(5 * MIB)


@dataclass(frozen=True, slots=True)
class Sent:
    """A file that was sent; after a lost answer it may or may not have been accepted."""

    to: Connect
    file: Bytes
    is_confirmed: bool


@dataclass(slots=True)
class World:
    """A server, a network, two workspaces, and a directory for files that users move away."""

    server: Server
    office: Office
    proxy: Proxy
    workspaces: Sequence[Connect]
    taken: Path
    sent: list[Sent] = field(default_factory=list[Sent])

    def send(self, chance: random.Random) -> None:
        """Send a few files to each workspace, in requests of one to three."""
        for to in self.workspaces:
            for _ in range(chance.randint(1, 3)):
                files = [some_file(chance) for _ in range(chance.randint(1, 3))]
                self.sent += self.send_to(to, files)

    def send_to(self, to: Connect, files: Sequence[Bytes]) -> list[Sent]:
        try:
            self.office.send(to, *files)
        except RestanteError:
            return [Sent(to, file, is_confirmed=False) for file in files]
        return [Sent(to, file, is_confirmed=True) for file in files]

    def found(self, at: Connect) -> list[Path]:
        """Every file that a workspace received, moved away or not."""
        return [*at.uploads.iterdir(), *self.taken_from(at).iterdir()]

    def taken_from(self, at: Connect) -> Path:
        return self.taken / at.root.name


def some_file(chance: random.Random) -> Bytes:
    """From one byte to a few mebibytes."""
    ranges = [(1, 10), (1000, 70_000), (MIB // 4, MIB), (MIB, 4 * MIB)]
    size = chance.randint(*chance.choices(ranges, [3, 3, 2, 2])[0])
    start = chance.randrange(len(_RANDOM_BYTES) - size)
    return Bytes(f"{uuid4().hex}.bin", _RANDOM_BYTES[start : start + size])


@pytest.fixture
def world(place: Path) -> Iterator[World]:
    with ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        server = stack.enter_context(Server(place / "data", "--log-level", "warning"))
        server.port = port.getsockname()[1]
        server.started_once().start()
        proxy = stack.enter_context(Proxy(server.port))
        folders = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=fast_disk())))
        workspaces = [
            stack.enter_context(Connect(folders / name, proxy.address)).start()
            for name in ("ana", "ben")
        ]
        taken = folders / "taken"
        for workspace in workspaces:
            (taken / workspace.root.name).mkdir(parents=True)
        office = stack.enter_context(Office(server))
        yield World(server, office, proxy, workspaces, taken)


def fast_disk() -> str | None:
    """A directory in memory: it survives kill -9, and hundreds of runs need no real disk."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


@pytest.mark.soak
def test_every_accepted_file_arrives_once(world: World):
    seen = Tally()

    for run in soak.runs(SHORT):
        with run as chance:
            world.sent = []
            with some_weather(world, chance), some_taker(world, chance):
                kill_now_and_then(world, chance, seen)

            for workspace in world.workspaces:
                world.office.until_nothing_waits(workspace, DRAINED_SECONDS)
                wait_until(lambda w=workspace: not w.partials(), seconds=10, what="no partials")
                assert_each_once(world, workspace)
                forget(world, workspace)
            seen.files += len(world.sent)
    print(seen, flush=True)


def test_downloads_are_resumed_after_a_server_crash(world: World):
    """Each file stalls in the middle, and continues there when the server is back."""
    ana, ben = world.workspaces
    letters = [Bytes(f"{workspace.root.name}.bin", _RANDOM_BYTES) for workspace in (ana, ben)]
    world.proxy.weather = stalled_files(MIB)
    for workspace, letter in zip(world.workspaces, letters, strict=True):
        world.sent += world.send_to(workspace, [letter])
    for workspace in world.workspaces:
        workspace.until_arriving(MIB)

    world.server.kill()
    world.proxy.drop()
    for workspace in world.workspaces:
        workspace.until_said("Trying again")
    world.proxy.weather = calm
    world.server.start()

    for workspace in world.workspaces:
        world.office.until_nothing_waits(workspace, DRAINED_SECONDS)
        assert_each_once(world, workspace)
    asked = [r.headers.get("range") for r in world.proxy.requests if r.path.endswith("/content")]
    assert asked[:2] == [None, None]
    assert set(asked[2:]) == {f"bytes={MIB}-"}


def kill_now_and_then(world: World, chance: random.Random, seen: "Tally") -> None:
    """Send files and kill a workspace while they arrive, several times."""
    with ThreadPoolExecutor(1) as sender:
        sending = [sender.submit(world.send, chance)]
        for _ in range(chance.randint(2, 4)):
            victim = chance.choice(world.workspaces)
            trigger = chance.choice(TRIGGERS)
            trigger(world, victim)
            at_an_instant(chance)
            victim.kill()
            seen.kill(trigger.__name__, state_of(victim))
            sending.append(sender.submit(world.send, random.Random(chance.random())))
            some_outage(world, chance, seen)
            victim.begin()
        for sent in sending:
            sent.result()


def at_an_instant(chance: random.Random) -> None:
    """Sleep for a random time: the moment of the crash is what this run varies."""
    time.sleep(chance.choice([0, 0, chance.uniform(0, 0.01), chance.uniform(0, 0.1)]))


def some_outage(world: World, chance: random.Random, seen: "Tally") -> None:
    """Sometimes cut the network or kill the server while the workspace is down."""
    kind = chance.random()
    if kind < 0.05:
        world.server.kill()
        world.server.start()
        seen.outages["server killed"] += 1
    elif kind < 0.2:
        world.proxy.cut()
        at_an_instant(chance)
        world.proxy.restore()
        seen.outages["network cut"] += 1
    elif kind < 0.3:
        world.proxy.drop()
        seen.outages["connections dropped"] += 1


@contextmanager
def some_weather(world: World, chance: random.Random) -> Iterator[None]:
    """A good network, a slow one, or one that loses one request in ten."""
    kind = chance.choice(["calm", "slow", "stormy"])
    own = random.Random(chance.random())

    def weather(request: Request) -> Fault:
        if kind == "slow":
            return Fault(delay_seconds=0.003)
        if kind == "calm" or own.random() > 0.1:
            return CALM
        return own.choice(
            [
                Fault(is_dropped=True),
                Fault(is_unanswered=True),
                Fault(answer_bytes=own.randrange(MIB)),
                Fault(delay_seconds=0.05),
            ]
        )

    world.proxy.weather = weather
    yield
    world.proxy.weather = calm


@contextmanager
def some_taker(world: World, chance: random.Random) -> Iterator[None]:
    """Sometimes a script moves files away as soon as they appear."""
    stop = threading.Event()

    def take() -> None:
        while not stop.wait(0.0005):
            for workspace in world.workspaces:
                for path in workspace.uploads.iterdir():
                    path.rename(world.taken_from(workspace) / path.name)

    taking = threading.Thread(target=take, daemon=True)
    if chance.random() < 0.3:
        taking.start()
    yield
    stop.set()
    if taking.ident:
        taking.join()


def soon(condition: Callable[[], bool]) -> None:
    """Wait a short time for something that may never happen."""
    give_up_at = time.monotonic() + LONGEST_WAIT_SECONDS
    while not condition() and time.monotonic() < give_up_at:
        time.sleep(0.0002)


def at_any_time(_world: World, _victim: Connect) -> None:
    """Kill at once."""


def when_it_has_begun(_world: World, victim: Connect) -> None:
    soon(lambda: bool(victim.lines))


def when_bytes_arrive(_world: World, victim: Connect) -> None:
    soon(lambda: any(size_of(path) for path in victim.partials()))


def when_a_file_appears(_world: World, victim: Connect) -> None:
    before = {path.name for path in victim.uploads.iterdir()}
    soon(lambda: any(path.name not in before for path in victim.uploads.iterdir()))


def when_a_file_is_acked(world: World, victim: Connect) -> None:
    workspace_id = str(victim.credentials.workspace_id)
    before = acks(world, workspace_id)
    soon(lambda: acks(world, workspace_id) > before)


def when_it_says_received(_world: World, victim: Connect) -> None:
    before = len(victim.lines)
    soon(lambda: any("received" in line for line in victim.lines[before:]))


Trigger = Callable[[World, Connect], None]
TRIGGERS: Sequence[Trigger] = [
    at_any_time,
    when_it_has_begun,
    when_bytes_arrive,
    when_bytes_arrive,
    when_a_file_appears,
    when_a_file_appears,
    when_a_file_is_acked,
    when_a_file_is_acked,
    when_it_says_received,
]


def acks(world: World, workspace_id: str) -> int:
    return sum(
        r.path.endswith("/ack") and workspace_id in r.path for r in list(world.proxy.requests)
    )


def assert_each_once(world: World, at: Connect) -> None:
    """Confirmed files exist once, unconfirmed ones at most once, and no others exist."""
    found = Counter(sent_name(path) for path in world.found(at))
    own = [sent for sent in world.sent if sent.to is at]
    confirmed = {sent.file.name for sent in own if sent.is_confirmed}
    assert set(found.values()) <= {1}, found
    assert confirmed <= found.keys() <= {sent.file.name for sent in own}
    hashes = {sent.file.name: hashlib.sha256(sent.file.content).digest() for sent in own}
    for path in world.found(at):
        assert hashlib.sha256(path.read_bytes()).digest() == hashes[sent_name(path)]


def sent_name(path: Path) -> str:
    match = ARRIVED.fullmatch(path.name)
    assert match, path
    return match[1]


def forget(world: World, at: Connect) -> None:
    """Delete the files, so that the next run detects one that arrives a second time."""
    for path in world.found(at):
        path.unlink()
    world.proxy.requests.clear()


def state_of(killed: Connect) -> str:
    """Between which two steps the process was killed."""
    partials = {path.name.removesuffix(".part"): size_of(path) for path in killed.partials()}
    files, cursor = progress_of(killed)
    unacked = [(file, name) for file, name, state in files if state == "placing"]
    for file, name in unacked:
        has_name = (killed.uploads / name).exists()
        if file in partials:
            return "linked, both names" if has_name else "noted, not placed"
        return "placed, not acked"
    if any(partials.values()):
        return "fetching"
    return "acked, cursor not kept" if len(files) > cursor else "between files"


def progress_of(killed: Connect) -> tuple[list[tuple[str, str, str]], int]:
    """Its records and cursor, read from a copy, so that the original is not recovered here."""
    with tempfile.TemporaryDirectory() as copy:
        for path in killed.arriving.parent.glob("progress.sqlite*"):
            shutil.copy(path, copy)
        connection = sqlite3.connect(Path(copy) / "progress.sqlite")
        try:
            files = connection.execute("select file_id, name, state from files").fetchall()
            cursor = connection.execute("select seq from cursor").fetchone()
        finally:
            connection.close()
    return files, cursor[0] if cursor else 0


class Tally:
    """Counts what happened, for the output of a long run."""

    def __init__(self) -> None:
        self.files = 0
        self.triggers = Counter[str]()
        self.states = Counter[str]()
        self.outages = Counter[str]()

    def kill(self, trigger: str, state: str) -> None:
        self.triggers[trigger] += 1
        self.states[state] += 1

    def __str__(self) -> str:
        counts = "; ".join(
            ", ".join(f"{name} {count}" for name, count in counter.most_common())
            for counter in (self.states, self.triggers, self.outages)
        )
        return f"{self.files} files, {self.states.total()} kills: {counts}"
