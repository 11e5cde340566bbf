"""Methods other than forward. N4 of the cases."""

import functools
import inspect

import pytest
import torch
from torch import nn

import dtypepin
from dtypepin import PinError
from helpers import Seen

BF16, F32 = torch.bfloat16, torch.float32


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Seen(4)

    def forward(self, x):
        return self.encode(x)

    def encode(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Doc of encode."""
        return self.inner(x) * scale

    def both(self, x):
        return self(x)

    @staticmethod
    def static(x):
        return x.dtype

    @classmethod
    def kind(cls, x):
        return cls.__name__, x.dtype


def x():
    return torch.randn(2, 4, dtype=BF16)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("override", [False, True])
@pytest.mark.parametrize("methods", ["encode", ["forward", "encode"], ["both", "encode"]])
def test_a_method_that_another_one_calls(methods, override, autocast):  # N4
    m = nn.Sequential(Coder()).bfloat16()
    pins = dtypepin.apply(m, "^0$", methods_to_override=methods, override_parameters=override)
    calls = [m[0].encode, m[0], m[0].both, lambda y: m[0].encode(x=y, scale=2.0)]
    with torch.autocast("cpu", BF16, enabled=autocast):
        for call in calls:
            m[0].inner.seen.clear()
            assert call(x()).dtype is BF16
            assert m[0].inner.seen == [(F32, F32, F32)]
            assert torch.is_autocast_enabled("cpu") is autocast
    pins.remove()
    assert "encode" not in m[0].__dict__
    assert "both" not in m[0].__dict__
    assert m[0].encode(x()).dtype is BF16


def test_static_and_class_methods():
    m = Coder()
    with dtypepin.apply(m, "^$", methods_to_override=["static", "kind"]):
        assert m.static(x()) is F32
        assert m.kind(x()) == ("Coder", F32)
    assert m.static(x()) is BF16


def test_the_signature_is_still_that_of_the_method():
    m = Coder()
    signature = inspect.signature(m.encode)
    with dtypepin.apply(m, "^$", methods_to_override="encode"):
        assert inspect.signature(m.encode) == signature


def test_modules_without_the_method_are_passed_over():
    m = nn.ModuleDict({"coder": Coder(), "lin": nn.Linear(4, 4)})
    pins = dtypepin.apply(m, ["coder$", "lin"], methods_to_override=["forward", "encode"])
    assert [(pin.name, pin.method) for pin in pins] == [
        ("coder", "forward"),
        ("coder", "encode"),
        ("lin", "forward"),
    ]


def test_a_typo_is_refused_with_a_near_miss():
    with pytest.raises(PinError, match=r"'encdoe'.*did you mean 'encode'"):
        dtypepin.apply(Coder(), "^$", methods_to_override="encdoe")


def test_an_attribute_that_is_no_method_is_refused():
    m = Coder()
    m.encode_dtype = BF16
    for wrong in ("encode_dtype", "inner"):
        with pytest.raises(PinError, match="no matched module has"):
            dtypepin.apply(m, "^$", methods_to_override=wrong)


def test_an_attribute_is_not_lost_when_the_method_raises():
    m = Coder()
    with dtypepin.apply(m, "^$", methods_to_override="encode"), pytest.raises(TypeError):
        m.encode()
    assert m.encode(x().float()).dtype is F32


def test_what_a_wrapper_cannot_stand_for_is_refused():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Coder()

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def __getitem__(self, x):
            return x

        @property
        def encoder(self):
            return self.inner.encode

    for wrong in ("encode", "encoder", "__getitem__", "__call__"):
        with pytest.raises(PinError, match=f"methods_to_override: got '{wrong}'"):
            dtypepin.apply(Odd(), "^$", methods_to_override=wrong)


def test_a_partial_method():
    class Partial(Coder):
        twice = functools.partialmethod(Coder.encode, scale=2.0)

    m = Partial()
    with dtypepin.apply(m, "^$", methods_to_override="twice", output="keep"):
        assert m.twice(x()).dtype is F32
    assert "twice" not in m.__dict__


def test_a_property_is_no_method_and_no_near_miss():
    class Has(nn.Module):
        @property
        def encoder(self):
            return self

        def encode(self, x):
            return x

    with pytest.raises(PinError, match="no matched module has") as caught:
        dtypepin.apply(Has(), "^$", methods_to_override="encoder")
    assert "'encode'" in str(caught.value)
    assert "mean 'encoder'" not in str(caught.value)


def test_the_table_names_the_method_that_was_not_called():
    class Has(nn.Module):
        def forward(self, x):
            return x

        encode = forward

    m = Has()
    pins = dtypepin.apply(m, "^$", methods_to_override=["forward", "encode"])
    m(torch.ones(1))
    assert str(pins).endswith("not called so far: (root).encode")
