"""What several test files of this folder use."""

import torch
from torch import nn

BF16, F16, F32 = torch.bfloat16, torch.half, torch.float32


def x(dtype=BF16, features=4):
    return torch.randn(3, features, dtype=dtype)


def verdicts(report):
    return {pin.name: (pin.verdict, pin.detail) for pin in report.pins}


def row(report, name):
    (found,) = [module for module in report.modules if module.name == name]
    return found


class OwnAutocast(nn.Linear):
    def forward(self, x):
        with torch.autocast("cpu", BF16):
            return super().forward(x)


class CallsForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.softmax = nn.LayerNorm(4), nn.Softmax(-1)

    def forward(self, x):
        return self.softmax.forward(self.norm.forward(x))
