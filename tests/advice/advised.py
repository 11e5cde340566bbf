"""What several test files of this folder use."""

import math

import torch
from torch import nn

import dtypepin

BF16, F16, F32 = torch.bfloat16, torch.half, torch.float32


def smooth(*shape):
    """Inputs that do not look like noise."""
    return torch.sin(torch.arange(math.prod(shape), dtype=F32) * 0.37).reshape(shape)


class Block(nn.Module):
    """A residual block: restoring its inner outputs does not feed float32 to the next one."""

    def __init__(self, width=16):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def transformer(depth=4, loud=None):
    """Blocks; the ``loud`` one shouts down the others."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(depth)))
    if loud is not None:
        with torch.no_grad():
            model[loud].down.weight.mul_(20)
    return model


def relative_error(model, x, **pins):
    with torch.no_grad():
        reference = model(x)
        with torch.autocast("cpu", BF16):
            if not pins:
                out = model(x)
            else:
                with dtypepin.pin_dtype(model, **pins):
                    out = model(x)
    return float((out.float() - reference).norm() / reference.norm())
