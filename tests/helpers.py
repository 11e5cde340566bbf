"""Small models and recorders that several test files use."""

from __future__ import annotations

import torch
from torch import nn


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
