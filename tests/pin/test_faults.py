"""Exceptions, interrupts, recursion, checkpoints: nothing is left behind. F1 to F4, N2."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtypepin
from dtypepin._base import torch_private
from dtypepin._pin import frames, refusals
from helpers import Seen

BF16, F32 = torch.bfloat16, torch.float32


class Fails(nn.Module):
    def __init__(self, error=None):
        super().__init__()
        self.inner, self.error = Seen(4), error

    def forward(self, x, other=None):
        y = self.inner(x)
        if self.error is not None:
            raise self.error
        return y if other is None else y + other


def pinned(module, pattern="^$", **kwargs):
    dtypepin.apply(module, pattern, **kwargs)
    return module


def x(dtype=BF16):
    return torch.randn(2, 4, dtype=dtype)


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit()])
@pytest.mark.parametrize("method", ["forward", "encode"])
def test_after_an_error_everything_is_as_before(error, method):  # F1, F2
    m = Fails(error).bfloat16()
    m.encode = m.forward
    pinned(m, methods_to_override=[method])
    call = m if method == "forward" else m.encode
    weight = dict(m.named_parameters())["inner.weight"]
    state = {name: value.clone() for name, value in m.state_dict().items()}
    with pytest.raises(type(error)):
        call(x())
    # At once, also while a traceback still holds the frames of the call.
    assert m.inner.weight is weight
    assert m.inner.weight.dtype is BF16
    assert all(torch.equal(value, state[name]) for name, value in m.state_dict().items())
    assert m.inner.seen == [(F32, F32, F32)]
    m.error = None
    assert call(x()).dtype is BF16
    assert m.inner(x()).dtype is BF16
    assert m.inner.seen[1:] == [(F32, F32, F32), (BF16, BF16, BF16)]


def test_a_frame_left_by_ctrl_c_does_not_count_in_the_except_block():
    m = pinned(Fails(KeyboardInterrupt()).bfloat16())
    try:
        m(x())
    except KeyboardInterrupt:
        assert m.inner.weight.dtype is BF16
        m.error = None
        assert m.inner(x()).dtype is BF16


def test_a_child_interrupted_inside_a_region_does_not_end_it():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.child, self.after = Fails(KeyboardInterrupt()), Seen(4)

        def forward(self, x):
            try:
                self.child(x)
            except KeyboardInterrupt:
                return self.after(x)

    m = pinned(pinned(Parent()), "child", dtype="float64")
    with torch.autocast("cpu", BF16):
        assert m(x()).dtype is BF16
        assert torch.is_autocast_enabled("cpu")
    assert m.child.inner.seen == [(torch.float64,) * 3]
    assert m.after.seen == [(F32,) * 3]


def fail(*_):
    raise RuntimeError("somebody's hook")


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("kind", ["register_forward_pre_hook", "register_forward_hook"])
def test_somebody_elses_failing_hook(kind, ours_first):
    m = Seen(4)
    if ours_first:
        pinned(m)
    getattr(m, kind)(fail)
    if not ours_first:
        pinned(m)
    with torch.autocast("cpu", BF16):
        with pytest.raises(RuntimeError, match="somebody's hook"):
            m(x())
        assert torch.is_autocast_enabled("cpu")


def test_a_hook_that_fails_before_ours_in_a_recursion_leaves_the_outer_region_alone():
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = []

        def forward(self, x):
            with contextlib.suppress(RuntimeError):
                self(x * float("nan"))
            self.seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
            return x

    m = Recursive()
    m.register_forward_pre_hook(lambda _, args: fail() if args[0].isnan().any() else None)
    pinned(m)
    with torch.autocast("cpu", BF16):
        assert m(x()).dtype is BF16
    assert m.seen == [(F32, False)]


def test_a_module_that_calls_itself_with_another_dtype():  # F4
    class Twice(nn.Module):
        def forward(self, x, depth=0):
            return (
                x if depth == 2 else self.check(self(x.half() if depth else x.double(), depth + 1))
            )

        def check(self, y):
            outs.append(y.dtype)
            return y

    outs = []
    m = pinned(Twice())
    assert m(x()).dtype is BF16
    assert outs == [torch.half, torch.float64]


@pytest.mark.parametrize("kind", ["reentrant", "early stop", "no early stop"])
@pytest.mark.parametrize("override", [False, True])
def test_checkpointing_gives_the_gradients_of_a_plain_run(kind, override):  # F3
    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.last = Seen(4), Seen(4), nn.Sequential(Seen(4), nn.LayerNorm(4))

        def forward(self, x):
            return self.last(self.b(self.a(x)))

    m = Body().bfloat16()
    pinned(m, r"^(a|last)$", override_parameters=override)
    inputs = x().requires_grad_()

    def run(body):
        m.zero_grad()
        with torch.autocast("cpu", BF16):
            out = body(inputs)
        out.float().sum().backward()
        return [p.grad.clone() for p in m.parameters()]

    plain = run(m)

    def checkpointed(inputs):
        if kind == "reentrant":
            return checkpoint(m, inputs, use_reentrant=True)
        with torch.utils.checkpoint.set_checkpoint_early_stop(kind == "early stop"):
            return checkpoint(m, inputs, use_reentrant=False)

    again = run(checkpointed)
    assert all(torch.equal(one, two) for one, two in zip(plain, again, strict=True))
    assert not frames.thread.frames
    assert set(m.last[0].seen) == {(F32, F32, F32)}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("stored", "dtype"), [(BF16, F32), (F32, BF16)])
def test_a_pinned_forward_that_checkpoints_its_children(reentrant, stored, dtype):  # F3
    class Layer(nn.Module):
        checkpointed = True

        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(Seen(4), nn.LayerNorm(4))

        def forward(self, x):
            if self.checkpointed:
                return checkpoint(self.body, x, use_reentrant=reentrant)
            return self.body(x)

    m = nn.Sequential(Layer(), Seen(4)).to(stored)
    dtypepin.apply(m, "^0$", dtype=dtype)
    inputs = x(stored).requires_grad_()
    grads = []
    for Layer.checkpointed in (False, True):
        m.zero_grad()
        m(inputs).sum().backward()
        grads.append([p.grad.clone() for p in m.parameters()])
        assert m[0].body[0].weight is next(m.parameters())
    assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))
    assert set(m[0].body[0].seen) == {(dtype,) * 3}
    assert len(m[0].body[0].seen) == 3


def test_a_none_output_in_an_except_block_is_no_error():
    class Nothing(nn.Module):
        def forward(self, x):
            return None

    def fall_back():
        try:
            raise ValueError("outer")
        except ValueError:
            assert m(x()) is None
            raise

    m = pinned(Nothing())
    with pytest.raises(ValueError, match="outer") as error:
        fall_back()
    assert not getattr(error.value, "__notes__", [])


class Noted(ValueError):
    """Takes notes on every Python; the built-in exceptions do since 3.11."""

    def add_note(self, text):
        self.__notes__ = [*getattr(self, "__notes__", ()), text]


def test_an_exception_that_takes_no_notes_passes_as_it_is():
    class Without(ValueError):
        @property
        def add_note(self):
            raise AttributeError

    m = pinned(Fails(Without("x")))
    with pytest.raises(Without, match="x"):
        m(x())


@pytest.mark.parametrize("method", ["forward", "encode"])
def test_an_exception_names_the_pinned_module(method):
    m = nn.Sequential(Fails(Noted("x")))
    m[0].encode = m[0].forward
    pinned(m, "^0$", methods_to_override=[method], dtype="float64")
    with pytest.raises(Noted, match="x") as error:
        (m if method == "forward" else m[0].encode)(x())
    (note,) = error.value.__notes__
    assert "module '0'" in note
    assert "pinned to float64" in note
    assert "inputs=" not in note  # nothing was left uncast


def test_the_note_offers_inputs_all_only_where_floats_were_left():
    m = pinned(Fails(Noted("x")))
    with pytest.raises(Noted, match="x") as error:
        m(x(), other=x(torch.half))
    (note,) = error.value.__notes__
    assert 'left in float16: inputs="all" would cast them too' in note


def test_nested_pins_add_one_note_of_the_innermost():
    m = pinned(pinned(nn.Sequential(Fails(Noted("x")))), "^0$")
    with pytest.raises(Noted, match="x") as error:
        m(x())
    (note,) = error.value.__notes__
    assert "module '0'" in note


@pytest.fixture
def no_fast_path():
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize("pattern", ["norm1", "linear1", "self_attn"])
def test_the_fast_path_of_a_transformer_layer_does_not_go_past_a_pin(pattern, request):  # N2
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    inputs = torch.randn(2, 3, 8)
    expected = layer(inputs)
    if torch_private.FAST_PATH_SEES_HOOKS:
        pins = dtypepin.apply(layer, f"^{pattern}$", dtype="float64")
    else:  # old torch: said at once, with the way out
        with pytest.warns(dtypepin.PinWarning, match="set_fastpath_enabled"):
            pins = dtypepin.apply(layer, f"^{pattern}$", dtype="float64")
        request.getfixturevalue("no_fast_path")
    layer.eval()
    with torch.no_grad():
        out = layer(inputs)
    assert pins[0].ran
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)


def test_where_the_fast_path_goes_past_a_pin_it_is_said(monkeypatch):  # N2
    monkeypatch.setattr(refusals, "FAST_PATH_SEES_HOOKS", False)
    layers = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    )
    with pytest.warns(dtypepin.PinWarning, match=r"'layers\.1': layers\.1\.norm1\. On torch"):
        dtypepin.apply(layers, r"1\.norm1")
    dtypepin.apply(layers, r"^layers\.0$")  # the whole layer is fine


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_go_in_and_out(layout):
    parts = [torch.randn(2, 4), torch.randn(3, 4)]
    nested = torch.nested.nested_tensor(parts, dtype=BF16, layout=layout)
    m = pinned(Seen(4).bfloat16())
    out = m(nested)
    assert m.seen == [(F32, F32, F32)]
    assert out.is_nested
    assert out.dtype is BF16
    for part, one in zip(nested.unbind(), out.unbind(), strict=True):
        assert torch.equal(one, m(part))


def test_pins_removed_inside_their_own_call():
    class Removes(nn.Module):
        def forward(self, x):
            pins.remove()
            return x * 2

    m = Removes()
    pins = dtypepin.apply(m, "^$")
    with torch.autocast("cpu", BF16):
        m(x())
    assert m(x()).dtype is BF16
    assert frames.current() is None
