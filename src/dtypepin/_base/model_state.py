"""What running a model may change of it, and how it is put back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dtypepin._base.errors import warn

_DICTS = ("_parameters", "_buffers", "_modules")


class ModelState:
    """Attributes, buffers and children of all modules of a model, as they are now.

    What a forward writes to a parameter in place is not kept: that would take the model's memory
    once more. ``written`` tells of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = [
            (part, dict(vars(part)), {name: dict(vars(part)[name]) for name in _DICTS})
            for part in model.modules()
            if not isinstance(part, torch.jit.ScriptModule)  # its attributes are elsewhere
        ]
        self.buffers = [(value, value.detach().clone()) for value in model.buffers()]
        self.versions = [
            (name, value, value._version)
            for name, value in model.named_parameters()
            if not value.is_inference()
        ]

    def put_back(self) -> None:
        """Make the model what it was."""
        for module, attributes, dicts in self.modules:
            _same_items(vars(module), attributes)
            for name, items in dicts.items():
                _same_items(vars(module)[name], items)
        for buffer, old in self.buffers:
            if buffer.grad_fn is not None:
                buffer.detach_()  # a forward wrote something with gradients into it
            if buffer.shape != old.shape or buffer.dtype is not old.dtype:
                buffer.data = old.clone()
            elif not torch.equal(buffer, old):
                buffer.data.copy_(old)

    def written(self) -> list[str]:
        """The parameters that were written to in place since."""
        return [name for name, value, version in self.versions if value._version != version]


def _same_items(now: dict[str, Any], before: dict[str, Any]) -> None:
    # The dict itself stays: hooks, views and compiled code hold on to it.
    if len(now) != len(before) or any(now.get(key, now) is not before[key] for key in before):
        now.clear()
        now.update(before)


def generators(model: nn.Module) -> list[torch.Generator]:
    """Torch's own generators of the CPU and of the CUDA devices that a model is on."""
    devices = {value.device for value in model.parameters() if value.device.type == "cuda"}
    return [
        torch.default_generator,
        *(torch.cuda.default_generators[device.index] for device in devices),
    ]


@contextmanager
def random_numbers_kept(model: nn.Module) -> Iterator[None]:
    """Torch's random numbers go on afterwards as if nothing had been drawn."""
    states = [(generator, generator.get_state()) for generator in generators(model)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


@contextmanager
def untouched(model: nn.Module) -> Iterator[ModelState]:
    """Eval mode, no autocast, no gradients for parameters inside; all as before after it."""
    state = ModelState(model)
    modules = list(model.modules())
    flags = [module.training for module in modules]
    wants = [(value, value.requires_grad) for value in model.parameters()]
    autocast = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
    with random_numbers_kept(model):
        try:
            for kind in autocast:
                torch.set_autocast_enabled(kind, False)
            for module in modules:
                module.training = False
            for value, _ in wants:
                value.requires_grad_(False)
            yield ModelState(model)  # with the flags of now
        finally:
            for kind, on in autocast.items():
                torch.set_autocast_enabled(kind, on)
            state.put_back()
            for module, training in zip(modules, flags, strict=True):
                module.training = training
            for value, wanted in wants:
                value.requires_grad_(wanted)
    written = state.written()
    if written:
        warn(
            f"the forward writes to parameters in place, which is not undone: {', '.join(written)}"
        )


@contextmanager
def run_eagerly() -> Iterator[bool]:
    """Compiled code runs as it was written; hooks put on inside would compile it anew each time.

    Yields:
        Whether there can be any: not before dynamo is loaded, and to import it costs seconds.
    """
    if "torch._dynamo" not in sys.modules or not hasattr(torch.compiler, "set_stance"):
        yield False
        return
    with torch.compiler.set_stance("force_eager"):
        yield True
