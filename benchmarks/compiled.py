"""Compiled code of a pinned model against one written by hand: the graphs, and the time.

Needs a C++ compiler, and for all of it the ``bench`` extra::

    python benchmarks/compiled.py            # about four minutes
    python benchmarks/compiled.py --quick    # under a minute
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import measure
import torch
from functorch.compile import make_boxed_func
from hooks import ByHand, pinned, plain
from minilm import load
from step import WAYS, training_step
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

Graph = list[tuple[str, tuple[object, ...]]]


def ops(graph: torch.fx.GraphModule) -> Graph:
    """Ops of a graph in order, with the dtype and shape of what they give."""
    found = []
    for node in graph.graph.nodes:
        if node.op == "call_function":
            value = node.meta.get("val")
            facts = (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else ()
            found.append((str(node.target), facts))
    return found


def graphs(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> list[Graph]:
    """All graphs that a backend gets for a call and, if there is one, its backward."""
    torch._dynamo.reset()
    found: list[Graph] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> Callable:
        found.append(ops(graph))
        return make_boxed_func(graph.forward)

    output = call(torch.compile(model, backend=aot_autograd(fw_compiler=keep)))
    if output.requires_grad:
        output.float().square().mean().backward()
    return found


def compare(ours: list[Graph], theirs: list[Graph]) -> dict[str, object]:
    """Counts of both, and whether they are equal."""
    if ours == theirs:
        equal = "yes"
    elif [Counter(graph) for graph in ours] == [Counter(graph) for graph in theirs]:
        equal = "but for the order"
    else:
        equal = "no"
    return {
        "graphs": f"{len(ours)} / {len(theirs)}",
        "nodes": f"{sum(map(len, ours))} / {sum(map(len, theirs))}",
        "equal": equal,
    }


def run(report: measure.Report, quick: bool) -> None:
    """(c) Compiled."""
    rows = []
    for kind in ("LayerNorm", "Linear"):
        for shape in ((8,), (4, 128, 768)):
            for autocast in (True,) if quick else (False, True):
                for grad in (False, True):
                    if quick and (grad or shape == (8,)) and kind == "Linear":
                        continue
                    dtype = torch.bfloat16 if autocast else torch.float32
                    x = torch.randn(shape, dtype=dtype)
                    bare = plain(kind, shape[-1])
                    models = {"pinned": pinned(copy.deepcopy(bare))}
                    models["by hand"] = ByHand(copy.deepcopy(bare))
                    models["by hand again"] = ByHand(copy.deepcopy(bare))
                    with (
                        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
                        torch.set_grad_enabled(grad),
                    ):
                        seen = compare(
                            graphs(models["pinned"], lambda model, x=x: model(x)),
                            graphs(models["by hand"], lambda model, x=x: model(x)),
                        )
                        torch._dynamo.reset()
                        calls = {}
                        for name, model in models.items():
                            fast = torch.compile(model, fullgraph=True)
                            fast(x)
                            calls[name] = lambda fast=fast, x=x: fast(x)
                        # The pin is in it: without, a Linear under autocast gives other bits.
                        assert torch.equal(calls["pinned"](), calls["by hand"]())
                        times = measure.interleaved(calls, 1 if quick else 4, 200)
                    where = f"{kind} {'x'.join(map(str, shape))}, autocast {autocast}, grad {grad}"
                    rows.append(_row(report, where, times, seen))
    if not quick:
        rows += _whole_model(report)
    report.table(
        "(c) compiled by inductor, pinned / by hand; graphs as AOTAutograd makes them", rows
    )


def _whole_model(report: measure.Report) -> list[dict[str, object]]:
    """A training step of MiniLM under autocast."""
    model, tokens = load()
    ways = {name: way for name, way in WAYS.items() if name != "no pins"}

    def call(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**tokens).last_hidden_state

    seen = compare(
        *(graphs(ways[name](copy.deepcopy(model)), call) for name in ("pinned", "by hand"))
    )
    torch._dynamo.reset()
    steps = {}
    for name, way in ways.items():
        fast = way(copy.deepcopy(model))
        fast.compile()
        steps[name] = training_step(fast, tokens, autocast=True)
        steps[name]()
    times = measure.interleaved(steps, 30, 100)
    return [_row(report, "training step of MiniLM, autocast True", times, seen)]


def _row(
    report: measure.Report, where: str, times: measure.Times, seen: dict[str, object]
) -> dict[str, object]:
    hand = measure.ratio(times, "pinned", "by hand")
    report.target(f"compiled, pinned / by hand, {where}", hand, 1.02)
    report.target(f"compiled, graphs differ, {where}", float(seen["equal"] != "yes"), 0.0)
    return {
        "what": where,
        "pinned us": measure.median(times, "pinned"),
        "/ by hand": hand,
        "low": hand.low,
        "high": hand.high,
        "by hand / itself": measure.ratio(times, "by hand again", "by hand"),
        **seen,
    }


if __name__ == "__main__":
    measure.main(__doc__, run)
