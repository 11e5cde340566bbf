"""What a pinned call costs, against the same module without pins and written by hand.

Each figure is a ratio of medians from interleaved runs in one process::

    python benchmarks/hooks.py            # about two minutes
    python benchmarks/hooks.py --quick    # under twenty seconds, rougher
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

import dtypepin


class ByHand(nn.Module):
    """What people write into their models."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return self.inner(x.float()).to(x.dtype)


def wrapped(module: nn.Module) -> nn.Module:
    """A replaced ``forward`` that casts and leaves autocast as it is."""
    inner = module.forward

    def forward(x: Tensor) -> Tensor:
        return inner(x.to(torch.float32)).to(x.dtype)

    module.forward = forward
    return module


def pinned(module: nn.Module) -> nn.Module:
    """The product."""
    dtypepin.apply(module, "")
    return module


def measure(calls: list[Callable[[], object]], seconds: float, rounds: int) -> list[float]:
    """Median microseconds of each call, the calls taking turns."""
    timers = [Timer("call()", globals={"call": call}) for call in calls]
    number = max(1, int(seconds / rounds / len(calls) / timers[0].timeit(5).mean))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for timer, found in zip(timers, times, strict=True):
            found.append(timer.timeit(number).mean * 1e6)
    return [statistics.median(found) for found in times]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer shapes and rounds")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    shapes = [(8,), (4, 128, 768)] if quick else [(8,), (4, 128, 768), (16, 512, 1024)]
    head = ("module", "shape", "input", "autocast", "grad", "bare us", "pinned us")
    ratios = ("/ bare", "/ by hand", "/ wrapper")
    print(f"torch {torch.__version__}, one thread; pinned to float32")
    line = "{:<10}{:<15}{:<9}{:<9}{:<5}{:>10}{:>11}{:>9}{:>11}{:>11}"
    print(line.format(*head, *ratios))
    for kind in ("LayerNorm", "Linear"):
        for shape in shapes:
            width = shape[-1]
            plain = nn.LayerNorm(width) if kind == "LayerNorm" else nn.Linear(width, width)
            modules = [
                plain,
                pinned(copy.deepcopy(plain)),
                ByHand(copy.deepcopy(plain)),
                wrapped(copy.deepcopy(plain)),
            ]
            for autocast, grad in ((False, False), (True, False), (True, True)):
                x = torch.randn(shape, dtype=torch.bfloat16 if autocast else torch.float32)
                with (
                    torch.autocast("cpu", torch.bfloat16, enabled=autocast),
                    torch.set_grad_enabled(grad),
                ):
                    calls = [lambda module=module, x=x: module(x) for module in modules]
                    bare, pin, hand, patch = measure(calls, 0.6 if quick else 6, 15)
                print(
                    line.format(
                        kind,
                        "x".join(map(str, shape)),
                        str(x.dtype).removeprefix("torch."),
                        "on" if autocast else "off",
                        "on" if grad else "off",
                        f"{bare:.1f}",
                        f"{pin:.1f}",
                        f"{pin / bare:.2f}",
                        f"{pin / hand:.2f}",
                        f"{pin / patch:.2f}",
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
