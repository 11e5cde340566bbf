"""Small models and recorders that several test files use."""

from __future__ import annotations

import pytest
import torch
from torch import nn

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
#: Every test that needs the hooks to be traced into one graph, and compiled code to be kept.
fullgraph = pytest.mark.skipif(
    TORCH < (2, 13), reason="measured on torch 2.13 and 2.14; 2.4 breaks the graph at a hook"
)


class Seen(nn.Module):
    """A Linear that records the dtypes it saw: of its input, its weight and its output."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, features))
        self.seen: list[tuple[torch.dtype, torch.dtype, torch.dtype]] = []

    def forward(self, x):
        weight = self.weight
        out = nn.functional.linear(x, weight)
        self.seen.append((x.dtype, weight.dtype, out.dtype))
        return out
