"""What a forward writes arrives in the tensor that the module owns."""

import copy

import pytest
import torch
from parameter_models import BF16, F32, F64, bits, same_state, state_bits
from torch import nn

import dtypepin
from helpers import fullgraph


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("override", [False, True])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_statistics(affine, override, momentum):  # P4
    x = torch.randn(8, 4, dtype=BF16)
    wide = nn.BatchNorm1d(4, affine=affine, momentum=momentum)
    m = nn.Sequential(copy.deepcopy(wide)).bfloat16()
    with dtypepin.apply(m, "^0$", override_parameters=override):
        assert m[0].num_batches_tracked.dtype is torch.int64
        assert m(x).dtype is BF16
        wide(x.float())
        stored = F32 if override else BF16
        assert m[0].running_mean.dtype is m.state_dict()["0.running_var"].dtype is stored
        assert torch.equal(m[0].running_mean, wide.running_mean.to(stored))
        assert torch.equal(m[0].running_var, wide.running_var.to(stored))
        assert m[0].num_batches_tracked == 1
        m.eval()
        before = state_bits(m)
        assert m(x).dtype is BF16
        assert same_state(state_bits(m), before)
    assert m[0].running_mean.dtype is BF16


class Keeps(nn.Module):
    """Buffers that a forward reads, writes in place, and assigns."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.tensor([1 / 3, 2 / 3]))
        self.register_buffer("cache", torch.tensor([1 / 3, 1 / 3]))
        self.register_buffer("mean", torch.tensor([1 / 3]))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        self.cache[0] = x.sum()
        assert self.cache[0] == x.sum()  # a second read sees what was written
        self.mean = self.mean * 0 + x.mean()
        self.steps += 1
        self.seen = (self.table.dtype, self.cache.dtype, self.mean.dtype)
        return x * self.table.sum()


@pytest.mark.parametrize("stored", [BF16, F32, F64])
@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_what_a_forward_writes_to_buffers_arrives(stored, dtype):
    m = Keeps().to(stored)
    table, untouched = bits(m.table), bits(m.cache)
    with dtypepin.apply(m, "^$", dtype=dtype):
        m(torch.tensor([2.0, 4.0]))
        assert m.seen == (dtype, dtype, dtype)
        assert m.cache[0] == 6
        assert m.mean == 3
        assert m.steps == 1
        assert m.mean.dtype is stored  # an assigned buffer keeps its own dtype
        assert m.cache.dtype is m.table.dtype is stored
    # Not written: not rounded, not by a narrowing pin either.
    assert torch.equal(bits(m.table), table)
    assert torch.equal(bits(m.cache)[m.cache.element_size() :], untouched[m.cache.element_size() :])


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=fullgraph)])
@pytest.mark.parametrize("how", ["in place", "data", "batch_norm"])
def test_writes_that_move_no_version_arrive(how, compiled):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(2))
            self.register_buffer("var", torch.ones(2))

        def forward(self, x):
            if how == "in place":
                self.mean.add_(1)
            elif how == "data":
                self.mean.data.mul_(0.5).add_(1)
            else:
                nn.functional.batch_norm(x, self.mean, self.var, training=True, momentum=1.0)
            return x * 2

    m = Writes().bfloat16()
    dtypepin.apply(m, "^$")
    call = torch.compile(m, backend="aot_eager") if compiled else m
    call(torch.ones(4, 2, dtype=BF16))
    assert m.mean.tolist() == [1.0, 1.0]


def test_statistics_saved_for_backward_elsewhere_may_be_written_in_a_region():
    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x):
            return self.norm(x * self.norm.running_var)

    m = Uses().bfloat16()
    x = torch.randn(4, 2, dtype=BF16, requires_grad=True)
    with dtypepin.apply(m, "^norm$"):
        m(x).sum().backward()  # batch_norm's own writing does not invalidate it either
    assert x.grad is not None
    assert m.norm.running_var.tolist() != [1.0, 1.0]
