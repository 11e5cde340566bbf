"""What goes in and what comes out. I1 to I8 and O1 to O5 of the cases."""

import dataclasses
from collections import OrderedDict

import pytest
import torch
from torch import nn

import dtypepin
from dtypepin import PinError
from helpers import Seen

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


class Spy(nn.Module):
    """Keeps what it is given and hands out what it is told."""

    def __init__(self, make=lambda *args, **kwargs: args[0]):
        super().__init__()
        self.make = make

    def forward(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        return self.make(*args, **kwargs)


def pinned(module, dtype="float32", **kwargs):
    dtypepin.apply(module, "^$", dtype=dtype, **kwargs)
    return module


@pytest.mark.parametrize("dtype", ["half", "bf16", "float32"])
def test_integer_indices_are_untouched(dtype):  # I1
    ids = torch.tensor([257, 2049])
    spy = pinned(Spy(), dtype)
    assert spy(ids) is ids
    table = pinned(nn.Embedding(2050, 2), dtype)
    assert torch.equal(table(ids), table.weight[ids].to(resolved(dtype)).float())


def resolved(name):
    return {"half": torch.half, "bf16": torch.bfloat16, "float32": torch.float32}[name]


def test_the_first_floating_tensor_counts_not_the_first_argument():  # I1
    spy = pinned(Spy(lambda ids, x: x))
    ids, x = torch.arange(2), torch.ones(2, dtype=torch.bfloat16)
    assert spy(ids, x).dtype is torch.bfloat16
    assert spy.args[0] is ids
    assert spy.args[1].dtype is torch.float32


class AdaptiveNorm(nn.Module):
    """As in diffusers: the caller says which dtype to compute in."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x, step, hidden_dtype=None):
        shift = self.linear(torch.ones(2, 4).mul(step[:, None]).to(hidden_dtype))
        return shift if x is None else self.norm(x) + shift

    def embed(self, step, hidden_dtype):
        return self(None, step, hidden_dtype)


@pytest.mark.parametrize("outer", ["float32", "float64", "half"])
@pytest.mark.parametrize("override", [True, False])
def test_an_embedding_in_a_pinned_region_gives_what_that_region_would_read(outer, override):  # O5
    # ``"embeddings"`` finds BERT's block of embeddings, and each single one in it.
    spy = Spy(lambda ids: spy.table(ids))
    spy.table = nn.Embedding(4, 2, dtype=torch.bfloat16)
    dtypepin.apply(spy, "table", override_parameters=override)
    pins = dtypepin.apply(spy, "^$", dtype=outer, output="keep")
    out = spy(torch.arange(4))
    assert out.dtype is getattr(torch, outer)
    assert torch.equal(out, spy.table.weight.to(out.dtype))
    assert spy.table(torch.arange(4)).dtype is torch.bfloat16  # outside, as it would be unpinned
    with pins.disabled():
        assert spy(torch.arange(4)).dtype is torch.bfloat16


@pytest.mark.parametrize("inputs", ["first", "all"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("with_tensor", [True, False])
def test_an_argument_that_names_a_floating_dtype_names_the_pins(inputs, autocast, with_tensor):
    m = AdaptiveNorm() if autocast else AdaptiveNorm().bfloat16()
    pins = dtypepin.apply(m, "^$", inputs=inputs, methods_to_override=["forward", "embed"])
    x = torch.randn(2, 4, dtype=torch.bfloat16) if with_tensor else None
    step = torch.tensor([1, 2])
    with dtypepin.audit(m) as report, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outs = [m(x, step, torch.bfloat16), m(x, step, hidden_dtype=torch.bfloat16)]
        outs.append(m.embed(step, torch.bfloat16))
    assert {pin.verdict for pin in report.pins} == {"honoured"}
    assert [out.dtype for out in outs] == [torch.bfloat16] * 3  # what came in, or was asked for
    pins.remove()


def test_only_floating_dtypes_among_the_arguments_are_replaced():
    spy = pinned(Spy())
    x = torch.ones(2, dtype=torch.bfloat16)
    spy(x, torch.int64, torch.bfloat16, [torch.half], a=torch.complex64, b=torch.float64, c="half")
    assert spy.args[1:] == (torch.int64, torch.float32, [torch.half])
    assert spy.kwargs == {"a": torch.complex64, "b": torch.float32, "c": "half"}


def test_keyword_inputs_are_cast_like_positional_ones():  # I2
    norm = pinned(nn.LayerNorm(4).bfloat16())
    x = torch.randn(2, 4, dtype=torch.bfloat16)
    assert torch.equal(norm(input=x), norm(x))
    spy = pinned(Spy(lambda input: input))
    assert spy(input=x).dtype is torch.bfloat16
    assert spy.kwargs["input"].dtype is torch.float32
    spy = pinned(Spy(lambda h, attention_mask: h))
    mask = torch.ones(2, dtype=torch.bfloat16)
    assert spy(x, attention_mask=mask).dtype is torch.bfloat16
    assert spy.args[0].dtype is torch.float32
    assert spy.kwargs["attention_mask"] is mask  # only the first is cast, positional before keyword


def test_the_very_same_tensor_is_the_same_cast_everywhere():  # I3
    spy = pinned(Spy(lambda q, k, v, w=None: q))
    x, other = torch.ones(2).half(), torch.ones(2).half()
    spy(x, other, x, w=x)
    assert spy.args[0] is spy.args[2] is spy.kwargs["w"]
    assert spy.args[1] is other


def test_attention_in_a_bf16_model():  # I3
    mha = pinned(nn.MultiheadAttention(8, 2).bfloat16())
    x = torch.randn(3, 2, 8, dtype=torch.bfloat16)
    assert mha(x, x, x)[0].dtype is torch.bfloat16
    with pytest.raises(RuntimeError) as error:
        mha(x, x.clone(), x.clone())
    notes = getattr(error.value, "__notes__", None)
    assert ('inputs="all"' in "".join(notes or ())) is hasattr(error.value, "add_note")  # 3.11
    dtypepin.unpin(mha)
    pinned(mha, inputs="all")
    assert torch.equal(mha(x, x.clone(), x.clone())[0], mha(x, x, x)[0])


class Unknown:
    """A container that nobody knows."""


@pytest.mark.parametrize("inputs", ["first", "all"])
def test_what_is_no_floating_tensor_passes_as_the_same_object(inputs):  # I4
    spy = pinned(Spy(), inputs=inputs)
    x = torch.ones(2, dtype=torch.bfloat16)
    others = [torch.ones(2) > 0, torch.arange(2), None, "s", x.float().numpy(), Unknown(), {1: [2]}]
    spy(x, *others, keyword=others[-1])
    assert all(one is two for one, two in zip(spy.args[1:], others, strict=True))
    assert spy.kwargs["keyword"] is others[-1]


def test_nested_inputs_are_cast_with_all_and_left_with_first():
    x = torch.ones(2, dtype=torch.bfloat16)
    for inputs, expected in [("first", torch.bfloat16), ("all", torch.float32)]:
        spy = pinned(Spy(lambda x, more: more["h"][0]), inputs=inputs)
        out = spy(x, more={"h": [x.clone()]})
        assert spy.kwargs["more"]["h"][0].dtype is expected
        assert out.dtype is torch.bfloat16


def test_complex_values_are_never_cast():  # I5
    spy = pinned(Spy(lambda x: torch.fft.rfft(x)))
    out = spy(torch.ones(4, dtype=torch.bfloat16))  # rfft refuses bf16, the pin makes it work
    assert out.dtype is torch.complex64
    z = torch.ones(2, dtype=torch.complex64)
    assert pinned(Spy())(z) is z


def test_an_in_place_module_no_longer_changes_the_callers_tensor():  # I6
    x = torch.tensor([-1.0, 1.0], dtype=torch.bfloat16)
    out = pinned(nn.ReLU(inplace=True))(x)
    assert x.tolist() == [-1.0, 1.0]
    assert out.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("inputs", ["first", "all"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_no_cast_means_no_copy(dtype, inputs):  # I7
    spy = pinned(Spy(), dtype, inputs=inputs)
    x = torch.ones(2, dtype=dtype)
    assert spy(x) is x
    assert spy.args[0] is x


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("to", FLOATS)
def test_the_dtype_that_came_in_comes_out(dtype, to, autocast):  # O1, I8
    module = pinned(nn.Sequential(Seen(4), nn.LayerNorm(4)), to)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = module(torch.randn(2, 4, dtype=dtype))
    assert out.dtype is dtype
    assert module[0].seen == [(to, to, to)]
    assert module[0].weight.dtype is torch.float32


class ModelOutput(OrderedDict):
    """As transformers has it: an ordered dict that is a dataclass too, with attributes."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    n: int = 1
    loss: torch.Tensor | None = None


def outputs(x):
    flags = torch.ones(2, dtype=torch.bool)
    ordered = ModelOutput()
    ordered["logits"], ordered["past"], ordered["ids"] = x, None, torch.arange(2)
    return {
        "model output": (ordered, lambda out: (out["logits"], out.logits)),
        "dict": ({"x": x, "none": None, "flags": flags}, lambda out: (out["x"],)),
        "list": ([x, flags, None], lambda out: (out[0],)),
        "tuple": ((x, (x, 3)), lambda out: (out[0], out[1][0])),
        "dataclass": (Result(x), lambda out: (out.logits,)),
        "none": (None, lambda out: ()),
        "int": (torch.arange(2), lambda out: ()),
    }


@pytest.mark.parametrize("kind", outputs(torch.ones(1)))
def test_every_output_keeps_its_type(kind):  # O2
    spy = pinned(Spy(lambda x: outputs(x)[kind][0]))
    x = torch.ones(2, dtype=torch.bfloat16)
    out = spy(x)
    like, floats = outputs(x)[kind]
    assert type(out) is type(like)
    assert all(value.dtype is torch.bfloat16 for value in floats(out))
    if isinstance(like, dict):
        assert list(out) == list(like)
        assert [v is None for v in out.values()] == [v is None for v in like.values()]
        assert [getattr(v, "dtype", v) for v in out.values()] == [
            getattr(v, "dtype", v) for v in like.values()
        ]
    elif isinstance(like, torch.Tensor):
        assert out.dtype is torch.int64


@pytest.mark.parametrize(
    ("output", "expected"),
    [("keep", torch.float32), ("restore", torch.half), ("bf16", torch.bfloat16)],
)
def test_keep_leaves_the_pins_dtype(output, expected):  # O3
    linear = nn.Linear(4, 1, bias=False).half()
    nn.init.ones_(linear.weight)
    out = pinned(linear, output=output)(torch.full((1, 4), 20000.0, dtype=torch.half))
    assert out.dtype is expected
    assert out.item() == (
        float("inf") if expected is torch.half else torch.tensor(80000.0).to(expected).item()
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("output", FLOATS)
@pytest.mark.parametrize("floats_in", [False, True])
def test_a_dtype_as_output_is_what_comes_out(output, dtype, floats_in):
    module = Spy(lambda *x: {"x": torch.ones(2, dtype=dtype), "ids": torch.arange(2)})
    pinned(module, dtype, output=output)
    out = module(*[torch.ones(2).half()][:floats_in])
    assert (out["x"].dtype, out["ids"].dtype) == (output, torch.int64)


@pytest.mark.parametrize("wrong", ["keeps", torch.int8, None])
def test_other_outputs_are_refused(wrong):
    with pytest.raises(PinError, match=r'output: got .* or "restore" or "keep"'):
        pinned(Spy(), output=wrong)


@pytest.mark.parametrize("wrong", ["last", None])
def test_other_inputs_are_refused(wrong):
    with pytest.raises(PinError, match=r'inputs: got .* expected "first" or "all"'):
        pinned(Spy(), inputs=wrong)


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_other_peoples_hooks_see_what_goes_out(first):
    linear, seen = nn.Linear(4, 4).bfloat16(), []

    def theirs():
        linear.register_forward_hook(lambda module, args, out: seen.append(out.dtype))

    def ours():
        pinned(linear)

    for register in (theirs, ours) if first == "theirs" else (ours, theirs):
        register()
    linear(torch.ones(1, 4, dtype=torch.bfloat16))
    assert seen == [torch.bfloat16]


def test_a_module_that_computes_in_float32_itself_gives_back_what_came_in():  # O4
    rms = Spy(lambda x: x.double() * 2)
    assert pinned(rms)(torch.ones(2, dtype=torch.bfloat16)).dtype is torch.bfloat16


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("override", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_without_floating_inputs_the_parameters_dtype_comes_out(dtype, override, autocast):  # O5
    table = nn.Embedding(4, 2, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = table(torch.arange(4))
        pinned(table, override_parameters=override)
        out = table(torch.arange(4))
    assert out.dtype is expected.dtype is dtype
    assert torch.equal(out, expected.float().to(dtype))
    assert pinned(Spy(lambda: torch.ones(2)))().dtype is torch.float32  # no parameters: as it is


class Loss(nn.Module):
    """A matcher or criterion: no parameters, and its tensors in containers, or none at all."""

    def forward(self, outputs=None):
        a = torch.ones(3, 3) if outputs is None else outputs["a"][0].float()
        return (a / 3) @ (a / 7)


@pytest.mark.parametrize("inputs", ["first", "all"])
@pytest.mark.parametrize("kind", ["dict", "integers", "nothing"])
def test_autocast_is_off_whatever_the_inputs_are(kind, inputs):
    m = Loss()
    dtypepin.apply(m, "^$", inputs=inputs)
    a = torch.ones(3, 3)
    expected = (a / 3) @ (a / 7)
    with torch.autocast("cpu", torch.bfloat16):
        if kind == "nothing":
            m.register_buffer("far", torch.ones(1, device="meta"))
            m.register_buffer("near", torch.ones(1))
            out = m()
        else:
            out = m({"a": [a.long() if kind == "integers" else a]})
        assert torch.equal(out, expected)
        assert (a @ a).dtype is torch.bfloat16


def test_autocast_stays_on_for_devices_without_any_input():
    spy = Spy(lambda outputs: torch.ones(3, 3) @ torch.ones(3, 3))
    dtypepin.apply(spy, "^$")
    with torch.autocast("cpu", torch.bfloat16):
        assert spy({"a": torch.ones(1, device="meta")}).dtype is torch.bfloat16


def test_a_dtype_that_the_caller_names_comes_out_where_no_floating_tensor_goes_in():
    class Positions(nn.Module):
        def forward(self, ids, dtype):
            return torch.sin(ids * 0.1).to(dtype)

    m, ids = Positions(), torch.arange(3)
    plain = m(ids, torch.bfloat16)
    outer = nn.Sequential(m)
    with dtypepin.pin_dtype(outer, "^0$"):
        assert m(ids, torch.bfloat16).dtype is plain.dtype
        assert m(ids, torch.float64).dtype is torch.float64
        with dtypepin.pin_dtype(m, "^$", output="keep"):
            assert m(ids, dtype=torch.bfloat16).dtype is torch.float32
