"""Prints each figure with its reference and its target."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value and its reference, one pair per round."""

    name: str
    unit: str
    ours: Sequence[float]
    floor: Sequence[float]
    floor_name: str
    aim: float

    @property
    def ratios(self) -> list[float]:
        return [ours / floor for ours, floor in zip(self.ours, self.floor, strict=True)]

    def lines(self) -> list[str]:
        ratio = statistics.median(self.ratios)
        spread = f"{min(self.ratios):.2f} to {max(self.ratios):.2f}"
        reached = "reached" if ratio >= self.aim else "MISSED"
        ours, floor = statistics.median(self.ours), statistics.median(self.floor)
        return [
            self.name,
            f"    ours {ours:,.0f} {self.unit}, {self.floor_name} {floor:,.0f} {self.unit}",
            f"    ratio {ratio:.2f} ({spread} of {len(self.ratios)}), aim {self.aim}: {reached}",
        ]


@dataclass(frozen=True, slots=True)
class Bound:
    """A measured value that should stay below a limit."""

    name: str
    unit: str
    value: float
    aim: float
    detail: str = ""

    def lines(self) -> list[str]:
        reached = "reached" if self.value < self.aim else "MISSED"
        shown = f"    {self.value:,.1f} {self.unit}, aim below {self.aim:g}: {reached}"
        return [self.name, shown, *([f"    {self.detail}"] if self.detail else [])]


def show(figure: Figure | Bound) -> None:
    """Print a figure at once."""
    print("\n".join(figure.lines()), flush=True)
