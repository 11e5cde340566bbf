"""How much each module's rounding adds to the error of the output, for all modules at once.

Rounding errors of different modules are small and nearly independent, so their squares add up.
Two things are measured for every candidate in one float32 forward: the difference ``eps`` between
its low-precision and its float32 output on the same input, and, by a few backward passes of
``R.y`` with random signs ``R``, how the model's output ``y`` answers to a change of that output.
The mean of ``<d(R.y)/d(output), eps>`` squared over the signs is the squared error that ``eps``
alone makes in ``y`` (Hutchinson's estimator of ``|J eps|**2``).
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dtypepin._base.dtypes import FLOATS, cast
from dtypepin._base.model_state import ModelState, generators, random_numbers_kept
from dtypepin._base.nested import map_tensors
from dtypepin._base.selection import Named
from dtypepin._pin.verbs import pin_dtype

Batch = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Candidate:
    """A module that may be pinned. Errors are squared L2 errors that it alone makes in the output.

    Attributes:
        found: the module and its names.
        low: error of the module in low precision.
        pin: error of the module pinned, its output cast back.
        keep: the same with ``output="keep"``.
        price: what the pin costs, in the unit that was asked for.
        flops: floating-point operations of all its calls.
        seconds: time of all its calls, in float32.
        bytes: what its weights and outputs take more in float32.
        must: in low precision its output is not finite, where float32 gives a finite one.
        restorable: whether its float32 output stays finite when it is cast back.
        measured: whether it could be run by itself.
    """

    found: Named
    low: float = 0.0
    pin: float = 0.0
    keep: float = 0.0
    price: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0
    bytes: float = 0.0
    must: bool = False
    restorable: bool = True
    measured: bool = True
    calls: list[_Call] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its first dotted name."""
        return self.found.names[0]


@dataclass
class _Call:
    """One call of a candidate: its output in the graph, and how it differs.

    Attributes:
        exact: the float32 output on the input that comes in low precision.
        low: the output in low precision.
        pinned: the output with the pin, before it is cast back.
        restore: the dtype that a pinned output is cast back to.
        out: the output in the graph; the copies of it that went on.
    """

    exact: list[Tensor]
    low: list[Tensor]
    pinned: list[Tensor]
    restore: torch.dtype
    out: list[Tensor] = field(default_factory=list)
    went_on: list[Tensor] = field(default_factory=list)

    def errors(self, i: int, is_output: bool) -> tuple[Tensor, Tensor, Tensor]:
        """What the low, the pinned and the kept output differ by."""
        exact, low, pinned = self.exact[i], self.low[i], self.pinned[i]
        back, kept = cast(pinned, self.restore), pinned
        if not is_output:
            kept = cast(pinned, low.dtype)  # a wider one the next module rounds itself
        low, back, kept = (
            (other.float() - exact).nan_to_num(0.0, 0.0, 0.0) for other in (low, back, kept)
        )
        return low, back, kept


class Lower:
    """How the model runs in low precision: under autocast, or cast as a whole.

    Every run begins with the same buffers, attributes and random numbers.

    Attributes:
        model: the model that runs; a cast copy where it is cast as a whole.
        dtype: the low dtype.
        whole: whether the model is cast as a whole.
    """

    def __init__(
        self, model: nn.Module, state: ModelState, dtype: torch.dtype, whole: bool, seed: int
    ) -> None:
        self.dtype, self.whole, self.seed = dtype, whole, seed
        self.exact = model
        self.model = copy.deepcopy(model).to(dtype) if whole else model
        self.states = [state, ModelState(self.model)] if whole else [state]
        tensors = [*model.parameters(), *model.buffers()]
        self.device = tensors[0].device.type if tensors else "cpu"
        # A candidate's module in the model that runs, by the module in the float32 model.
        self.twin = dict(zip(model.modules(), self.model.modules(), strict=True))

    @contextmanager
    def running(self) -> Iterator[None]:
        """The precision of the low run."""
        with torch.autocast(self.device, self.dtype, enabled=not self.whole), torch.no_grad():
            yield

    def begin(self) -> None:
        """Make the model what it was before it ever ran."""
        for state in self.states:
            state.put_back()
        for generator in generators(self.exact):
            generator.manual_seed(self.seed)

    def reference(self, batch: Batch) -> Any:
        """The output of a float32 forward."""
        args, kwargs = fresh(batch)
        self.begin()
        return self.exact(*args, **kwargs)

    def forward(self, batch: Batch, pins: dict[str, Any] | None) -> list[Tensor]:
        """The floating outputs of a low-precision forward, with real pins, as float32."""
        args, kwargs = fresh(batch)
        self.begin()
        if self.whole:
            args, kwargs = map_tensors((args, kwargs), lambda tensor: cast(tensor, self.dtype))
        with ExitStack() as stack:
            if pins is not None:
                stack.enter_context(pin_dtype(self.model, **pins))
            stack.enter_context(self.running())
            return as_float32(self.model(*args, **kwargs))


def fresh(batch: Batch) -> Batch:
    """A batch of its own for one forward: modules in place must not write into the user's."""
    new: Batch = _copied(batch, lambda tensor: tensor.detach().clone())
    return new


def outputs(value: Any, above: tuple[Any, ...] = ()) -> list[Tensor]:
    """The floating tensors in a model's output, in order; complex ones as pairs of floats."""
    if isinstance(value, Tensor):
        value = torch.view_as_real(value) if value.is_complex() else value
        return [value] if value.dtype in FLOATS else []
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, (list, tuple)):
        items = list(value)
    elif dataclasses.is_dataclass(value):
        items = [getattr(value, each.name, None) for each in dataclasses.fields(value)]
    else:
        return []
    if any(value is outer for outer in above):
        return []  # a container that holds itself
    return [tensor for item in items for tensor in outputs(item, (*above, value))]


def as_float32(value: Any) -> list[Tensor]:
    """Copies of a model's outputs: it may use the same memory for the next ones."""
    return [tensor.detach().to(torch.float32, copy=True) for tensor in outputs(value)]


def leaves(value: Any) -> list[Tensor]:
    """The floating tensors in a nested value, in order, each once."""
    found: list[Tensor] = []

    def look(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, look)
    return found


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
        dtypes: dict[nn.Module, list[list[torch.dtype]]],
    ) -> None:
        self.lower, self.candidates, self.dtypes = lower, candidates, dtypes
        self.by_module = {candidate.found.module: candidate for candidate in candidates}
        self.open: list[_Call | None] = []
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

    def shadow(self, candidate: Candidate, args: Any, kwargs: Any) -> _Call | None:
        """The errors of one call: of its low-precision and of its pinned output."""
        module = candidate.found.module
        number = self.calls[module] = self.calls.get(module, -1) + 1
        came = self.dtypes.get(module, [])
        dtypes = iter(came[number] if number < len(came) else [])
        # What comes in is rounded already, and that is the error of the module that made it.
        rounded = map_tensors((args, kwargs), lambda tensor: _to(tensor, next(dtypes, None)))
        first = next(iter(leaves(rounded)), None)
        try:
            rounded = _copied(rounded, lambda tensor: tensor)
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
        return _Call(exact, low, pinned, restore)

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


def _copied(values: Any, copy_float: Callable[[Tensor], Tensor]) -> Any:
    """A copy in which all that a forward might change, caches and indices too, is its own."""
    memo: dict[int, Any] = {}

    def look(tensor: Tensor) -> Tensor:
        memo[id(tensor)] = copy_float(tensor)
        return tensor

    map_tensors(values, look)
    return copy.deepcopy(values, memo)


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
