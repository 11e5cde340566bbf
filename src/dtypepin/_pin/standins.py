"""What a reader holds in a region: a cast that is, to whoever asks, the module's own tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from dtypepin._base.torch_private import disabled_torch_function

_REGISTER = nn.Module.register_parameter.__code__


class Read(Tensor):
    """A cast that stands for a tensor of a module; its attributes are that tensor's."""

    # Ops give plain tensors, as those on parameters do.
    __torch_function__ = disabled_torch_function

    def __getattr__(self, name: str) -> Any:
        # Only asked for what no tensor has.
        return getattr(self.__dict__["cast"].original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            Tensor.__setattr__(self, name, value)
        else:
            setattr(self.__dict__["cast"].original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["cast"].original, name)

    def __del__(self) -> None:
        # ``self.weight[0].mul_(2)`` under no_grad: nobody holds what was written until the region
        # ends, and the next read must find it.
        known = self.__dict__.get("cast")
        if known is not None and self._version:
            known.hold(self)

    @property
    def data(self) -> Tensor:
        """The same memory without a graph: written to, it would not tell."""
        self.__dict__["cast"].expose(self)
        return Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        self.__dict__["cast"].expose(self)
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    def view(self, *shape: Any) -> Any:
        """A view in another dtype is one of the stored bits, whose meaning only the model knows."""
        if len(shape) == 1 and isinstance(shape[0], torch.dtype):
            return self.__dict__["cast"].original.view(*shape)
        return Tensor.view(self, *shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = Tensor.detach(self).clone()
        if isinstance(self.__dict__["cast"].original, nn.Parameter):
            copied = nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__dict__["cast"].original.__reduce_ex__(protocol)


def _exposing(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    def hand_out(self: Read, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["cast"].expose(self)
        return method(self, *args, **kwargs)

    hand_out.__name__ = name
    return hand_out


for _name in (
    "__array__",
    "__dlpack__",
    "data_ptr",
    "detach",
    "numpy",
    "storage",
    "untyped_storage",
):
    setattr(Read, _name, _exposing(_name))


class BufferRead(Read):
    """A cast that stands for a buffer."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """``type(self.mean)(data)`` makes a tensor."""
        return Tensor(*args, **kwargs)


class ParameterRead(Read):
    """A cast that stands for a parameter; a leaf to whoever asks."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """``type(self.weight)(data)`` makes a parameter."""
        return nn.Parameter(*args, **kwargs)

    #: ``isinstance(tensor, nn.Parameter)`` asks for this.
    _is_param = True

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter wants gradients, also under ``no_grad``."""
        return bool(self.__dict__["cast"].original.requires_grad)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.__dict__["cast"].original.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Set it on the parameter."""
        self.__dict__["cast"].original.requires_grad_(requires_grad)
        return self

    @property
    def grad(self) -> Tensor | None:
        """The parameter's, in its own dtype."""
        found: Tensor | None = self.__dict__["cast"].original.grad
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.__dict__["cast"].original.grad = value

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """True, as for the parameter."""
        return bool(self.__dict__["cast"].original.is_leaf)

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """None, as for the parameter."""
        # A module that was made in the region, and so has no view, keeps the parameter.
        caller: FrameType | None = sys._getframe(1)
        if caller is not None and caller.f_code is _REGISTER:
            values, name = caller.f_locals["self"]._parameters, caller.f_locals["name"]
            known = self.__dict__["cast"]
            known.registered = [*(known.registered or ()), (values, name)]
        return self.__dict__["cast"].original.grad_fn

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """On the parameter: only a leaf has it."""
        return self.__dict__["cast"].original.register_post_accumulate_grad_hook(hook)
