"""The sweep itself: that it sees what it is there to see. No framework is needed here."""

import pytest
import sweep
import torch
from torch import nn

from dtypepin._pin import arguments, handles, hooks, region

pytestmark = pytest.mark.zoo


class TinyAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, shift):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v)) + self.out(shift), None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.attn, self.head = TinyAttention(), nn.Linear(8, 2)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.attn(x, shift=2 * x)[0]
        return {"out": self.head(self.norm(x))}


class Shifted(Model):
    """Its norm takes two tensors."""

    def __init__(self):
        super().__init__()
        self.norm = ShiftedNorm()

    def forward(self, x):
        return self.head(self.norm(x, 2 * x))


class ShiftedNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, shift):
        return x + self.linear(shift)


def build(kind=Model):
    return lambda: (kind(), {"x": torch.randn(2, 5, 8)})


def verdicts(kind=Model):
    return {(o.kind, o.mode): (o.verdict, o.detail) for o in sweep.sweep(build(kind))}


def test_a_sound_model_is_honoured():
    assert {verdict for verdict, _ in verdicts().values()} == {sweep.HONOURED}


def test_a_norm_of_two_inputs_is_refused_with_advice_that_holds():
    found = verdicts(Shifted)
    assert found["norms", "bf16"][0] == sweep.REFUSED
    assert sweep.ADVICE in found["norms", "bf16"][1]


def test_a_model_that_fails_without_pins_is_not_held_against_them():
    class Float32Only(Model):
        def forward(self, x):
            assert x.dtype is torch.float32, "no bf16"
            return super().forward(x)

    found = verdicts(Float32Only)
    assert found["norms", "autocast"][0] == sweep.HONOURED
    assert found["norms", "bf16"][0] == sweep.MODEL_FAILS
    assert "no bf16" in found["norms", "bf16"][1]


def test_no_module_of_that_name_is_nothing_to_pin():
    found = verdicts(Plain)
    assert {verdict for verdict, _ in found.values()} == {sweep.NOTHING}


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(x)


def autocast_stays_on(monkeypatch):
    monkeypatch.setattr(region, "any_autocast_enabled", lambda: False)


def nothing_is_restored(monkeypatch):
    def leave(frame, output, old=region.leave):
        frame.restore = None
        return old(frame, output)

    monkeypatch.setattr(region, "leave", leave)


def hooks_stay(monkeypatch):
    monkeypatch.setattr(hooks, "detach", lambda module, pin: None)


def parameters_stay_covered(monkeypatch):
    monkeypatch.setattr(handles._params, "uncover", lambda modules, rule: None)


def only_the_first_is_cast(monkeypatch):
    def cast_all(args, kwargs, dtype):
        first = args[0]
        return first, None if first.dtype is dtype else ((first.to(dtype), *args[1:]), kwargs)

    monkeypatch.setattr(arguments, "cast_all", cast_all)


@pytest.mark.parametrize(
    ("fault", "kind", "mode", "text"),
    [
        (autocast_stays_on, "attention", "autocast", "ran in bfloat16"),
        (nothing_is_restored, "attention", "autocast", "got torch.bfloat16 and gave torch.float32"),
        (nothing_is_restored, "norms", "bf16", "raised RuntimeError: mat1 and mat2"),
        (hooks_stay, "norms", "bf16", "hooks not as before: ['norm']"),
        (parameters_stay_covered, "norms", "autocast", "views not as before: ['norm']"),
        (only_the_first_is_cast, "attention", "bf16", "raised RuntimeError"),
    ],
)
def test_each_fault_of_pins_is_seen(fault, kind, mode, text, monkeypatch):
    fault(monkeypatch)
    verdict, detail = verdicts()[kind, mode]
    assert verdict == sweep.FAILED, (verdict, detail)
    assert text in detail
