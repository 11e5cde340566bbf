"""What several test files of this folder use."""

import torch

BF16, F16, F32, F64 = torch.bfloat16, torch.half, torch.float32, torch.float64


def bits(tensor):
    return tensor.detach().clone().reshape(-1).view(torch.uint8)


def state_bits(module):
    return {name: (value.dtype, bits(value)) for name, value in module.state_dict().items()}


def same_state(one, two):
    return one.keys() == two.keys() and all(
        one[k][0] is two[k][0] and torch.equal(one[k][1], two[k][1]) for k in one
    )
