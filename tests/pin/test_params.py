"""Parameters and buffers: cast for the call, or stored. P1 to P10 of the cases."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import dtypepin
from dtypepin import PinError, PinWarning
from helpers import Seen, fullgraph

BF16, F16, F32, F64 = torch.bfloat16, torch.half, torch.float32, torch.float64


def bits(tensor):
    return tensor.detach().clone().reshape(-1).view(torch.uint8)


def state_bits(module):
    return {name: (value.dtype, bits(value)) for name, value in module.state_dict().items()}


def same_state(one, two):
    return one.keys() == two.keys() and all(
        one[k][0] is two[k][0] and torch.equal(one[k][1], two[k][1]) for k in one
    )


@pytest.mark.parametrize("override", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_norm_in_a_bf16_model(override, autocast):  # P1
    m = nn.Sequential(Seen(4), nn.Sequential(nn.LayerNorm(4), Seen(4)), Seen(4)).bfloat16()
    with (
        dtypepin.apply(m, r"^1(\.0|\.1)?$", override_parameters=override),
        torch.autocast("cpu", BF16, enabled=autocast),
    ):
        assert m(torch.randn(2, 4, dtype=BF16)).dtype is BF16
    assert m[1][1].seen == [(F32, F32, F32)]
    assert m[0].seen == m[2].seen == [(BF16, BF16, BF16)]


def test_stored_parameters_are_the_same_objects_with_their_gradients():  # P2
    m = nn.LayerNorm(4).bfloat16()
    m(torch.randn(2, 4, dtype=BF16)).sum().backward()
    weight, grad = m.weight, m.weight.grad.clone()
    with dtypepin.apply(m, "^$", override_parameters=True):
        assert m.weight is weight
        assert (m.weight.dtype, m.weight.grad.dtype) == (F32, F32)
        assert torch.equal(m.weight.grad, grad.float())
    assert (m.weight.dtype, m.weight.grad.dtype) == (BF16, BF16)
    assert torch.equal(m.weight.grad, grad)


def blanket(kind):
    return {
        "half": lambda m: m.half(),
        "bfloat16": lambda m: m.bfloat16(),
        "to": lambda m: m.to(BF16),
        "assign": lambda m: m.load_state_dict(
            {k: v.bfloat16() if v.is_floating_point() else v for k, v in m.state_dict().items()},
            assign=True,
        ),
    }[kind]


@pytest.mark.parametrize("kind", ["half", "bfloat16", "to", "assign"])
@pytest.mark.parametrize("override", [False, True])
def test_a_later_blanket_cast_does_not_break_the_pin(kind, override):  # P3
    m = nn.Sequential(nn.BatchNorm1d(4), Seen(4))
    pins = dtypepin.apply(m, r"^[01]$", override_parameters=override)
    blanket(kind)(m)
    dtype = F16 if kind == "half" else BF16
    assert m(torch.randn(3, 4, dtype=dtype)).dtype is dtype
    assert m[1].seen == [(F32, F32, F32)]
    if override:
        with pytest.warns(PinWarning, match="digits which that cast cut off are lost") as caught:
            names = pins.check()
        assert len(caught) == 1
        assert {"0.weight", "0.running_mean", "1.weight"} <= set(names)
        assert m[1].weight.dtype is F32
        m[1].seen.clear()
        m(torch.randn(3, 4, dtype=dtype))
        assert m[1].seen == [(F32, F32, F32)]
    assert pins.check() == []
    pins.remove()
    # As if the pin had never been there: the blanket cast is what stays.
    assert m[1].weight.dtype is m[0].running_mean.dtype is dtype


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


@pytest.mark.parametrize("override", [False, True])
def test_a_tie_outside_the_selection(override):  # P5
    m = nn.ModuleDict({"emb": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)}).bfloat16()
    m["head"].weight = m["emb"].weight
    if override:
        with pytest.raises(PinError) as error:
            dtypepin.apply(m, "^head$", override_parameters=True)
        for part in ("'head.weight'", "'emb.weight'", "leave override_parameters off"):
            assert part in str(error.value)
        assert m["emb"].weight.dtype is BF16
        assert not m["head"]._forward_hooks
        return
    with dtypepin.apply(m, "^head$", output="keep"):
        assert m["head"](torch.ones(1, 2, dtype=BF16)).dtype is F32
        assert m["head"].weight is m["emb"].weight
        assert m["emb"].weight.dtype is BF16


def test_a_tie_by_memory_alone_is_found():  # P5
    m = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}).bfloat16()
    m["b"].weight.data = m["a"].weight.data
    with pytest.raises(PinError, match=r"'b\.weight' is the same memory as 'a\.weight'"):
        dtypepin.apply(m, "^b$", override_parameters=True)


def test_a_tie_inside_the_selection_is_stored_once_and_undone():  # P5
    m = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}).bfloat16()
    m["b"].weight = m["a"].weight
    before = state_bits(m)
    pins = dtypepin.apply(m, "^[ab]$", override_parameters=True)
    assert m["b"].weight is m["a"].weight
    assert m["a"].weight.dtype is F32
    pins[0].remove()
    assert m["a"].weight.dtype is F32  # b still wants it
    pins.remove()
    assert same_state(state_bits(m), before)


def test_an_optimizer_made_while_pinned_keeps_its_parameters():  # P6
    m = nn.Sequential(Seen(4)).bfloat16()
    pins = dtypepin.apply(m, "^0$", override_parameters=True)
    optimizer = torch.optim.Adam(m.parameters(), lr=0.1)
    before = m[0].weight.detach().clone()
    m(torch.randn(2, 4, dtype=BF16)).sum().backward()
    optimizer.step()
    assert optimizer.state[m[0].weight]["exp_avg"].dtype is F32
    assert not torch.equal(m[0].weight, before)
    trained = m[0].weight.detach().clone()
    pins.remove()
    assert m[0].weight is optimizer.param_groups[0]["params"][0]
    assert torch.equal(m[0].weight, trained.bfloat16())


def test_a_linear_in_float16_with_a_grad_scaler():  # P7
    m = nn.Sequential(Seen(4), nn.Linear(4, 4))
    dtypepin.apply(m, "^0$", dtype="float16")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    before = m[0].weight.detach().clone()
    scaler.scale(m(torch.randn(2, 4)).sum()).backward()
    assert m[0].weight.grad.dtype is F32
    scaler.step(optimizer)
    assert m[0].seen == [(F16, F16, F16)]
    assert m[0].weight.dtype is F32
    assert not torch.equal(m[0].weight, before)


@pytest.mark.parametrize("override", [False, True])
def test_only_plain_floats_are_cast(override):  # P8
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.packed = nn.Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False)
            self.bias = nn.Parameter(torch.ones(2, dtype=BF16))
            self.register_buffer("scale", torch.ones(2).to(torch.float8_e4m3fn))
            self.register_buffer("mask", torch.ones(2, dtype=torch.bool))

        def forward(self, x):
            names = ("packed", "bias", "scale", "mask")
            self.seen = [getattr(self, name).dtype for name in names]
            return x

    m = Packed()
    with dtypepin.apply(m, "^$", override_parameters=override):
        m(torch.ones(2))
    assert m.seen == [torch.uint8, F32, torch.float8_e4m3fn, torch.bool]
    assert m.bias.dtype is BF16


@pytest.mark.parametrize("override", [False, True])
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize("stored", [F16, BF16, F32, F64])
def test_state_dict_has_its_keys_pinned_and_its_bits_after(stored, dtype, override):  # P9, P10
    m = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)).to(stored)
    with torch.no_grad():
        m[0].running_mean.uniform_()
        m[1].weight[0, 0], m[1].weight[0, 1] = float("nan"), 1e-30
    before = state_bits(m)
    pins = dtypepin.apply(m, "^[01]$", dtype=dtype, override_parameters=override)
    assert list(m.state_dict()) == list(before)
    assert m.state_dict()["1.weight"].dtype is (dtype if override else stored)
    pins.remove()
    assert same_state(state_bits(m), before)


def test_what_was_trained_while_narrowed_stays_trained():  # P10
    m = nn.Linear(2, 2)
    untouched = bits(m.bias)
    pins = dtypepin.apply(m, "^$", dtype="bf16", override_parameters=True)
    with torch.no_grad():
        m.weight.fill_(0.5)
    pins.remove()
    assert m.weight.unique().tolist() == [0.5]
    assert torch.equal(bits(m.bias), untouched)


@pytest.mark.parametrize("override", [False, True])
def test_gradients_arrive_on_the_original_in_its_dtype(override):
    torch.manual_seed(1)
    m = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).bfloat16()
    wide = copy.deepcopy(m).float()
    x = torch.randn(3, 4, dtype=BF16)
    with dtypepin.apply(m, "^$", override_parameters=override):
        m(x).sum().backward()
    wide(x.float()).bfloat16().sum().backward()
    for one, two in zip(m.parameters(), wide.parameters(), strict=True):
        assert one.grad.dtype is one.dtype is BF16
        assert torch.equal(one.grad, two.grad.bfloat16())


def test_everything_else_sees_the_originals_during_the_call():
    m = nn.Sequential(Seen(4)).bfloat16()
    weight = m[0].weight
    found = []

    def look(*_):
        found.append((next(m.parameters()) is weight, m.state_dict()["0.weight"].dtype))
        found.append((dict(m.named_parameters())["0.weight"] is weight, weight.grad))

    def in_a_thread(*_):
        thread = threading.Thread(target=lambda: found.append(m[0].weight is weight))
        thread.start()
        thread.join()

    with dtypepin.apply(m, "^$"):
        m[0].register_forward_hook(look)
        m[0].register_forward_hook(in_a_thread)
        m(torch.randn(2, 4, dtype=BF16))
    assert found == [(True, BF16), (True, None), True]


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


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
@pytest.mark.parametrize("train", [True, False])
def test_parametrized_modules_work(norm, train):
    make = getattr(nn.utils.parametrizations, norm)
    m = nn.Sequential(make(nn.Linear(4, 4))).bfloat16().train(train)
    before = state_bits(m)
    with dtypepin.apply(m, "^0$", output="keep") as pins:
        assert m(torch.randn(2, 4, dtype=BF16)).dtype is F32
        assert pins[0].class_name == "Linear"
    assert {k: v[0] for k, v in state_bits(m).items()} == {k: v[0] for k, v in before.items()}
    assert m(torch.randn(2, 4, dtype=BF16)).dtype is BF16


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_a_pinned_parametrization_gets_all_parts_of_its_tensor_cast(norm):
    # The norms of Wav2Vec2 and its kin: ``class_patterns="Norm"`` finds their _WeightNorm too.
    make = getattr(nn.utils.parametrizations, norm)
    m = nn.Sequential(make(nn.Linear(4, 4))).bfloat16()
    x = torch.randn(2, 4, dtype=BF16)
    with (
        dtypepin.pin_dtype(m, class_patterns="_(Weight|Spectral)Norm") as pins,
        dtypepin.audit(m) as report,
    ):
        out = m(x)
        out.sum().backward()
        assert m[0].weight.dtype is out.dtype is BF16
    assert len(pins) == 1
    assert report.pins[0].verdict == "honoured"
    assert {p.grad.dtype for p in m.parameters()} == {BF16}


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


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("pattern", ["^$", "^0$"])
def test_lazy_modules(pattern):
    m = nn.Sequential(nn.LazyLinear(4, dtype=BF16), nn.LazyBatchNorm1d(dtype=BF16))
    with pytest.raises(PinError, match="run one forward first"):
        dtypepin.apply(m, "0", override_parameters=True)
    with dtypepin.apply(m, pattern) as pins:
        assert m(torch.randn(3, 2, dtype=BF16)).dtype is BF16
        assert pins[0].ran
    assert m[0].weight.dtype is BF16


def test_data_parallel_is_refused_where_it_would_have_to_cast():
    inner = nn.Sequential(nn.LayerNorm(4)).bfloat16()
    m = nn.DataParallel(inner)
    with pytest.raises(PinError, match=r"DataParallel.*override_parameters=True"):
        dtypepin.apply(m, "0")
    with dtypepin.apply(m, "0", override_parameters=True):
        assert m(torch.randn(2, 4, dtype=BF16)).dtype is BF16


def test_a_weight_read_twice_and_a_parameter_that_is_none():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_parameter("bias", None)

        def forward(self, x):
            assert self.bias is None
            return x * self.weight + self.weight

    m = Reads()
    with dtypepin.apply(m, "^$", dtype=F64):
        m(torch.ones(2)).sum().backward()
    assert m.weight.grad.tolist() == [2.0, 2.0]


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


@pytest.mark.parametrize(("wide", "narrow"), [(F32, BF16), (BF16, F32)])
def test_a_model_on_meta_that_is_materialised_while_it_is_stored(wide, narrow):
    with torch.device("meta"):
        m = nn.Sequential(nn.Linear(2, 2, dtype=wide))
    pins = dtypepin.apply(m, "0", dtype=narrow, override_parameters=True)
    m.to_empty(device="cpu")
    nn.init.ones_(m[0].weight)
    pins.remove()
    assert m[0].weight.dtype is wide
    assert m[0].weight.unique().tolist() == [1]


def test_shared_memory_stays_shared_memory():
    m = nn.Linear(2, 2).bfloat16().share_memory()
    with dtypepin.apply(m, "^$", override_parameters=True):
        assert m.weight.is_shared()
    assert m.weight.is_shared()


def test_a_parametrization_that_came_later_does_not_keep_a_weight_stored():
    m = nn.Sequential(nn.Linear(2, 2)).bfloat16()
    pins = dtypepin.apply(m, "0", override_parameters=True)
    nn.utils.parametrize.register_parametrization(m[0], "weight", nn.Identity())
    assert m(torch.ones(1, 2, dtype=BF16)).dtype is BF16
    pins.remove()
    assert {value.dtype for value in m.parameters()} == {BF16}


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


@pytest.mark.parametrize("pattern", ["^$", "0"])
def test_weights_that_are_loaded_for_the_call_and_offloaded_after_it(pattern):
    """What Accelerate's cpu_offload does, inside ``forward``, by way of ``_parameters``."""

    class Offloaded(nn.Linear):
        def load(self, device):
            for name in list(self._parameters):
                kind, old = type(self._parameters[name]), getattr(self, name)
                value = kept[name] if device == "cpu" else old.to(device)
                self._parameters[name] = kind(value.to(old.dtype), requires_grad=False)

        def forward(self, x):
            self.load("cpu")
            out = super().forward(x)
            self.load("meta")
            return out

    m, x = nn.Sequential(Offloaded(4, 4)).bfloat16(), torch.randn(2, 4, dtype=BF16)
    kept = {name: value.detach().clone() for name, value in m[0].named_parameters()}
    with dtypepin.apply(m, pattern):
        for _ in range(2):
            out = m(x)
            expected = nn.functional.linear(x.float(), kept["weight"].float(), kept["bias"].float())
            assert torch.equal(out, expected.bfloat16())
    assert m[0].weight.dtype is BF16
    assert m[0].weight.is_meta


@pytest.mark.parametrize("where", ["apply", "remove", "check", "all"])
def test_parameters_stored_in_inference_mode_can_be_trained(where):
    m, x = nn.Linear(4, 4).bfloat16(), torch.randn(3, 4).bfloat16()
    with torch.inference_mode(where in ("apply", "all")):
        pins = dtypepin.apply(m, "^$", override_parameters=True)
    m.bfloat16()
    with torch.inference_mode(where in ("check", "all")), pytest.warns(dtypepin.PinWarning):
        pins.check()
    if where != "all":
        m(x).sum().backward()
    with torch.inference_mode(where in ("remove", "all")):
        pins.remove()
    m(x).sum().backward()
    assert m.weight.grad.dtype is torch.bfloat16


def test_parameters_made_in_inference_mode_can_be_stored():
    with torch.inference_mode():
        m = nn.Linear(4, 4).bfloat16()
    with dtypepin.pin_dtype(m, "^$", override_parameters=True):
        assert m.weight.dtype is torch.float32
    assert m.weight.dtype is torch.bfloat16
    assert m.weight.is_inference()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_cannot_be_cast_and_are_refused(kind):
    m = kind(4, 2, sparse=True).bfloat16()
    with pytest.raises(dtypepin.PinError, match=r"sparse=True.*override_parameters=True"):
        dtypepin.apply(m, "^$")
    with dtypepin.pin_dtype(m, "^$", override_parameters=True):
        m(torch.tensor([[1]])).sum().backward()
    assert m.weight.grad.is_sparse


@pytest.mark.parametrize("checked", [False, True])
def test_digits_return_also_in_a_wider_dtype_than_they_had(checked):
    m = nn.Linear(4, 4)
    before = m.weight.detach().double()
    pins = dtypepin.apply(m, "^$", dtype="bf16", override_parameters=True)
    m.double()
    if checked:
        with pytest.warns(dtypepin.PinWarning, match="were cast since"):
            pins.check()
        assert m.weight.dtype is torch.bfloat16
    pins.remove()
    assert torch.equal(m.weight, before)


@pytest.mark.parametrize("checked", [False, True])
def test_digits_return_also_where_somebody_widened_a_narrowed_parameter(checked):
    m = nn.Linear(4, 4)
    before = m.weight.detach().clone()
    pins = dtypepin.apply(m, "^$", dtype="bf16", override_parameters=True)
    with torch.no_grad():
        m.weight[0] = 0.5  # trained
    m.float()
    if checked:
        with pytest.warns(dtypepin.PinWarning, match="were cast since") as caught:
            pins.check()
        assert "digits" not in str(caught[0].message)  # widening cuts none off
        assert m.weight.dtype is torch.bfloat16
    pins.remove()
    assert torch.equal(m.weight[1:], before[1:])
    assert torch.equal(m.weight[0], torch.full((4,), 0.5))
