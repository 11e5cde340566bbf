"""Interleaved timings, ratios of their medians, tables and the JSON file. Shared by the scripts."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.benchmark import Timer

Call = Callable[[], object]
Times = dict[str, list[float]]


def interleaved(calls: dict[str, Call], seconds: float, rounds: int = 100) -> Times:
    """Microseconds of each call in each round; the calls take turns, the order is drawn anew.

    The process's CPU time, not the wall's: on a shared machine the others' turns are no cost of
    ours. Everything here runs on the CPU, in one thread.
    """
    timers = {
        name: Timer("call()", timer=time.process_time, globals={"call": call})
        for name, call in calls.items()
    }
    warm = sum(timer.timeit(2).mean for timer in timers.values())
    number = max(1, int(seconds / rounds / warm))
    # ``timeit`` calls twice more, to warm up: that is what a round of slow calls costs.
    rounds = min(rounds, max(10, int(seconds / (number + 2) / warm)))
    times: Times = {name: [] for name in calls}
    order, chance = list(calls), random.Random(0)
    for _ in range(rounds):
        chance.shuffle(order)
        for name in order:
            times[name].append(timers[name].timeit(number).mean * 1e6)
    return times


def median(times: Times, name: str) -> float:
    """Median of one call's rounds."""
    return statistics.median(times[name])


class Ratio(float):
    """A ratio of two medians.

    Attributes:
        low: lower end of its 95 % interval, by drawing whole rounds anew.
        high: upper end.
    """

    low: float
    high: float


def ratio(times: Times, above: str, below: str) -> Ratio:
    """Median of one call over the median of another, with its interval."""
    rounds, chance, drawn = len(times[above]), random.Random(0), []
    for _ in range(400):
        some = chance.choices(range(rounds), k=rounds)
        over, under = ([times[name][i] for i in some] for name in (above, below))
        drawn.append(statistics.median(over) / statistics.median(under))
    drawn.sort()
    found = Ratio(median(times, above) / median(times, below))
    found.low, found.high = drawn[10], drawn[-11]
    return found


class Report:
    """Collects tables and targets, prints them, and writes them to a file."""

    def __init__(self, facts: dict[str, object]) -> None:
        self.facts = facts
        self.tables: list[dict[str, Any]] = []
        self.targets: list[dict[str, Any]] = []

    def table(self, title: str, rows: list[dict[str, Any]]) -> None:
        """Print a table; all rows have the same keys."""
        self.tables.append({"title": title, "rows": rows})
        texts = [list(rows[0]), *([_text(value) for value in row.values()] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        print(f"\n{title}")
        for line in texts:
            print("  ".join(t.ljust(w) for t, w in zip(line, widths, strict=True)).rstrip())
        print(flush=True)

    def target(self, name: str, value: float, limit: float) -> None:
        """Note whether a figure is at most its limit, as far as its interval can tell."""
        low, high = getattr(value, "low", value), getattr(value, "high", value)
        verdict = "met" if high <= limit else "missed" if low > limit else "within the noise"
        self.targets.append(
            {
                "target": name,
                "limit": limit,
                "value": float(value),
                "low": float(low),
                "high": float(high),
                "verdict": verdict,
            }
        )

    def finish(self, path: str | None) -> None:
        """Print the targets that are not met, and write the file."""
        if self.targets:
            open_ = [row for row in self.targets if row["verdict"] != "met"]
            met = len(self.targets) - len(open_)
            self.table(
                f"targets: {met} of {len(self.targets)} met; the others:",
                open_ or [{"target": "none"}],
            )
            self.tables.pop()  # the file has them as targets
        if path:
            with open(path, "w", encoding="utf-8") as file:
                json.dump(
                    {"machine": self.facts, "tables": self.tables, "targets": self.targets},
                    file,
                    indent=1,
                    default=str,
                )
                file.write("\n")


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return "-" if value is None else str(value)


def machine() -> dict[str, object]:
    """What the figures depend on."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def keep_memory() -> bool:
    """Tell glibc to keep freed memory; False where the C library is another one.

    By default it hands a free top of the heap back to the kernel. Whether a call then pays for a
    thousand page faults depends on where on the heap its temporaries happen to lie, and one way
    may be ten times as slow as another for a whole process, or the other way round.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    trim_threshold, mmap_threshold = -1, -3
    return bool(mallopt and mallopt(trim_threshold, 1 << 30) and mallopt(mmap_threshold, 32 << 20))


def main(doc: str, *runs: Callable[[Report, bool], None]) -> None:
    """Read the command line, and run."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds")
    parser.add_argument("--json", metavar="FILE", help="write all figures here too")
    parser.add_argument("--default-malloc", action="store_true", help="as glibc does by itself")
    options = parser.parse_args()
    kept = not options.default_malloc and keep_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    facts = {**machine(), "freed memory": "kept" if kept else "as the C library does"}
    print(*(f"{key} {value}" for key, value in facts.items()), sep=", ", flush=True)
    report = Report(facts)
    for run in runs:
        gc.collect()
        start = time.perf_counter()
        run(report, options.quick)
        print(f"{run.__module__}.{run.__name__}: {time.perf_counter() - start:.0f} s", flush=True)
    report.finish(options.json)
