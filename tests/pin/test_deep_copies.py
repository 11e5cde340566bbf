"""Deep copies of pinned models run their own weights."""

import copy
import pickle

import pytest
import torch
from torch import nn
from undone import BF16, F32, Net, picture, x

import dtypepin
from helpers import Seen


@pytest.mark.parametrize("override", [False, True])
@pytest.mark.parametrize("method", ["forward", "encode"])
def test_a_deep_copy_runs_its_own_weights(override, method):  # U1
    m = Net().bfloat16()
    dtypepin.apply(m, "", override_parameters=override, methods_to_override=[method, "forward"])
    twin = copy.deepcopy(m)
    with torch.no_grad():
        for value in twin.parameters():
            value.zero_()
    call = twin if method == "forward" else twin.encode
    assert call(x()).abs().max() == 0
    assert m(x()).abs().max() > 0
    assert dtypepin.unpin(twin) == (4 if method == "encode" else 3)
    assert "encode" not in twin.__dict__
    assert twin.lin.weight.dtype is BF16
    assert not twin.lin._forward_hooks
    assert m.lin._forward_hooks
    assert m.lin.weight.dtype is (F32 if override else BF16)
    assert twin(x()).dtype is BF16


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_copy_is_still_pinned(copier):  # U1, U2
    m = nn.Sequential(Seen(4)).bfloat16()
    dtypepin.apply(m, "0")
    twin = copier(copier(m))
    twin(x())
    assert twin[0].seen == [(F32, F32, F32)]
    assert dtypepin.unpin(twin) == 1
    assert picture(twin).keys() == picture(m).keys()
