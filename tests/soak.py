"""
Tests with random input: how often they run, and from which seed.

`SOAK_RUNS` is the number of runs, `SOAK_SEED` the first seed; each run has the next seed.
A failure names its seed, and `SOAK_SEED=<seed> SOAK_RUNS=1` begins with that run.

    @pytest.mark.soak
    def test_something_survives():
        for run in soak.runs():
            with run as chance:
                ... chance.random() ...

A test that runs for a time instead takes `one_run()` and `seconds()`; `SOAK_SECONDS` sets the time.
"""

import os
import random
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

# The number of runs of `make test`.
SHORT = 2


@dataclass(frozen=True, slots=True)
class Run:
    """One run; the context yields its random numbers and names the seed if it fails."""

    seed: int

    def __enter__(self) -> random.Random:
        return random.Random(self.seed)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            how = f"again with: SOAK_SEED={self.seed} SOAK_RUNS=1 make soak"
            error.add_note(how)
            print(f"failed; {how}", flush=True)


def runs(short: int = SHORT) -> Iterator[Run]:
    """As many runs as `SOAK_RUNS` says, `short` if it is not set."""
    count = int(os.environ.get("SOAK_RUNS") or short)
    first = _first_seed()
    for number in range(count):
        print(f"run {number + 1} of {count}, seed {first + number}", flush=True)
        yield Run(first + number)


def one_run() -> Run:
    """A single run, whatever `SOAK_RUNS` says."""
    run = Run(_first_seed())
    print(f"seed {run.seed}", flush=True)
    return run


def seconds(short: float, long: float) -> float:
    """The time in `make test`, and in `make soak` unless `SOAK_SECONDS` sets another."""
    return float(os.environ.get("SOAK_SECONDS") or (long if is_long() else short))


def is_long() -> bool:
    """Whether this is `make soak`."""
    return bool(os.environ.get("SOAK_RUNS"))


# For tests that take minutes, or all of a machine.
only_long = pytest.mark.skipif(not is_long(), reason="only `make soak` runs it")


def _first_seed() -> int:
    return int(os.environ.get("SOAK_SEED") or secrets.randbelow(2**31))
