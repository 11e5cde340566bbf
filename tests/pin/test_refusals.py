"""What is refused before anything is changed."""

import copy

import pytest
import torch
from parameter_models import BF16, F32
from torch import nn
from torch.nn.utils import prune

import dtypepin
from dtypepin import PinError


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_are_stored_or_refused(kind):
    m = nn.ModuleDict({"rnn": kind(4, 4)}).bfloat16()
    for pattern, override in [("rnn", False), ("^$", False), ("^$", True)]:
        with pytest.raises(PinError, match="pin that module itself with override_parameters=True"):
            dtypepin.apply(m, pattern, override_parameters=override)
    x = torch.randn(3, 1, 4, dtype=BF16)
    with dtypepin.apply(m, "rnn", override_parameters=True):
        out, _ = m["rnn"](x)
        assert out.dtype is BF16
        expected, _ = copy.deepcopy(m["rnn"])(x)
        assert torch.equal(out, expected)
    assert m["rnn"].weight_ih_l0.dtype is BF16
    with dtypepin.apply(m.float(), "rnn", output="keep"):  # nothing differs, nothing to refuse
        assert m["rnn"](x)[0].dtype is F32


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda linear: nn.utils.weight_norm(linear),
        lambda linear: nn.utils.spectral_norm(linear),
        lambda linear: prune.l1_unstructured(linear, "weight", 0.5),
    ],
    ids=["weight_norm", "spectral_norm", "pruning"],
)
def test_weights_computed_in_a_hook_are_stored_or_refused(make):
    m = nn.Sequential(make(nn.Linear(4, 4))).bfloat16()
    with pytest.raises(PinError, match=r"torch\.nn\.utils\.parametrizations"):
        dtypepin.apply(m, "0")
    with dtypepin.apply(m, "0", override_parameters=True, output="keep"):
        assert m(torch.randn(2, 4, dtype=BF16)).dtype is F32


def test_data_parallel_is_refused_where_it_would_have_to_cast():
    inner = nn.Sequential(nn.LayerNorm(4)).bfloat16()
    m = nn.DataParallel(inner)
    with pytest.raises(PinError, match=r"DataParallel.*override_parameters=True"):
        dtypepin.apply(m, "0")
    with dtypepin.apply(m, "0", override_parameters=True):
        assert m(torch.randn(2, 4, dtype=BF16)).dtype is BF16


def test_an_embedding_that_rescales_its_weight_is_cast_for_no_call():
    m = nn.Sequential(nn.Embedding(4, 3, max_norm=1.0)).bfloat16()
    for pattern in ("^0$", "^$"):
        with pytest.raises(PinError, match=r"'0' \(Embedding\) has max_norm"):
            dtypepin.apply(m, pattern)
    with torch.no_grad():
        m[0].weight.fill_(10)
    dtypepin.apply(m, "^0$", override_parameters=True)
    m(torch.arange(4))
    assert torch.allclose(m[0].weight.norm(dim=1), torch.ones(4))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_cannot_be_cast_and_are_refused(kind):
    m = kind(4, 2, sparse=True).bfloat16()
    with pytest.raises(dtypepin.PinError, match=r"sparse=True.*override_parameters=True"):
        dtypepin.apply(m, "^$")
    with dtypepin.pin_dtype(m, "^$", override_parameters=True):
        m(torch.tensor([[1]])).sum().backward()
    assert m.weight.grad.is_sparse
