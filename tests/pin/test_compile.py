"""Pins under torch.compile: no graph break, eager's numbers, and compiled code stays cached."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict

import pytest
import torch
from torch import nn

import dtypepin
from dtypepin import pin_dtype
from helpers import fullgraph

BF16, F32 = torch.bfloat16, torch.float32
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Counting:
    """A backend that counts how many graphs it compiled."""

    def __init__(self, backend="eager"):
        self.inner = torch._dynamo.lookup_backend(backend)
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return self.inner(graph, inputs)


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    extra: dict
    none: None = None


class Head(nn.Module):
    """Keyword tensors in; a dataclass with a dict in it out, or an OrderedDict."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden, *, other, scale=(1, 1), ordered=False):
        a, b = self.one(hidden) * scale[0], self.two(other) * scale[1]
        if ordered:
            return OrderedDict(hidden=a, extra=OrderedDict(b=b, ids=torch.arange(3)), none=None)
        return Output(a, {"b": b, "ids": torch.arange(3)})


class Net(nn.Module):
    """Own parameters, buffers, children, keyword inputs and a structured output."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
        self.head = Head()

    def forward(self, x):
        x = self.block(self.norm(self.stem(x)))
        out = self.head(x, other=x * 2, scale=(1, 2))
        assert out.none is None
        return out.hidden + out.extra["b"]


PINNED = ["^norm$", "^block$", "^head$"]


def steps(model, call, xs, autocast):
    """Train a few steps; outputs, gradients and what is stored afterwards."""
    outs, grads = [], []
    for x in xs:
        with torch.autocast("cpu", BF16, enabled=autocast):
            out = call(x)
        model.zero_grad()
        weights = torch.linspace(-1, 2, out.numel()).reshape(out.shape)
        (out.float() * weights).pow(2).mean().backward()
        assert all(p.grad.dtype is p.dtype for p in model.parameters())
        outs.append(out.detach())
        grads.append(torch.cat([p.grad.flatten().float() for p in model.parameters()]))
    return outs, grads, copy.deepcopy(model.state_dict())


def assert_same(got, expected, tolerance):
    """Outputs, running statistics and gradients; bit for bit where the tolerance is 0."""
    for a, b in zip(got[0], expected[0], strict=True):
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    for a, b in zip(got[1], expected[1], strict=True):
        assert (a - b).norm() <= tolerance * b.norm()
    assert list(got[2]) == list(expected[2])
    for key, value in expected[2].items():
        assert got[2][key].dtype is value.dtype
        torch.testing.assert_close(got[2][key], value, rtol=tolerance, atol=tolerance)


# What a backend itself rounds otherwise than eager. By default AOT backends trace the backward
# under the forward's autocast, round a region written by hand just as well; inductor keeps more
# digits between bf16 operations.
TOLERANCE = {"eager": 0.0, "aot_eager": 8e-3, "inductor": 3e-2}


@fullgraph  # C2, and cast for the call with BatchNorm's statistics
@pytest.mark.parametrize("override", [False, True], ids=["cast", "stored"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_in_one_graph_equals_eager(backend, autocast, dtype, override):
    compiles_like_eager(backend, autocast, dtype, override)


@fullgraph
class NamesADtype(nn.Module):
    """Tells its child which dtype to compute in, as diffusers' adaptive norms are told."""

    def __init__(self):
        super().__init__()
        self.norm = Told()

    def forward(self, x):
        return self.norm(x, hidden_dtype=x.dtype)


class Told(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, hidden_dtype):
        return self.linear(x.to(hidden_dtype))


@fullgraph
@pytest.mark.parametrize("inputs", ["first", "all"])
def test_an_argument_that_names_a_dtype_is_traced(inputs):
    model, x = NamesADtype().bfloat16(), torch.randn(3, 8, dtype=BF16)
    with pin_dtype(model, "norm$", inputs=inputs):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), model(x))


@pytest.mark.inductor
@fullgraph
def test_inductor_equals_eager():
    compiles_like_eager("inductor", True, BF16, False)


def compiles_like_eager(backend, autocast, dtype, override, tolerance=None):
    if tolerance is None:
        tolerance = TOLERANCE[backend] if autocast or backend == "inductor" else 0.0
    model = Net().to(dtype)
    xs = [torch.randn(4, 8, dtype=dtype) for _ in range(4)]
    unpinned = steps(*[copy.deepcopy(model)] * 2, xs, autocast)
    twin = copy.deepcopy(model)
    for one in (model, twin):
        dtypepin.apply(one, PINNED, override_parameters=override, inputs="all")
    expected = steps(twin, twin, xs, autocast)
    if dtype is BF16 or autocast:
        assert not torch.equal(expected[0][0], unpinned[0][0])  # the pin matters here
    counting = Counting(backend)
    compiled = torch.compile(model, backend=counting, fullgraph=True)
    before = copy.deepcopy(model.state_dict())
    steps(model, compiled, xs[:2], autocast)
    known = counting.graphs
    model.load_state_dict(before)
    assert_same(steps(model, compiled, xs, autocast), expected, tolerance)
    assert counting.graphs == known  # nothing after the second call
    assert known <= 2  # the second: `ran` was False when the first call was compiled


@fullgraph
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_gradients_are_exact_where_aot_leaves_autocast_out_of_the_backward(dtype):
    import torch._functorch.config as config

    with config.patch(backward_pass_autocast="off"):
        compiles_like_eager("aot_eager", True, dtype, False, tolerance=0.0)


@fullgraph
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dynamic_shapes_compile_once(backend, autocast):
    model = Net().bfloat16()
    xs = [torch.randn(n, 8, dtype=BF16) for n in (4, 5, 7, 11)]
    twin = copy.deepcopy(model)
    for one in (model, twin):
        dtypepin.apply(one, PINNED, inputs="all")
    counting = Counting(backend)
    compiled = torch.compile(model, backend=counting, fullgraph=True, dynamic=True)
    before = copy.deepcopy(model.state_dict())
    steps(model, compiled, xs[:2], autocast)
    known = counting.graphs
    model.load_state_dict(before)
    got = steps(model, compiled, xs, autocast)
    assert_same(got, steps(twin, twin, xs, autocast), TOLERANCE[backend])
    assert counting.graphs == known <= 2


class Broken(nn.Module):
    """A graph break between two layers, and a record of what they see."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.seen = []

    @torch.compiler.disable
    def record(self, x):
        autocast = torch.is_autocast_enabled("cpu")
        self.seen.append((x.dtype, self.two.weight.dtype, autocast))

    def forward(self, x):
        x = self.one(x)
        self.record(x)
        x = self.two(x)
        self.record(x)
        return x


# torch's own, at every graph break after a tensor that needs gradients.
not_a_leaf = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


# C3. A float32 model here: torch 2.4 cannot compile a piece of a pinned module whose parameters
# are cast for the call on AOT backends (it says so); the next test has that on newer torch.
@not_a_leaf
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_break_inside_a_pin_keeps_it(backend, autocast):
    broken_like_eager(backend, autocast, F32)


@fullgraph
@not_a_leaf
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_graph_break_inside_a_pin_keeps_its_casts(backend, autocast):
    broken_like_eager(backend, autocast, BF16)


def broken_like_eager(backend, autocast, dtype):
    model = nn.Sequential(nn.Linear(8, 8), Broken(), nn.Linear(8, 8)).to(dtype)
    twin = copy.deepcopy(model)
    xs = [torch.randn(4, 8, dtype=dtype) for _ in range(3)]
    for one in (model, twin):
        dtypepin.apply(one, "^1$")
    compiled = torch.compile(model, backend=backend)
    got = steps(model, compiled, xs, autocast)
    assert_same(got, steps(twin, twin, xs, autocast), TOLERANCE[backend])
    assert model[1].seen == [(F32, F32, False)] * 6 == twin[1].seen


class Softmax(nn.Module):
    """Has no parameters, and sums in the dtype that it gets."""

    def forward(self, x):
        return torch.softmax(x, -1).cumsum(-1)


class Parent(nn.Module):
    def __init__(self, child):
        super().__init__()
        self.pinned = child

    def forward(self, x):
        return self.pinned(x) * 2


def in_place(model, backend):
    model.compile(backend=backend)
    return model


def wrapped(model, backend):
    return torch.compile(model, backend=backend)


@not_a_leaf
@pytest.mark.parametrize("how", [wrapped, in_place])
@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)),
        lambda: Parent(nn.Linear(64, 64)),
        lambda: Parent(Softmax()),
        lambda: Softmax(),
        lambda: nn.LayerNorm(64),
        lambda: nn.Sequential(nn.Linear(64, 64), Softmax()),
        lambda: nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1)),
    ],
    ids=["deep", "inside", "paramless-inside", "paramless-root", "root", "in-a-list", "torchs-own"],
)
def test_pin_after_the_first_compiled_call_works_and_so_does_removal(build, how):  # C1
    model, x = build().bfloat16(), torch.randn(4, 64).bfloat16()
    pattern = {"Parent": "^pinned$", "Sequential": "^1$"}.get(type(model).__name__, "^$")
    twin = copy.deepcopy(model)
    compiled = how(model, "eager")
    plain = twin(x)
    assert torch.equal(compiled(x), plain)
    for dtype in ("float64", "float32", "float64"):
        pins, same = (
            dtypepin.apply(one, pattern, dtype=dtype, output="keep") for one in (model, twin)
        )
        expected = twin(x)
        assert expected.dtype is not BF16 or not torch.equal(expected, plain)
        for _ in range(2):
            got = compiled(x)
            assert got.dtype is expected.dtype
            assert torch.equal(got, expected)
        pins.remove()
        same.remove()
        for _ in range(2):
            got = compiled(x)
            assert got.dtype is BF16
            assert torch.equal(got, plain)


class Layer(nn.Linear):
    def encode(self, x):
        return self(x)


PINNINGS = {
    "none": lambda model: None,
    "forward": lambda model: dtypepin.apply(model, "^$"),
    "keep": lambda model: dtypepin.apply(model, "^$", output="keep"),
    "encode": lambda model: dtypepin.apply(model, "^$", methods_to_override="encode"),
    "child": lambda model: dtypepin.apply(Parent(model), "^$", output="keep"),
}


@pytest.mark.parametrize("second", PINNINGS)
@pytest.mark.parametrize("first", PINNINGS)
@pytest.mark.parametrize(
    "build",
    [lambda: Layer(64, 64), lambda: nn.Sequential(nn.Linear(64, 64)), lambda: nn.Softmax(-1)],
    ids=["layer", "list", "paramless"],
)
def test_compiled_twins_with_other_pins_do_not_run_each_others_code(build, first, second):
    if "encode" in (first, second) and not hasattr(build(), "encode"):
        return
    x = torch.randn(4, 64).bfloat16()
    one, two = build(), build()
    two.load_state_dict(one.state_dict())
    with torch.no_grad(), torch.autocast("cpu", BF16):
        PINNINGS[first](one)
        PINNINGS[second](two)
        expected = [one(x), two(x)]
        compiled = [torch.compile(model, backend="eager") for model in (one, two)]
        for call, out in zip(compiled * 2, expected * 2, strict=True):
            got = call(x)
            assert got.dtype is out.dtype
            assert torch.equal(got, out)


def test_a_pin_inside_a_region_that_was_compiled_before_counts():
    model = nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1), nn.Linear(64, 64))
    x = torch.randn(4, 64)
    compiled = torch.compile(model, backend="eager")
    with pin_dtype(model, "^$", output="keep"):
        plain = compiled(x)
        for pattern in ("^0$", "^1$", "^2$", "^[02]$"):
            with pin_dtype(model, pattern, dtype="bfloat16"):
                expected = model(x.clone())
                got = compiled(x)
                assert got.dtype is expected.dtype
                assert torch.equal(got, expected)
                assert not torch.equal(got.float(), plain)
            assert torch.equal(compiled(x), plain)


@fullgraph
@pytest.mark.parametrize("override", [False, True], ids=["cast", "stored"])
@pytest.mark.parametrize("dtypes", [("float32",), ("float32", "float64")], ids=["one", "two"])
@pytest.mark.parametrize("child", [nn.LayerNorm(8), Softmax()], ids=["norm", "paramless"])
def test_entering_pin_dtype_each_step_keeps_every_version_cached(child, dtypes, override):
    model, x = Parent(copy.deepcopy(child)).bfloat16(), torch.randn(4, 8).bfloat16()
    counting = Counting()
    compiled = torch.compile(model, backend=counting, fullgraph=True)
    graphs = []
    for _ in range(4):
        compiled(x)
        for dtype in dtypes:
            with pin_dtype(
                model, "pinned", dtype=dtype, output="keep", override_parameters=override
            ):
                out = compiled(x)
            assert out.dtype is getattr(torch, dtype)
        graphs.append(counting.graphs)
    assert graphs == [1 + len(dtypes)] * 4  # unpinned, and once for each dtype


@fullgraph
def test_pinning_one_model_leaves_compiled_code_of_others_alone():
    counting = Counting()
    other, x = Net(), torch.randn(4, 8)
    compiled = torch.compile(other, backend=counting, fullgraph=True)
    compiled(x)
    before = counting.graphs
    mine = Net()
    for _ in range(2):
        with pin_dtype(mine, PINNED, dtype="float64", inputs="all"):
            mine(x)
            compiled(x)
        compiled(x)
    assert counting.graphs == before == 1


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def encode(self, x):
        return self.inner(x).exp()


class Codec(nn.Module):
    def __init__(self):
        super().__init__()
        self.coder = Coder()

    def forward(self, x):
        return self.coder.encode(x) * 2


@pytest.mark.parametrize("one_graph", [pytest.param(True, marks=fullgraph), False])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_other_methods_are_pinned_in_compiled_code(autocast, one_graph):
    model = Codec().bfloat16()
    twin = copy.deepcopy(model)
    xs = [torch.randn(4, 8).bfloat16() for _ in range(3)]
    compiled = torch.compile(model, backend="eager", fullgraph=one_graph)
    plain = steps(twin, twin, xs, autocast)
    assert_same(steps(model, compiled, xs, autocast), plain, 0.0)
    arguments = {"methods_to_override": "encode", "output": "keep"}
    pins, same = (dtypepin.apply(one, "coder", **arguments) for one in (model, twin))
    expected = steps(twin, twin, xs, autocast)
    assert expected[0][0].dtype is F32
    assert_same(steps(model, compiled, xs, autocast), expected, 0.0)
    pins.remove()
    same.remove()
    assert_same(steps(model, compiled, xs, autocast), plain, 0.0)


@pytest.mark.parametrize("one_graph", [pytest.param(True, marks=fullgraph), False])
@pytest.mark.parametrize("override", [False, True], ids=["cast", "stored"])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_disabled_pins_are_off_in_compiled_code(autocast, override, one_graph):
    model = Net().bfloat16().eval()
    xs = [torch.randn(4, 8).bfloat16()] * 2
    plain = steps(model, model, xs, autocast)
    pins = dtypepin.apply(model, PINNED, override_parameters=override, inputs="all", output="keep")
    pinned = steps(model, model, xs, autocast)
    compiled = torch.compile(model, backend="eager", fullgraph=one_graph)
    for _ in range(2):
        assert [out.dtype for out in steps(model, compiled, xs, autocast)[0]] == [F32] * 2
        with pins.disabled():
            outs = steps(model, compiled, xs, autocast)[0]
        assert all(map(torch.equal, outs, plain[0]))
        assert all(map(torch.equal, steps(model, compiled, xs, autocast)[0], pinned[0]))


@pytest.mark.parametrize("one_graph", [pytest.param(True, marks=fullgraph), False])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("outer", [F32, BF16], ids=["f32-outside", "bf16-outside"])
def test_nested_pins_count_inside_compiled_code(outer, autocast, one_graph):
    inner = BF16 if outer is F32 else F32
    model = nn.Sequential(
        nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    )
    twin = copy.deepcopy(model)
    xs = [torch.randn(4, 8) for _ in range(3)]
    for one in (model, twin):
        dtypepin.apply(one, "^1$", dtype=outer)
        dtypepin.apply(one, r"^1\.1$", dtype=inner)
        dtypepin.apply(one, r"^1\.2$", dtype="float64")
        dtypepin.apply(one, r"^1\.2$", dtype=inner)  # the later one counts
    expected = steps(twin, twin, xs, autocast)
    compiled = torch.compile(model, backend="eager", fullgraph=one_graph)
    assert_same(steps(model, compiled, xs, autocast), expected, 0.0)


@pytest.mark.parametrize("one_graph", [pytest.param(True, marks=fullgraph), False])
@pytest.mark.parametrize("ordered", [False, True], ids=["dataclass", "OrderedDict"])
@pytest.mark.parametrize("inputs", ["first", "all"])
def test_keywords_and_structured_outputs_in_compiled_code(inputs, ordered, one_graph):
    head, x = Head(), torch.randn(4, 8).bfloat16()
    other = x.clone() if inputs == "all" else x
    pins = dtypepin.apply(head, "^$", inputs=inputs)
    compiled = torch.compile(head, backend="eager", fullgraph=one_graph)
    for call in (head, compiled, compiled):
        out = call(hidden=x, other=other, ordered=ordered)
        assert type(out) is (OrderedDict if ordered else Output)
        if ordered:
            assert list(out) == ["hidden", "extra", "none"]
            out = Output(**out)
        assert type(out.extra) is (OrderedDict if ordered else dict)
        assert out.none is None
        assert out.extra["ids"].dtype is torch.int64
        assert out.hidden.dtype is out.extra["b"].dtype is BF16
        assert torch.equal(out.hidden, head.one(x.float()).bfloat16())
        assert torch.equal(out.extra["b"], head.two(x.float()).bfloat16())
    assert pins[0].ran


class OpensAutocast(nn.Module):
    """Switches autocast itself, as Accelerate and transformers' Trainer do inside compiled code."""

    def __init__(self, autocast, broken):
        super().__init__()
        self.one, self.two, self.autocast, self.broken = (
            nn.Linear(8, 8),
            Layer(8, 8),
            autocast,
            broken,
        )

    def forward(self, x):
        if self.autocast is None:
            return self.body(x)
        with torch.autocast("cpu", BF16, enabled=self.autocast):
            return self.body(x)

    def body(self, x):
        x = self.two(self.one(x).float())
        if self.broken:
            torch._dynamo.graph_break()
        return self.two.encode(self.one(x.float()).float())


@pytest.mark.parametrize("one_graph", [pytest.param(True, marks=fullgraph), False])
@pytest.mark.parametrize("inside", [None, True, False])
@pytest.mark.parametrize("outside", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_may_open_autocast_round_a_pin(backend, outside, inside, one_graph):
    model, x = OpensAutocast(inside, broken=not one_graph), torch.randn(4, 8)
    dtypepin.apply(model, "two", output="keep", methods_to_override=["forward", "encode"])
    with torch.no_grad(), torch.autocast("cpu", BF16, enabled=outside):
        expected = model(x)
        compiled = torch.compile(model, backend=backend, fullgraph=one_graph)
        for _ in range(2):
            got = compiled(x)
            assert torch.is_autocast_enabled("cpu") is outside
            assert got.dtype is expected.dtype is F32
            assert torch.equal(got, expected)


def test_handles_are_disabled_one_by_one_in_compiled_code():
    model, x = nn.Sequential(Layer(8, 8), Layer(8, 8)).bfloat16(), torch.randn(4, 8).bfloat16()
    model.forward = lambda x: [part(x).dtype for part in model]
    first, second = (dtypepin.apply(model, f"^{i}$", output="keep") for i in range(2))
    compiled = torch.compile(model, backend="eager")
    twin = copy.deepcopy(model[0])
    with first.disabled():
        assert compiled(x) == [BF16, F32]
        assert twin(x).dtype is F32  # a pin of its own
    with second.disabled():
        assert compiled(x) == [F32, BF16]
        with first.disabled():
            assert compiled(x) == [BF16, BF16]
    assert compiled(x) == [F32, F32]


@fullgraph
@not_a_leaf
def test_outputs_of_transformers_from_a_pinned_root():
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            h = self.layer(x)  # float32 in the pin
            return outputs.BaseModelOutput(last_hidden_state=h, hidden_states=(x, h))

    model, x = Root().bfloat16(), torch.randn(2, 4).bfloat16()
    expected = copy.deepcopy(model).float().layer(x.float()).bfloat16()
    dtypepin.apply(model, "^$")
    for call in (model, torch.compile(model, backend="eager", fullgraph=True)):
        out = call(x)
        assert type(out) is outputs.BaseModelOutput
        assert list(out) == ["last_hidden_state", "hidden_states"]
        assert out["last_hidden_state"] is out.last_hidden_state is out[0]
        assert [h.dtype for h in (out[0], *out.hidden_states)] == [BF16] * 3
        assert torch.equal(out[0], expected)


@fullgraph
@not_a_leaf
def test_equal_blocks_with_a_pin_inside_share_their_code():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.lin = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x):
            return x + self.lin(self.norm(x))

    model, counting = nn.Sequential(*[Block() for _ in range(4)]).bfloat16(), Counting()
    x = torch.randn(2, 8).bfloat16()
    dtypepin.apply(model, r"norm$")
    expected = model(x)
    for block in model:
        block.compile(backend=counting, fullgraph=True)
    assert torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)
    assert counting.graphs <= 3  # of one block: the first has no gradient to its input, and `ran`
