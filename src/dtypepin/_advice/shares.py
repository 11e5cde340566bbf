"""How much each module's rounding adds to the error of the output, for all modules at once.

Rounding errors of different modules are small and nearly independent, so their squares add up.
Two things are measured for every candidate in one float32 forward: the difference ``eps`` between
its low-precision and its float32 output on the same input, and, by a few backward passes of
``R.y`` with random signs ``R``, how the model's output ``y`` answers to a change of that output.
The mean of ``<d(R.y)/d(output), eps>`` squared over the signs is the squared error that ``eps``
alone makes in ``y`` (Hutchinson's estimator of ``|J eps|**2``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dtypepin._advice.candidates import Call, Came, Candidate
from dtypepin._advice.inputs import Batch, as_float32, copied, leaves, looks_like_noise, outputs
from dtypepin._advice.lower import Lower
from dtypepin._base.dtypes import cast
from dtypepin._base.errors import PinError, warn
from dtypepin._base.model_state import random_numbers_kept
from dtypepin._base.nested import map_tensors
from dtypepin._pin.verbs import pin_dtype


@dataclass
class Shares:
    """What was found while the shares of all candidates were measured.

    Attributes:
        references: the float32 outputs, batch by batch.
        has_gradients: whether there are shares at all.
        forwards: what it took, in forwards of the model.
    """

    references: list[list[Tensor]]
    has_gradients: bool
    forwards: float


def measure(
    lower: Lower,
    batches: list[Batch],
    candidates: list[Candidate],
    came: Came,
    probes: int | None,
    seed: int,
    progress: Callable[[str], object],
) -> Shares:
    """Run the float32 reference with shadows, and the probes backward through it.

    Args:
        lower: how the model runs in low precision.
        batches: the inputs.
        candidates: their errors, prices and ``measured`` are filled in.
        came: the dtypes that come into them in low precision.
        probes: backward passes; None for enough.
        seed: for the random signs.
        progress: called with a line of text now and then.
    """
    generator = torch.Generator().manual_seed(seed)
    shadows = Shadows(lower, candidates, came)
    references = []
    has_gradients = True
    size, probes_done = 0, 0
    for number, batch in enumerate(batches):
        progress(f"shares: batch {number + 1} of {len(batches)}")
        with shadows.watching(), torch.enable_grad():
            out = outputs(lower.reference(batch))
            if not out:
                raise PinError(
                    "got an output without floating tensors, in tensors, dicts, lists, tuples "
                    "or dataclasses; expected some, to compare"
                )
            references.append(as_float32(out))
            rows = out[0].shape[0] if out[0].dim() else 1
            if not rows or any(tensor.isnan().any() for tensor in out):
                what = "nan as the float32 output" if rows else "a batch without samples"
                raise PinError(f"inputs: got {what}, expected numbers to compare with")
            done = probes or max(2, min(6, math.ceil(32 / (rows * len(batches)))))
            size += rows * done
            probes_done += done
            try:
                for _ in range(done if has_gradients else 0):
                    has_gradients = shadows.add_probe(out, generator, 1 / done)
                    if not has_gradients:
                        break
            except RuntimeError:  # an op without a derivative
                has_gradients = False
        shadows.forget()
    if has_gradients and size < 16:
        warn(
            f"inputs: samples times probes are {size}, expected 16 or more for shares to be "
            "trusted; give more samples, or probes="
        )
    if any(looks_like_noise(tensor) for batch in batches for tensor in leaves(batch)):
        warn(
            "inputs: they look like random noise; rounding errors depend on the data, so use "
            "real inputs"
        )
    leaf = [c for c in candidates if not any(c.found.module.children())]
    total_flops = sum(c.flops for c in leaf) or 1.0
    # The reference, two or three runs of every candidate, and backwards without weights.
    shadow = (3 if lower.whole else 2) * sum(c.flops for c in candidates)
    forwards = 1 + shadow / total_flops + probes_done / len(batches)
    return Shares(references, has_gradients, forwards)


class Shadows:
    """Runs every candidate in low precision beside one float32 forward of the model.

    Args:
        lower: how the model runs in low precision.
        candidates: what is looked at.
        dtypes: the floating dtypes that came into each module, call by call, in a low run.
    """

    def __init__(
        self,
        lower: Lower,
        candidates: Sequence[Candidate],
        dtypes: Came,
    ) -> None:
        self.lower, self.candidates, self.dtypes = lower, candidates, dtypes
        self.by_module = {candidate.found.module: candidate for candidate in candidates}
        self.open: list[Call | None] = []
        self.calls: dict[nn.Module, int] = {}
        self.busy = False
        self.in_backward = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Shadows are taken of every forward inside."""
        with ExitStack() as hooks:
            for module in self.by_module:
                # In front: what the caller gave, for the shadows go through the user's hooks too.
                before = module.register_forward_pre_hook(
                    self.before, with_kwargs=True, prepend=True
                )
                hooks.callback(before.remove)
                hooks.callback(module.register_forward_hook(self.after).remove)
            yield

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.busy or self.in_backward:
            return
        self.busy = True
        try:
            with torch.no_grad(), random_numbers_kept(self.lower.exact):
                self.open.append(self.shadow(self.by_module[module], args, kwargs))
        finally:
            self.busy = False

    def after(self, module: nn.Module, args: Any, out: Any) -> Any:
        if self.busy:
            return None
        # A checkpoint computes again in the backward, and has to find the same graph.
        call = None if self.in_backward else self.open.pop()
        if call is None and not (self.in_backward and self.by_module[module].measured):
            return None

        def keep(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                tensor = tensor.detach().requires_grad_()
            went_on = tensor.clone()  # what comes after may write into it in place
            if call is not None:
                call.out.append(tensor)
                call.went_on.append(went_on)
            return went_on

        new = map_tensors(out, keep)
        if call is not None:
            self.by_module[module].calls.append(call)
        return new

    def shadow(self, candidate: Candidate, args: Any, kwargs: Any) -> Call | None:
        """The errors of one call: of its low-precision and of its pinned output."""
        module = candidate.found.module
        number = self.calls[module] = self.calls.get(module, -1) + 1
        came = self.dtypes.get(module, [])
        dtypes = iter(came[number] if number < len(came) else [])
        # What comes in is rounded already, and that is the error of the module that made it.
        rounded = map_tensors((args, kwargs), lambda tensor: _to(tensor, next(dtypes, None)))
        first = next(iter(leaves(rounded)), None)
        try:
            rounded = copied(rounded, lambda tensor: tensor)
            exact, flops, seconds = _measured(module, map_tensors(rounded, Tensor.float))
            with self.lower.running():
                low = leaves(self.lower.twin[module](*rounded[0], **rounded[1]))
            pinned = exact
            if self.lower.whole:
                with (
                    pin_dtype(self.lower.twin[module], "^$", inputs="all", output="keep"),
                    self.lower.running(),
                ):
                    pinned = leaves(self.lower.twin[module](*rounded[0], **rounded[1]))
        except Exception:
            candidate.measured = False  # it cannot run by itself: arguments that cannot be copied
            return None
        restore = first.dtype if first is not None else None
        if restore is None:
            restore = self.lower.dtype if self.lower.whole else torch.float32
        back = [cast(tensor, restore) for tensor in pinned]
        finite = all(bool(tensor.isfinite().all()) for tensor in exact)
        if finite and not all(bool(tensor.isfinite().all()) for tensor in low):
            candidate.must = True
        if finite and not all(bool(tensor.isfinite().all()) for tensor in back):
            candidate.restorable = False
        size = sum(value.numel() for value in module.parameters())
        size += sum(tensor.numel() for tensor in exact)
        bytes_more = float(size * (4 - self.lower.dtype.itemsize))
        candidate.flops += flops
        candidate.seconds += seconds
        candidate.bytes += bytes_more
        return Call(exact, low, pinned, restore)

    def add_probe(self, output: list[Tensor], generator: torch.Generator, weight: float) -> bool:
        """Add one backward pass of random signs; False where there is no gradient at all.

        Args:
            output: the floating outputs of the model.
            generator: for the signs.
            weight: one over the number of probes.
        """
        outs = [tensor for c in self.candidates for call in c.calls for tensor in call.out]
        y = [tensor for tensor in output if tensor.requires_grad]
        if not y or not outs:
            return False
        signs = [
            torch.randint(0, 2, tensor.shape, generator=generator).to(tensor) * 2 - 1
            for tensor in y
        ]
        total = torch.stack([(t * sign).sum() for t, sign in zip(y, signs, strict=True)]).sum()
        self.in_backward = True
        try:
            found = torch.autograd.grad(total, outs, retain_graph=True, allow_unused=True)
        finally:
            self.in_backward = False
        grads: Iterator[Tensor | None] = iter(found)
        batch = y[0].shape[0] if y[0].dim() else 1
        for candidate in self.candidates:
            sums = torch.zeros(3, batch, dtype=torch.float64)
            for call in candidate.calls:
                for i in range(len(call.out)):
                    grad = next(grads)
                    if grad is None:
                        continue
                    is_output = any(call.went_on[i] is tensor for tensor in output)
                    for row, eps in enumerate(call.errors(i, is_output)):
                        sums[row] += _per_sample(grad, eps, batch)
            # Samples do not mix, so each gives an estimate of its own error; those add up.
            low, pin, keep = (weight * (sums**2).sum(1)).tolist()
            candidate.low += low
            candidate.pin += pin
            candidate.keep += keep
        return True

    def forget(self) -> None:
        """Let the graph of this batch go."""
        for candidate in self.candidates:
            candidate.calls.clear()
        self.open.clear()


def _per_sample(grad: Tensor, eps: Tensor, batch: int) -> Tensor:
    product = (grad.double() * eps.double()).cpu()
    if product.dim() and product.shape[0] == batch:
        return product.reshape(batch, -1).sum(1)
    return torch.cat([product.sum().reshape(1), torch.zeros(batch - 1, dtype=torch.float64)])


def _to(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.detach() if dtype is None else cast(tensor.detach(), dtype)


def _measured(module: nn.Module, values: Any) -> tuple[list[Tensor], float, float]:
    """The float32 output of a module, its FLOPs and its seconds."""
    from torch.utils.flop_counter import FlopCounterMode

    start = time.perf_counter()
    with FlopCounterMode(display=False) as counter:
        out = leaves(module(*values[0], **values[1]))
    seconds = time.perf_counter() - start
    # Elementwise ops count as no FLOPs at all; then one for each number that comes out.
    flops = counter.get_total_flops() or sum(tensor.numel() for tensor in out)
    return out, float(flops), seconds
