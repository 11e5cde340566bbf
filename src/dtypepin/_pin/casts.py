"""The cast that stands for a parameter or a buffer in a region, and what becomes of it.

There is one cast for each tensor in all nested regions of one dtype. To whoever reads it, it is the
parameter in another dtype: same attributes, same ``requires_grad``, an ``nn.Parameter``. What is
written to it arrives in the parameter, element by element, and nothing is written else.
"""

from __future__ import annotations

import weakref
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from dtypepin._base.dtypes import CASTS, cast
from dtypepin._base.errors import PinError
from dtypepin._base.torch_private import in_functorch, is_exporting
from dtypepin._pin.standins import BufferRead, ParameterRead, Read

#: Integers of the same size, for a comparison of bits.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Registered: TypeAlias = "tuple[dict[str, Any], str]"


class Cast:
    """One parameter or buffer, and the cast of it that a region reads.

    Attributes:
        original: the tensor that the module owns.
        version: its version when the cast was made, or last brought up to date.
        before: a copy of the cast as it was made, where it could be written to unseen.
        registered: where somebody has put the cast into a module that has no view.
    """

    __slots__ = (
        "__weakref__",
        "_held",
        "_weak",
        "before",
        "made",
        "original",
        "registered",
        "version",
    )

    def __init__(self, original: Tensor, dtype: torch.dtype, kind: type[Read]) -> None:
        self.original = original
        self.version = version(original)
        self.before: Tensor | None = None
        self.registered: list[Registered] | None = None
        self._held: Tensor | None = None
        self._weak: weakref.ref[Tensor] | None = None
        if torch.is_inference_mode_enabled() and not original.is_inference():
            with torch.inference_mode(False):  # else it would not be what a parameter is
                read = CASTS[dtype](original)
        else:
            read = CASTS[dtype](original)
        if type(read) is Tensor:
            read.__class__ = kind
            read.__dict__["cast"] = self
        else:  # a DTensor, say
            read.__dict__.update(original.__dict__)
            if kind is ParameterRead:
                setattr(read, "_is_param", True)  # noqa: B010
        if kind is BufferRead and read.layout is torch.strided and type(read) is BufferRead:
            # Batch norm and compiled code write without moving the version.
            with torch.no_grad():
                self.before = read.detach().clone()
            self._held = read
        elif has_graph(read) or type(read) is not ParameterRead:
            self._held = read
        else:  # a copy of all weights is not kept where nothing else needs it
            self._weak = weakref.ref(read)
        self.made: Tensor | None = read  # until who made this has taken it

    @property
    def read(self) -> Tensor | None:
        """The cast; None once nobody holds it any more."""
        return self._held if self._weak is None else self._weak()

    def expose(self, read: Tensor) -> None:
        """The memory of the cast is handed out: it may be written to unseen from now on."""
        if self.before is None:
            with torch.no_grad():
                self.before = Tensor.detach(read).clone()
        self.hold(read)

    def hold(self, read: Tensor) -> None:
        """Keep the cast until the region ends."""
        self._held, self._weak = read, None

    def write_back(self, read: Tensor | None) -> None:
        """Bring what was written to the cast into the tensor that the module owns."""
        if read is None or (self.before is None and not version(read)):
            return
        if self.original.is_inference() and not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                self._write_back(read)
        else:
            self._write_back(read)
        self.version = version(self.original)

    def _write_back(self, read: Tensor) -> None:
        original, moved = self.original, version(read) > 0
        if read.shape != original.shape or read.dtype is original.dtype:  # ``resize_``, ``.data =``
            original.data = cast(Tensor.detach(read).clone(), original.dtype)
            return
        if read.layout is not torch.strided or read.is_meta:
            if moved:
                with torch.no_grad():
                    original.copy_(read)
            return
        with torch.no_grad():
            before = self.before
            if before is None:
                before = cast(original.detach(), read.dtype)
                if self.version != version(original):
                    raise PinError(
                        "a parameter was written to in a pinned region and by somebody else at "
                        "the same time, and which elements were cannot be told; write to it "
                        "outside of the pinned call"
                    )
            now = Tensor.detach(read)
            bits = _BITS[now.element_size()]
            before_bits, bits_now = before.view(bits), now.view(bits)
            # Elsewhere than on the CPU the answer would have to be waited for.
            if now.is_cpu and torch.equal(before_bits, bits_now):
                return
            if 0 in original.stride() and original.numel() > 1:
                raise PinError(
                    "an expanded buffer was written to in a pinned region; torch refuses this "
                    "without a pin, since several of its elements are one place in memory"
                )
            self._check_graph(read)
            changed = before_bits != bits_now
            new = torch.where(changed, cast(now, original.dtype), original.detach())
        if moved and has_graph(read) and not isinstance(original, nn.Parameter):
            # ``self.memory.copy_(self.weight * x)``: the buffer carries a graph on.
            written = cast(Tensor.as_subclass(read, Tensor), original.dtype)
            with torch.no_grad():
                written.data.copy_(new)
            original.copy_(written)
        elif moved:
            original.detach().copy_(new)  # moves the version, as the forward did
        else:
            original.data.copy_(new)  # batch norm must not invalidate what is saved for backward
        if self.before is not None:
            self.before.copy_(now)

    def _check_graph(self, read: Tensor) -> None:
        if isinstance(self.original, nn.Parameter) and has_graph(read):
            node: Any = Tensor.grad_fn.__get__(read)  # type: ignore[union-attr]
            if type(node).__name__ != "ToCopyBackward0":
                raise PinError(
                    "a parameter was written to in place, with gradients on, in a pinned region; "
                    "torch refuses this without a pin too: write under torch.no_grad()"
                )

    def refresh(self) -> None:
        """Bring into the cast what others wrote to the tensor meanwhile."""
        read = self.read
        silent = self.before is not None
        if read is None or (not silent and version(self.original) == self.version):
            return
        self.version = version(self.original)
        if read.shape != self.original.shape:
            return
        with torch.no_grad():
            Tensor.detach(read).data.copy_(self.original)
            if self.before is not None:
                self.before.copy_(Tensor.detach(read))

    def close(self) -> None:
        """The region ends: the cast is an ordinary tensor from now on."""
        read = self.read
        if read is None:
            return
        try:
            self.write_back(read)
        finally:
            for values, name in self.registered or ():
                if values.get(name) is read:
                    values[name] = self.original
            if isinstance(read, Read):
                del read.__dict__["cast"]
                setattr(read, "__class__", Tensor)  # noqa: B010


class TracedCast:
    """A buffer and its cast where what was written cannot be asked for: in a graph, on ``meta``.

    The graph then holds the writing, of what differs alone.
    """

    __slots__ = ("original", "read")

    def __init__(self, original: Tensor, read: Tensor) -> None:
        self.original = original
        self.read = read

    def write_back(self) -> None:
        """Bring into the buffer what was written to the cast."""
        buffer, read = self.original, self.read
        if not is_dynamo_compiling():
            # A transform refuses to write what it did not wrap.
            if in_functorch() and not read._version:
                return
            if 0 in buffer.stride() and buffer.numel() > 1:
                return  # an expanded buffer, which nobody can write to
        with torch.no_grad():
            # Untouched elements keep their very bits: a cast to fewer digits must not round them.
            same = read == cast(buffer, read.dtype)
            new = torch.where(same, buffer, cast(read, buffer.dtype))
            # ``.data``: like batch_norm's own writing, it must not invalidate saved tensors.
            # Export does not see through ``.data``, and keeps no tensors for a backward.
            target = buffer if is_exporting() else buffer.data
            target.copy_(new)

    def refresh(self) -> None:
        """Bring into the cast what a region of another dtype wrote to the buffer meanwhile."""
        if is_dynamo_compiling() or not in_functorch():
            with torch.no_grad():
                self.read.copy_(self.original)


def version(tensor: Tensor) -> int:
    """How often a tensor was written to; 0 for those of inference mode, which do not count."""
    return 0 if tensor.is_inference() else tensor._version


def has_graph(tensor: Tensor) -> bool:
    """Whether autograd follows a tensor, whatever its class says."""
    found: bool = Tensor.requires_grad.__get__(tensor)  # type: ignore[attr-defined]
    return found
