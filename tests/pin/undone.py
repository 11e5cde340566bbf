"""What several test files of this folder use."""

import torch
from torch import nn

BF16, F16, F32, F64 = torch.bfloat16, torch.half, torch.float32, torch.float64


def picture(model):
    """Everything that undo has to give back."""
    return {
        name: (
            set(part.__dict__),
            {k: type(v) for k, v in part.__dict__.items() if k.startswith("_")},
            [len(v) for k, v in part.__dict__.items() if k.endswith("hooks")],
            {k: (id(v), v.dtype, v.tolist()) for k, v in part.named_parameters(recurse=False)},
            {k: (v.dtype, v.tolist()) for k, v in part.named_buffers(recurse=False)},
            {k: v for k, v in part.__dict__.items() if not k.startswith("_")},
        )
        for name, part in model.named_modules()
    }


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.lin(x))

    def encode(self, x):
        return self.lin(x)


def x(dtype=BF16):
    return torch.randn(3, 4, dtype=dtype)
