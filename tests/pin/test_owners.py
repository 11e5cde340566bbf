"""Who else holds a parameter or its memory."""

import pytest
import torch
from parameter_models import BF16, F32
from torch import nn

import dtypepin
from dtypepin import PinError


def test_a_tie_by_memory_alone_is_found():  # P5
    m = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}).bfloat16()
    m["b"].weight.data = m["a"].weight.data
    with pytest.raises(PinError, match=r"'b\.weight' is the same memory as 'a\.weight'"):
        dtypepin.apply(m, "^b$", override_parameters=True)


def test_shared_memory_stays_shared_memory():
    m = nn.Linear(2, 2).bfloat16().share_memory()
    with dtypepin.apply(m, "^$", override_parameters=True):
        assert m.weight.is_shared()
    assert m.weight.is_shared()


def test_views_of_one_piece_of_memory_are_not_stored_apart():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("whole", torch.zeros(4, dtype=BF16))
            self.a, self.b = nn.Parameter(self.whole[:2]), nn.Parameter(self.whole[2:])

    with pytest.raises(PinError, match=r"'(whole|a)' is the same memory as '(whole|a)', as a view"):
        dtypepin.apply(Flat(), "^$", override_parameters=True)
    # Neighbours in one piece of memory, as loaders hand them out, share nothing.
    m = Flat()
    del m.whole
    with dtypepin.apply(m, "^$", override_parameters=True):
        assert m.a.dtype is m.b.dtype is F32
