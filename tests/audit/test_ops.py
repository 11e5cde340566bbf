"""What counts as computing."""

import pytest
from audited import verdicts, x
from torch import nn

import dtypepin


@pytest.mark.parametrize(
    "move",
    [
        lambda x, y: x + y.nonzero().sum(),
        lambda x, y: x + y.any(),
        lambda x, y: x + y.signbit(),
        lambda x, y: x + y.argmax(),
        lambda x, y: x + y.masked_select(y > 0).numel(),
        lambda x, y: x + nn.functional.pad(y[None], (1, 1), mode="reflect").numel(),
        lambda x, y: x + y.diag_embed().numel(),
        lambda x, y: x + y.unique().numel(),
    ],
)
def test_moves_comparisons_and_searches_are_no_computing(move):
    class Moves(nn.Module):
        def forward(self, x, y):
            return move(x, y)

    m = nn.ModuleDict({"m": Moves()})
    with dtypepin.pin_dtype(m, "m"), dtypepin.audit(m) as report:
        m["m"](x(), x(features=4))
    assert verdicts(report) == {"m": ("honoured", "")}
