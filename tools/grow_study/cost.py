"""How long cells take: what they learn and score, counted; seconds from cells that are done, or guessed. No torch."""

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from tools.grow_study.plan import FACTORS, FAVOURS, METHODS, SHARES, Cell, Size

SCORED_AT_ONCE = 128  # rows
# Guessed for one of a dozen processes that share an H200: there a step of A1, three times as wide and recorded, took
# 21 ms (benchmarks/RESULTS.md). Cells are not recorded, so they wait for their own launches and for each other.
START_SECONDS, STEP_SECONDS, PASS_SECONDS = 20.0, 0.045, 0.03


def count_work(cell: Cell, size: Size, num_domains: int, num_texts: int) -> tuple[int, int]:
    """Steps of learning, and batches that are scored. num_texts: those of base and domains, unseen, and mixed ones."""
    of_model = 2 * num_texts * -(-size.score_rows // SCORED_AT_ONCE)  # valid and test
    steps = num_domains * size.branch_steps
    if cell.method == "base":
        return size.base_steps, of_model + size.seq_len  # it writes text too
    if cell.method.startswith("joint"):
        return size.base_steps + steps, of_model
    points = len(FAVOURS)
    if METHODS[cell.method].family == "dense":
        apart = num_domains + 1
        points = {"adapters": apart, "arithmetic": len(FACTORS) + apart}.get(cell.method, len(SHARES))
    if cell.method == "gate":
        steps = num_domains * size.gate_steps
    elif cell.method in ("grow", "grow-context"):  # each alone, and two by two; each where it is told its text
        points += num_domains
    return steps, points * of_model


def guess_seconds(cell: Cell, size: Size, num_domains: int, num_texts: int) -> float:
    steps, passes = count_work(cell, size, num_domains, num_texts)
    return START_SECONDS + STEP_SECONDS * steps + PASS_SECONDS * passes


class Clock:
    """Expected seconds of cells: as others of that method took; or as guessed, times what guesses were wrong by."""

    def __init__(self, results: Mapping[str, Mapping[str, Any]], size: Size, num_domains: int, num_texts: int) -> None:
        self.sizes = size, num_domains, num_texts
        self.seen: dict[str, list[float]] = {}
        wrong = []
        for record in results.values():
            if "cell_seconds" not in record:
                continue
            cell = Cell(record["method"], record["seed"], record.get("rate", 0.0), record.get("family", ""))
            self.seen.setdefault(cell.method, []).append(record["cell_seconds"])
            wrong.append(record["cell_seconds"] / guess_seconds(cell, *self.sizes))
        self.factor = median(wrong) if wrong else 1.0

    def expect(self, cell: Cell) -> float:
        taken = self.seen.get(cell.method)
        return median(taken) if taken else self.factor * guess_seconds(cell, *self.sizes)


def fill_slices(seconds: Iterable[float], processes: int, minutes: float) -> list[float]:
    """The minutes of each slice, where the longest cells come first and none is begun that would not end in time.

    Cells are taken as if none waited for another: bases and chosen rates make it a little longer.
    """
    left, slices = sorted(seconds, reverse=True), []
    while left:
        ends, later = [0.0] * processes, []
        for one in left:
            first = min(range(processes), key=lambda at: ends[at])
            if ends[first] + one > 60 * minutes and ends[first] > 0:
                later.append(one)
            else:
                ends[first] += one
        slices.append(max(ends) / 60)
        left = later
    return slices
