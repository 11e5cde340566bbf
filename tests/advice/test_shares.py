"""How much each module adds to the error."""

import pytest
import torch
from advised import relative_error, smooth, transformer
from torch import nn

import dtypepin


def test_shares_are_what_one_at_a_time_runs_say():
    class Residual(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.norm, self.lin = nn.LayerNorm(16), nn.Linear(16, 16)
            with torch.no_grad():
                self.lin.weight.mul_(size)

        def forward(self, x):
            return x + self.lin(self.norm(x))

    torch.manual_seed(0)
    model, x = nn.Sequential(*(Residual(size) for size in (1, 3, 0.3, 2))), smooth(64, 16)
    plan = dtypepin.suggest(model, x, probes=32, candidates="lin", max_runs=1)
    shares = {row.name: row.gain for row in plan.rows}
    before = relative_error(model, x) ** 2
    for name, share in shares.items():
        real = (before - relative_error(model, x, patterns=f"^{name}$") ** 2) / before
        assert share == pytest.approx(real, rel=0.25, abs=0.02)
    assert sum(shares.values()) == pytest.approx(1, rel=0.1)


def test_a_buffer_that_a_candidate_gives_out_stays_without_gradient():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", smooth(16, 16))
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self):
            return self.table

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.lin = Table(), nn.Linear(16, 16)

        def forward(self, x):
            return self.lin(x @ self.table())

    model = Net()
    dtypepin.suggest(model, smooth(32, 16))
    assert not model.table.table.requires_grad


def test_hooks_of_the_user_count_once():
    def louder(module, args):
        return (args[0] * 8,)

    class Louder(nn.Linear):
        def forward(self, x):
            return super().forward(x * 8)

    torch.manual_seed(0)
    weights = [nn.Linear(16, 16) for _ in range(2)]
    inside = nn.Sequential(weights[0], nn.Tanh(), Louder(16, 16))
    inside[2].load_state_dict(weights[1].state_dict())
    plan = dtypepin.suggest(inside, smooth(32, 16))
    hooked = nn.Sequential(weights[0], nn.Tanh(), weights[1])
    hooked[2].register_forward_pre_hook(louder)
    other = dtypepin.suggest(hooked, smooth(32, 16))
    shares = [{row.name: row.share for row in found.rows} for found in (plan, other)]
    assert shares[0]["0"] == pytest.approx(shares[1]["0"], rel=0.02)
    assert shares[0]["2"] == pytest.approx(shares[1]["2"], rel=0.02)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_models(reentrant):
    from torch.utils.checkpoint import checkpoint

    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = transformer(loud=2)

        def forward(self, x):
            for block in self.body:
                x = checkpoint(block, x, use_reentrant=reentrant) if self.saves else x
                x = x if self.saves else block(x)
            return x

    model = Saving()
    shares = []
    for model.saves in (False, True):
        plan = dtypepin.suggest(model, smooth(32, 16), tolerance=0.7)
        assert plan.reached
        shares.append({row.name: row.share for row in plan.rows})
    if reentrant:  # it knows no ``autograd.grad``
        assert plan.notes[0].startswith("the output has no gradient")
    else:
        assert shares[0] == pytest.approx(shares[1])
