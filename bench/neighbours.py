"""
What a hostile workspace can do to a quiet one.

The latencies of a quiet client are measured on an idle server, then during an attack; each attack
has a new server with the default settings.  Server, quiet client and attacker are processes of
their own.  On few processors they compete: the attack `nothing` only keeps a processor busy, and
shows how much of a ratio is due to that.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.hostile import ATTACKS, stalled_pushes
from bench.quiet import Latencies, Measured, Quiet
from bench.server import Running, running

AIM = 3.0

_SECONDS = 5.0
# The first second of an attack opens its connections.
_RAMP_SECONDS = 1.0
_TICKS = os.sysconf("SC_CLK_TCK")


async def measure(_server: Running) -> None:
    """Run every attack, or those that `BENCH_ATTACKS` names."""
    wanted = os.environ.get("BENCH_ATTACKS", "").split() or list(ATTACKS)
    print(_HEADING, flush=True)
    for name in wanted:
        # A server calls no loopback address by default, and only there do we have workspaces.
        pushes = name == stalled_pushes.__name__
        settings = {"RESTANTE_PUSH_TO_PRIVATE": "true"} if pushes else {}
        with running(settings) as server:
            async with Quiet.opened(server, pushes=pushes) as quiet:
                for line in (await _attacked(server, quiet, name)).lines():
                    print(line, flush=True)


async def _attacked(server: Running, quiet: Quiet, name: str) -> "Outcome":
    await quiet.measure(2)  # the first requests of a process are slow
    idle = await quiet.measure(_SECONDS)
    async with attacking(name, server) as attack:
        await asyncio.sleep(_RAMP_SECONDS)
        used = CpuTime.of(server, attack.pid)
        attacked = await quiet.measure(_SECONDS)
        used = CpuTime.of(server, attack.pid).since(used)
    return Outcome(name, idle, attacked, used, server.memory_mib("VmHWM"), attack.answers)


@dataclass(slots=True)
class Attacking:
    """A running attack; at its end, the answers that it got by status."""

    pid: int
    answers: Mapping[str, int]


@asynccontextmanager
async def attacking(name: str, server: Running) -> AsyncIterator[Attacking]:
    """Attack in a process of its own; begins when the attack has been prepared."""
    command = [sys.executable, "-m", "bench.hostile", name, msgspec.json.encode(server).decode()]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    attack = Attacking(process.pid, {})
    try:
        assert await process.stdout.readline() == b"begun\n"
        yield attack
        output, _ = await process.communicate(b"")
        attack.answers = msgspec.json.decode(output, type=dict[str, int])
    finally:
        if process.returncode is None:
            process.kill()


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Seconds of processor time: the server, its Postgres, and the attacker."""

    taken_at: float
    server: float
    postgres: float
    attacker: float

    @classmethod
    def of(cls, server: Running, attacker: int) -> "CpuTime":
        postmasters = _children(server.pid)
        backends = [child for pid in postmasters for child in _children(pid)]
        return cls(
            time.monotonic(),
            _cpu_seconds([server.pid]),
            _cpu_seconds([*postmasters, *backends]),
            _cpu_seconds([attacker]),
        )

    def since(self, before: "CpuTime") -> "CpuTime":
        return CpuTime(
            self.taken_at - before.taken_at,
            self.server - before.server,
            self.postgres - before.postgres,
            self.attacker - before.attacker,
        )

    def __str__(self) -> str:
        """In processors, where 1.00 is one that is always busy."""
        shares = {"server": self.server, "Postgres": self.postgres, "attacker": self.attacker}
        return ", ".join(f"{name} {used / self.taken_at:.2f}" for name, used in shares.items())


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time, with that of children that have ended."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS


_HEADING = (
    f"{'':20}{'':10}{'idle':>8}{'':8}{'  under attack':16}\n"
    f"{'attack':20}{'operation':10}{'p50':>8}{'p95':>8}{'p50':>8}{'p95':>8}{'ratio':>8}"
    "   (ms; the ratio is that of the p95)"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The latencies of a quiet client before and during an attack."""

    attack: str
    idle: Measured
    attacked: Measured
    used: CpuTime
    memory_mib: float
    answers: Mapping[str, int]

    def lines(self) -> list[str]:
        ratios = {name: self.attacked[name].p95 / self.idle[name].p95 for name in sorted(self.idle)}
        worst = max(ratios.values())
        reached = "reached" if worst <= AIM else "MISSED"
        answers = ", ".join(f"{kind} {count:,}" for kind, count in sorted(self.answers.items()))
        failed = sum(latencies.failed for latencies in self.attacked.values())
        return [
            *(self._line(name, ratio) for name, ratio in ratios.items()),
            f"{'':20}worst {worst:.1f}, aim {AIM:g}: {reached}; {failed} operations failed",
            f"{'':20}processors: {self.used}; the server's memory {self.memory_mib:,.0f} MiB",
            f"{'':20}answers to the attacker: {answers or 'none'}",
        ]

    def _line(self, name: str, ratio: float) -> str:
        times = _times(self.idle[name]) + _times(self.attacked[name])
        return f"{self.attack:20}{name:10}{times}{ratio:8.1f}"


def _times(latencies: Latencies) -> str:
    return f"{latencies.p50 * 1000:8.1f}{latencies.p95 * 1000:8.1f}"
