"""The model in low precision, which is the model as users run it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dtypepin._advice.inputs import Batch, as_float32, fresh
from dtypepin._base.dtypes import cast
from dtypepin._base.model_state import ModelState, generators
from dtypepin._base.nested import map_tensors
from dtypepin._pin.verbs import pin_dtype


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
