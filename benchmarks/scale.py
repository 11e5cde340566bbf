"""What pinning and unpinning many modules costs in time and in memory.

CPU time, and bytes as tracemalloc sees them::

    python benchmarks/scale.py            # about three minutes
    python benchmarks/scale.py --quick    # half a minute
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
import tracemalloc

import measure
from torch import nn

import dtypepin

SIZES = (100, 1_000, 10_000, 100_000)


def many(count: int) -> nn.Module:
    """A model of so many LayerNorms, ten in a block, ten blocks in a block of blocks ..."""
    level: list[nn.Module] = [nn.LayerNorm(2) for _ in range(count)]
    while len(level) > 1:
        level = [nn.Sequential(*level[i : i + 10]) for i in range(0, len(level), 10)]
    return level[0]


def before(module: nn.Module, args: object, kwargs: object) -> None:
    """A bare pre-hook."""


def after(module: nn.Module, args: object, kwargs: object, output: object) -> None:
    """A bare hook."""


class Pins:
    """The product."""

    def __init__(self, model: nn.Module) -> None:
        self.pins = dtypepin.apply(model, class_patterns="LayerNorm")

    def remove(self) -> None:
        self.pins.remove()


class Bare:
    """Torch's own registration of the two hooks that a pin needs."""

    def __init__(self, model: nn.Module) -> None:
        self.handles = []
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                self.handles.append(
                    module.register_forward_pre_hook(before, with_kwargs=True),
                )
                self.handles.append(
                    module.register_forward_hook(
                        after, with_kwargs=True, prepend=True, always_call=True
                    )
                )

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def seconds(model: nn.Module, way: type[Pins] | type[Bare]) -> tuple[float, float]:
    """CPU seconds to put on and to take off."""
    gc.collect()
    start = time.process_time()
    there = way(model)
    middle = time.process_time()
    there.remove()
    return middle - start, time.process_time() - middle


def size(count: int, way: type[Pins] | type[Bare]) -> float:
    """Bytes for each module of Python objects that stay alive, on a model that never had hooks.

    Torch's dicts of hooks keep their tables when they become empty: later pins take less.
    """
    model = many(count)
    gc.collect()
    tracemalloc.start()
    start = tracemalloc.get_traced_memory()[0]
    there = way(model)
    gc.collect()
    found = tracemalloc.get_traced_memory()[0] - start
    tracemalloc.stop()
    there.remove()
    return found / count


def run(report: measure.Report, quick: bool) -> None:
    """(d) apply and remove."""
    rows = []
    applied: dict[int, float] = {}
    for count in SIZES:
        rounds = max(1, min(9, 30_000 // count) if quick else min(15, 200_000 // count))
        if count == SIZES[0]:
            seconds(many(count), Pins)  # whatever is made only once
        pins, again, bare = [], [], []
        for _ in range(rounds):
            model = many(count)
            pins.append(seconds(model, Pins))
            again.append(seconds(model, Pins)[0])
            bare.append(seconds(many(count), Bare))
        apply, remove = (statistics.median(column) for column in zip(*pins, strict=True))
        register, unregister = (statistics.median(column) for column in zip(*bare, strict=True))
        of_pin = of_hooks = None
        if count <= 10_000 or not quick:
            of_pin, of_hooks = size(count, Pins), size(count, Bare)
            report.target(f"bytes of a pin, {count} modules", of_pin, 2048)
            name = f"bytes of a pin beyond two bare hooks, {count} modules"
            report.target(name, of_pin - of_hooks, 2048)
        applied[count] = apply
        rows.append(
            {
                "pins": count,
                "apply s": apply,
                "apply us/pin": apply / count * 1e6,
                "again us/pin": statistics.median(again) / count * 1e6,
                "remove us/pin": remove / count * 1e6,
                "two bare hooks us": register / count * 1e6,
                "taken off us": unregister / count * 1e6,
                "bytes/pin": of_pin and round(of_pin),
                "bytes/two bare hooks": of_hooks and round(of_hooks),
            }
        )
    report.table(
        "(d) apply and remove on many LayerNorms; again: on a model that was pinned before", rows
    )
    report.target("seconds to apply, 10000 modules", applied[10_000], 0.5)
    for few, more in itertools.pairwise(SIZES):
        exponent = math.log10(applied[more] / applied[few])
        report.target(f"exponent of apply's growth, {few} to {more}", exponent, 1.1)


if __name__ == "__main__":
    measure.main(__doc__, run)
