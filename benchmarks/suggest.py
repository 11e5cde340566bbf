"""``suggest`` against other ways to find which modules need float32.

All choose among the same modules, are judged by real runs with real pins under real autocast, and
pay for every run in forwards of the model::

    pip install ".[test]" && HF_HUB_OFFLINE=1 python benchmarks/suggest.py    # about ten minutes
    HF_HUB_OFFLINE=1 python benchmarks/suggest.py --quick                     # two minutes

The other ways, re-implemented: bisection over how many modules to pin from the start or from the
end (the idea of Polygraphy's ``debug precision``), groups that pass or fail in low precision (of
ONNX' automatic mixed precision), one-at-a-time measured, by share and by share per price, the
difference of each module's output (local error), and a random order.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from minilm import load
from torch import Tensor, nn

import dtypepin
from dtypepin._advice.candidates import find_candidates, run_low
from dtypepin._advice.lower import Lower
from dtypepin._advice.runs import Runs
from dtypepin._advice.shares import measure
from dtypepin._base.model_state import ModelState, untouched

TOLERANCES = (0.9, 0.75, 0.5, 0.35)


@dataclass
class Outcome:
    """What one method found."""

    names: frozenset[str]
    forwards: float
    seconds: float


def _silent(text: str) -> None:
    pass


class Problem:
    """A model, inputs, and the real error of every set of pins, remembered."""

    def __init__(self, name, model, inputs, holdout, low="bfloat16"):
        self.name, self.model, self.inputs, self.holdout, self.low = (
            name,
            model.eval(),
            inputs,
            holdout,
            low,
        )
        dtype = getattr(torch, low)
        self.measured, self.candidates = self._measure(inputs, dtype)
        self.held_out, _ = self._measure(holdout, dtype)
        leaves = [c for c in self.candidates if not any(True for _ in c.found.module.children())]
        self.order = [c.name for c in leaves]
        self.price = {c.name: c.flops for c in self.candidates}
        self.runs = 0
        self.known: dict[frozenset[str], float] = {}

    def _measure(self, inputs, dtype):
        runs = Runs(
            Lower(self.model, ModelState(self.model), dtype, False, 0), [inputs], None, _silent
        )
        with untouched(self.model):
            low_run = run_low(runs.lower, runs.batches)
            found = find_candidates(runs.lower, low_run, None, None, [])
            shares = measure(runs.lower, runs.batches, found, low_run.came, 4, 0, _silent)
        runs.lows, runs.references = low_run.outputs, shares.references
        return runs, [candidate for candidate in found if candidate.measured]

    def error(self, names) -> float:
        """The real error; every question counts as a run, also where the answer is known."""
        names = frozenset(names)
        self.runs += 1
        if names not in self.known:
            with untouched(self.model):
                self.known[names] = self.measured.error(names, "restore")
        return self.known[names]

    def local_errors(self) -> dict[str, float]:
        """How far each module's output is from float32, in a float32 and a low-precision run."""
        outs: list[dict[str, Tensor]] = [{}, {}]
        args, kwargs = self.inputs
        self.runs += 1
        for run, low in enumerate((False, True)):
            handles = []
            for name in self.order:

                def keep(_, __, out, name=name, run=run):
                    if isinstance(out, Tensor):
                        outs[run][name] = out.detach().float()

                handles.append(self.model.get_submodule(name).register_forward_hook(keep))
            with torch.no_grad(), torch.autocast("cpu", getattr(torch, self.low), enabled=low):
                self.model(*args, **kwargs)
            for handle in handles:
                handle.remove()
        return {
            name: float((outs[1][name] - outs[0][name]).norm() / (outs[0][name].norm() + 1e-30))
            for name in self.order
            if name in outs[0]
        }


def shortest_prefix(problem: Problem, order: list[str], target: float) -> frozenset[str]:
    """Bisection over how many modules to pin, in an order."""
    fails, meets = 0, len(order)
    problem.error(order)
    while fails + 1 < meets:
        middle = (fails + meets) // 2
        if problem.error(order[:middle]) <= target:
            meets = middle
        else:
            fails = middle
    return frozenset(order[:meets])


def from_start(problem, target, seed):
    """Bisect a prefix."""
    return shortest_prefix(problem, problem.order, target)


def from_end(problem, target, seed):
    """Bisect a suffix."""
    return shortest_prefix(problem, problem.order[::-1], target)


def groups(problem, target, seed):
    """Put halves into low precision as long as the target is met; split what fails."""
    pinned, todo = set(problem.order), [problem.order]
    while todo:
        group = todo.pop(0)
        if problem.error(pinned - set(group)) <= target:
            pinned -= set(group)
        elif len(group) > 1:
            todo += [group[: len(group) // 2], group[len(group) // 2 :]]
    return frozenset(pinned)


def one_at_a_time(per_price: bool) -> Callable:
    """Measure every module alone."""

    def method(problem, target, seed):
        base = problem.error(())
        gain = {name: base**2 - problem.error({name}) ** 2 for name in problem.order}
        if not math.isfinite(base):
            gain = {name: -problem.error({name}) for name in problem.order}
        weight = problem.price if per_price else dict.fromkeys(problem.order, 1.0)
        order = sorted(problem.order, key=lambda name: -gain[name] / weight[name])
        return shortest_prefix(problem, order, target)

    return method


def local(problem, target, seed):
    """The largest local error first."""
    errors = problem.local_errors()
    errors = {k: math.inf if math.isnan(v) else v for k, v in errors.items()}
    order = sorted(problem.order, key=lambda name: -errors.get(name, 0.0))
    return shortest_prefix(problem, order, target)


def at_random(problem, target, seed):
    """A random order."""
    order = list(problem.order)
    random.Random(seed).shuffle(order)
    return shortest_prefix(problem, order, target)


METHODS = {
    "bisect from start": from_start,
    "bisect from end": from_end,
    "groups": groups,
    "one at a time, share": one_at_a_time(False),
    "one at a time, share/price": one_at_a_time(True),
    "local error": local,
    "random order": at_random,
}


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """Attend, then transform."""
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        return x + self.down(torch.tanh(self.up(self.norm2(x))))


def transformer(planted: tuple[int, ...]) -> nn.Module:
    """24 random blocks, some of which shout."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64) for _ in range(24)), nn.LayerNorm(64), nn.Linear(64, 32))
    with torch.no_grad():
        for i in planted:
            model[i].down.weight.mul_(15)
    return model


class Residual(nn.Module):
    """A convolutional block with BatchNorm."""

    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x):
        """Convolve twice, and add."""
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


def cnn() -> nn.Module:
    """A small residual network."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        *(Residual(16) for _ in range(6)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


class Overflow(nn.Module):
    """A layer whose output is too large for float16; a norm makes it small again."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.lin = nn.LayerNorm(width), nn.Linear(width, width)
        self.after = nn.LayerNorm(width)

    def forward(self, x):
        """Grow, shrink, add."""
        return x + self.after(self.lin(self.norm(x)))


def overflowing() -> nn.Module:
    """A transformer that gives no number in float16."""
    model = transformer(())
    model[11] = Overflow(64)
    with torch.no_grad():
        model[11].lin.weight.mul_(1e5)
    return model


def tokens(rows: int, offset: float) -> Tensor:
    """Smooth inputs for random models."""
    steps = torch.arange(rows * 16 * 64, dtype=torch.float32) + offset
    return (steps * 0.37).sin().reshape(rows, 16, 64) + (steps * 0.011).cos().reshape(rows, 16, 64)


def problems(quick: bool) -> list[Problem]:
    """All models."""
    model, words = load()
    half = {k: v[:4] for k, v in words.items()}, {k: v[4:] for k, v in words.items()}
    found = [Problem("MiniLM", model, ((), half[0]), ((), half[1]))]
    places = {"start": (1,), "middle": (12,), "end": (22,), "scattered": (3, 9, 17), "nowhere": ()}
    for where, planted in places.items():
        if not quick or where == "scattered":
            x, other = tokens(8, 0.0), tokens(8, 1e4)
            found.append(
                Problem(f"24 blocks, {where}", transformer(planted), ((x,), {}), ((other,), {}))
            )
    images = tokens(8, 0.0).reshape(-1)[: 8 * 3 * 256].reshape(8, 3, 16, 16)
    others = tokens(8, 1e4).reshape(-1)[: 8 * 3 * 256].reshape(8, 3, 16, 16)
    found.append(Problem("CNN with BatchNorm", cnn(), ((images,), {}), ((others,), {})))
    if not quick:
        x, other = tokens(8, 0.0), tokens(8, 1e4)
        found.append(
            Problem("float16 overflow", overflowing(), ((x,), {}), ((other,), {}), "float16")
        )
    return found


def ours(problem: Problem, tolerance: float, seed: int) -> tuple[Outcome, float]:
    """What dtypepin.suggest finds."""
    args, kwargs = problem.inputs
    start = time.perf_counter()
    plan = dtypepin.suggest(
        problem.model, kwargs or args, autocast_dtype=problem.low, tolerance=tolerance, seed=seed
    )
    outcome = Outcome(frozenset(plan.names), plan.forward_equivalents, time.perf_counter() - start)
    return outcome, plan.target, plan.output


def main() -> int:
    """Print one line for each model, tolerance and method, and the rows that suggest loses."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--quick", action="store_true", help="fewer models, one tolerance, one seed"
    )
    parser.add_argument("--svg", metavar="FILE", help="draw the README's picture; needs matplotlib")
    options = parser.parse_args()
    quick = options.quick
    torch.set_num_threads(1)
    head = f"{'model':<20}{'tol':<6}{'method':<28}{'fwd':>6}{'s':>7}{'pins':>6}"
    print(f"{head}{'price':>8}{'error':>10}{'held out':>10}  (price and errors relative)")
    lost, most = [], 0.0
    curves: dict[str, list[tuple[float, float]]] = {}
    for problem in problems(quick):
        everything = sum(problem.price[name] for name in problem.order)
        for tolerance in (0.5,) if quick else TOLERANCES:
            rows: dict[str, list[tuple]] = {}
            for seed in (0,) if quick else (0, 1, 2):
                outcome, target, its_output = ours(problem, tolerance, seed)
                results = {"suggest": outcome}
                for name, method in METHODS.items():
                    if seed and name != "random order":
                        continue  # they know no chance
                    problem.runs, start = 0, time.perf_counter()
                    names = method(problem, target, seed)
                    results[name] = Outcome(names, problem.runs + 1, time.perf_counter() - start)
                for name, found in results.items():
                    # Measured with its own output argument, as it will be used.
                    output = its_output if name == "suggest" else "restore"
                    with untouched(problem.model):
                        error = problem.measured.error(found.names, output)
                        base = problem.measured.error(frozenset(), output)
                        held_out = problem.held_out.error(found.names, output)
                    scale = base if math.isfinite(base) else target / tolerance
                    rows.setdefault(name, []).append(
                        (
                            found.forwards,
                            found.seconds,
                            len(found.names),
                            sum(problem.price[n] for n in found.names) / everything,
                            error / scale,
                            held_out / scale,
                            error <= target * 1.0001,
                        )
                    )
            means = {
                name: [sum(column) / len(column) for column in zip(*found, strict=True)]
                for name, found in rows.items()
            }
            for name, (fwd, s, pins, price, error, held, met) in means.items():
                print(
                    f"{problem.name:<20}{tolerance:<6}{name:<28}{fwd:>6.1f}{s:>7.1f}{pins:>6.1f}"
                    f"{price:>8.3f}{error:>10.3f}{held:>10.3f}{'' if met == 1 else '  not met'}",
                    flush=True,
                )
            curves.setdefault(problem.name, [(0.0, 1.0)]).append(means["suggest"][3:5])
            most = max(most, *(row[0] for row in rows["suggest"]))
            best = min((m[3], name) for name, m in means.items() if m[6] == 1 or name == "suggest")
            if means["suggest"][3] > 1.1 * best[0]:
                lost.append(
                    f"{problem.name}, tolerance {tolerance}: {means['suggest'][3]:.3f} against "
                    f"{best[0]:.3f} of {best[1]!r}"
                )
    print(f"\nsuggest never computed more than {most:.1f} forwards")
    print("rows where it pays over 1.1 times the best price:", *(lost or ["none"]), sep="\n  ")
    if options.svg:
        draw({name: curves[name] for name in DRAWN if name in curves}, options.svg)
    return 0


#: What is drawn, what is written to it, and where.
DRAWN = {
    "24 blocks, scattered": ("24 blocks, three loud layers:\nhalf of the error for 7 %", 0.16, 0.3),
    "MiniLM": ("MiniLM, error spread over all layers:\nhalf of it for two thirds", 0.4, 0.76),
}


def draw(curves: dict[str, list[tuple[float, float]]], path: str) -> None:
    """What is left of the error against the price, for plans of falling tolerance."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "dtypepin", "font.size": 11})
    figure, axes = plt.subplots(figsize=(7, 3.6))
    for (name, points), color in zip(curves.items(), ("#0072b2", "#d55e00"), strict=True):
        prices, errors = zip(*points, strict=True)
        axes.plot(prices, errors, marker="o", color=color, linewidth=2)
        text, *place = DRAWN[name]
        axes.annotate(text, place, color=color, va="center")
    axes.set(xlim=(-0.02, 1.02), ylim=(0, 1.06))
    axes.set_xlabel("price: part of the FLOPs that run in float32")
    axes.set_ylabel("error left")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    raise SystemExit(main())
