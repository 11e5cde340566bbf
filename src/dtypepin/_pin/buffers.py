"""A buffer that is read in another dtype than its own: what is written to the cast arrives."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from dtypepin._base.dtypes import cast
from dtypepin._base.torch_private import in_functorch, is_exporting, is_tracing


class BufferCast:
    """A buffer, and the cast of it that is read in pinned regions of one dtype until it is settled.

    Nested regions of that dtype share it, whichever module they find the buffer in.
    """

    __slots__ = ("original", "read")

    def __init__(self, original: Tensor, read: Tensor) -> None:
        self.original = original
        self.read = read

    def write_back(self) -> None:
        """Bring into the buffer what was written to the cast."""
        buffer, read = self.original, self.read
        if not is_dynamo_compiling():
            # Whether it was written cannot be told from ``_version``: ``.data``, batch_norm and
            # compiled code do not move it. A transform refuses to write what it did not wrap.
            if in_functorch() and not read._version:
                return
            if not is_tracing() and read.shape != buffer.shape:  # ``resize_`` in a forward
                buffer.data = cast(read.data, buffer.dtype)
                return
            if 0 in buffer.stride() and buffer.numel() > 1:
                return  # an expanded buffer, which nobody can write to
            if read.requires_grad and torch.is_grad_enabled() and read._version:
                self._write_back_with_its_graph()
                return
        with torch.no_grad():
            new = self._new(cast(read, buffer.dtype))
            # ``.data``: like batch_norm's own writing, it must not invalidate saved tensors.
            # Export does not see through ``.data``, and keeps no tensors for a backward.
            target = buffer if is_exporting() else buffer.data
            target.copy_(new)

    def refresh(self) -> None:
        """Bring into the cast what a region of another dtype wrote to the buffer meanwhile."""
        if is_dynamo_compiling():
            target = self.read
        elif in_functorch() or self.read.shape != self.original.shape:
            return
        else:
            target = self.read.data
        with torch.no_grad():
            target.copy_(self.original)

    def _new(self, written: Tensor) -> Tensor:
        # Untouched elements keep their very bits: a cast to fewer digits must not round them.
        same = self.read == cast(self.original, self.read.dtype)
        return torch.where(same, self.original, written)

    def _write_back_with_its_graph(self) -> None:
        # ``self.memory.copy_(self.weight * x)``: the buffer carries a graph on, as without a pin.
        written = cast(self.read, self.original.dtype)
        with torch.no_grad():
            written.data.copy_(self._new(written))
        self.original.copy_(written)
