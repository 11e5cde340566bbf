"""Each private torch name in _base/torch_private.py does what is assumed, and can be missing."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict

import pytest
import torch
from torch import nn

import dtypepin
from dtypepin._base import torch_private
from dtypepin._pin import hooks, methods

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def test_any_autocast_enabled_is_torchs_own_and_right():
    assert torch_private.any_autocast_enabled is torch._C._is_any_autocast_enabled
    assert torch_private.is_tracing is torch._C._is_tracing
    assert torch_private.any_autocast_enabled() is False
    with torch.autocast("cpu", torch.bfloat16):
        assert torch_private.any_autocast_enabled() is True
        with torch.autocast("cpu", enabled=False):
            assert torch_private.any_autocast_enabled() is False
    assert torch_private._unknown_autocast() is True  # the public question is asked then


def test_in_functorch_knows_every_transform():
    assert not torch_private.in_functorch()
    seen = []

    def function(x):
        seen.append(torch_private.in_functorch())
        return x.sum()

    x = torch.ones(3)
    torch.func.grad(function)(x)
    torch.func.vmap(function)(torch.ones(2, 3))
    torch.func.jvp(function, (x,), (x,))
    assert seen == [True] * 3
    assert not torch_private.in_functorch()


def test_is_exporting_is_true_in_export_alone():
    class Probe(nn.Module):
        def forward(self, x):
            return x + (1 if torch_private.is_exporting() else 2)

    x = torch.zeros(1)
    assert Probe()(x) == 2
    assert torch.export.export(Probe(), (x,), strict=False).module()(x) == 1
    assert torch.jit.trace(Probe(), x)(x) == 2
    assert torch.compile(Probe(), backend="eager")(x) == 2
    assert Probe()(x) == 2
    known = getattr(torch.compiler, "is_exporting", torch_private._is_exporting)
    assert torch_private.is_exporting is known


def test_renumber_gives_a_hook_its_old_id_and_place():
    module, order = nn.Identity(), []

    def hook(name):
        return lambda *_: order.append(name)

    first = module.register_forward_hook(hook("first"), always_call=True)
    old = first.id
    first.remove()
    module.register_forward_hook(hook("other"))
    again = module.register_forward_hook(hook("again"), prepend=True, always_call=True)
    new = again.id
    torch_private.renumber(again, old)
    assert again.id == old
    assert next(iter(module._forward_hooks)) == old
    assert new not in module._forward_hooks
    assert list(module._forward_hooks_always_called) == [old]
    module(torch.zeros(1))
    assert order == ["again", "other"]
    last = module.register_forward_hook(hook("last"))
    kept = last.id
    torch_private.renumber(last, old)  # taken
    assert last.id == kept
    again.remove()
    assert old not in module._forward_hooks
    assert not module._forward_hooks_always_called


def test_dynamo_takes_the_marks():
    assert hooks.SAFE_ACROSS_GRAPH_BREAKS is True
    marked = []
    assert torch_private._marker() is not None

    def collect():
        return marked.append

    original, torch_private._marker = torch_private._marker, collect
    try:
        assert torch_private.keep_out_of_dynamo_frames(hooks, methods)
    finally:
        torch_private._marker = original
    names = {code.co_name for code in marked}
    assert {"before", "after", "__call__", "attach", "_passed_through"} <= names
    assert "__wrapped__" in names  # a property
    assert "enter" not in names  # of another module


@pytest.mark.parametrize(("version", "drops"), [((2, 4), 3), ((2, 13), 1)])
def test_compiled_code_is_dropped_only_where_dynamo_would_not_notice(monkeypatch, version, drops):
    torch.compile(nn.Identity(), backend="eager")  # loads dynamo
    assert torch_private._TORCH == TORCH
    monkeypatch.setattr(torch_private, "_TORCH", version)
    dropped = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: dropped.append(True))
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=True):
        for _ in range(3):
            torch_private.see_hooks()
            told = not torch._dynamo.config.skip_nnmodule_hook_guards
            assert told is (version > (2, 4))
    assert len(dropped) == drops


needs_guards = pytest.mark.skipif(TORCH < (2, 5), reason="compiled code is dropped each time")


@needs_guards
def test_without_the_switch_compiled_code_is_dropped_each_time(monkeypatch):
    dropped = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: dropped.append(True))
    monkeypatch.setitem(sys.modules, "torch._dynamo.config", object())
    for _ in range(3):
        torch_private.see_hooks()
    assert len(dropped) == 3


@needs_guards
def test_a_pickled_pin_tells_dynamo_where_it_arrives():
    torch.compile(nn.Identity(), backend="eager")  # loads dynamo
    model = nn.Linear(8, 8)
    dtypepin.apply(model, "^$")
    data = pickle.dumps(model)
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=True):
        pickle.loads(data)
        assert torch._dynamo.config.skip_nnmodule_hook_guards is False


LATE = """
import sys, torch, dtypepin
from torch import nn
for _ in range(2):
    with dtypepin.pin_dtype(nn.Linear(8, 8), "^$"):
        pass
assert "torch._dynamo" not in sys.modules
finders = [f for f in sys.meta_path if type(f).__module__ == "dtypepin._base.torch_private"]
assert len(finders) == 1, finders
import torch._dynamo.config
assert torch._dynamo.config.skip_nnmodule_hook_guards is False
assert finders[0] not in sys.meta_path
"""


@needs_guards
def test_dynamo_is_told_when_somebody_imports_it():
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Deletes one private name before dtypepin is imported, then computes what a pin must give.
WITHOUT = """
import sys, torch, warnings
from torch import nn
{remove}
import dtypepin
from dtypepin._base import torch_private
from dtypepin._pin import hooks, methods
{restore}
assert {fallback}
if not hooks.SAFE_ACROSS_GRAPH_BREAKS:  # torch 2.4 loads dynamo by itself, and then it is said
    warnings.filterwarnings("ignore", "torch .* does not let hooks be kept out")
torch.manual_seed(0)
for autocast in (False, True):
    for override in (False, True):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LayerNorm(8)).bfloat16()
        x = torch.randn(4, 8).bfloat16()
        seen = []
        model[1].register_forward_hook(lambda m, a, o: seen.append((a[0].dtype, o.dtype)))
        keys = [(k, v.dtype) for k, v in model.state_dict().items()]
        for _ in range(2):
            with dtypepin.pin_dtype(model, ["^1$", "^2$"], override_parameters=override):
                stats = model[1].running_mean.clone()
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    out = model(x)
                    assert torch.is_autocast_enabled("cpu") is autocast
                assert out.dtype is torch.bfloat16
                assert not torch.equal(stats, model[1].running_mean)
                out.sum().backward()
        assert seen and set(seen) == {{(torch.float32, torch.bfloat16)}}, seen
        assert [(k, v.dtype) for k, v in model.state_dict().items()] == keys
        assert not any(m._forward_hooks and m is not model[1] for m in model.modules())
        model.eval()
        dtypepin.apply(model, "^1$")
        same = torch.func.vmap(model)(x.expand(2, 4, 8))
        assert torch.allclose(same[0].float(), model(x).float(), atol=0.02)
print("right")
"""

# Torch itself needs most of these names, so they come back once dtypepin is imported.
MISSING = {
    "any_autocast": (
        "had = torch._C._is_any_autocast_enabled; del torch._C._is_any_autocast_enabled",
        "torch._C._is_any_autocast_enabled = had",
        "torch_private.any_autocast_enabled is torch_private._unknown_autocast",
    ),
    "is_tracing": (
        "had = torch._C._is_tracing; torch.jit.is_tracing = lambda: had(); "
        "del torch._C._is_tracing",
        "torch._C._is_tracing = had",
        "torch_private.is_tracing is torch.jit.is_tracing",
    ),
    "is_exporting": (
        "had = vars(torch.compiler).pop('is_exporting', None)",
        "vars(torch.compiler).update(is_exporting=had) if had else None",
        "torch_private.is_exporting is torch_private._is_exporting",
    ),
    "functorch": (
        "import types; fake = types.SimpleNamespace(_C=None, compiler=torch.compiler)",
        "torch_private.torch = fake",
        "torch_private.in_functorch() is False",
    ),
    "eval_frame": (
        "had = sys.modules['torch._C._dynamo']; sys.modules['torch._C._dynamo'] = None",
        "sys.modules['torch._C._dynamo'] = had",
        "hooks.SAFE_ACROSS_GRAPH_BREAKS is False",
    ),
    "strategies": (
        "from torch._C._dynamo import eval_frame; had = dict(vars(eval_frame)); "
        "[vars(eval_frame).pop(n, None) for n in ('set_code_exec_strategy', 'skip_code')]",
        "vars(eval_frame).update(had)",
        "hooks.SAFE_ACROSS_GRAPH_BREAKS is False",
    ),
}


def test_autocast_at_the_beginning_of_a_trace_is_known():
    found = []

    def code(x):
        with torch.autocast("cpu", enabled=not outside):
            found.append(torch_private.autocast_outside("cpu"))
            return x + 1

    for outside in (True, False):
        torch.compiler.reset()
        with torch.autocast("cpu", torch.bfloat16, enabled=outside):
            torch.compile(code, backend="eager", fullgraph=True)(torch.ones(1))
    assert found == [True, False]
    assert torch_private.autocast_outside("cpu")  # not asked by a trace: no harm


@pytest.mark.parametrize("name", MISSING)
def test_eager_pins_are_right_without(name):
    remove, restore, fallback = MISSING[name]
    code = WITHOUT.format(remove=remove, restore=restore, fallback=fallback)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "right"


@pytest.mark.parametrize("loaded", [False, True])
def test_it_is_said_where_a_graph_break_may_lose_a_pin(monkeypatch, loaded):
    monkeypatch.setattr(hooks, "SAFE_ACROSS_GRAPH_BREAKS", False)
    importlib.import_module("torch._dynamo")
    model = torch.nn.LayerNorm(2)
    if loaded:
        with pytest.warns(dtypepin.PinWarning, match="a graph break inside a pinned module"):
            dtypepin.apply(model, "^$")
    else:  # nothing was compiled: nothing to say
        monkeypatch.delitem(sys.modules, "torch._dynamo")
        dtypepin.apply(model, "^$")


def test_renumber_without_the_old_dicts_leaves_the_hook_as_it_is():
    module = nn.Identity()
    handle = module.register_forward_hook(lambda *_: None)
    kept = handle.id
    handle.hooks_dict_ref = lambda: None
    torch_private.renumber(handle, kept + 1000)
    assert handle.id == kept


def test_a_hook_is_never_without_its_flags_while_it_is_renumbered():
    module, seen = nn.Identity(), []

    class Watching(OrderedDict):
        def __setitem__(self, key, value):
            super().__setitem__(key, value)
            seen.append(key in module._forward_pre_hooks_with_kwargs)

    module._forward_pre_hooks = Watching()
    handle = module.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    seen.clear()
    torch_private.renumber(handle, handle.id + 1000)
    assert seen == [True]
    assert list(module._forward_pre_hooks) == list(module._forward_pre_hooks_with_kwargs)


@needs_guards
def test_dynamo_is_told_in_every_thread():
    torch.compile(nn.Identity(), backend="eager")  # loads dynamo
    torch_private.see_hooks()
    told = []

    def look():
        told.append(torch._dynamo.config.skip_nnmodule_hook_guards)

    worker = threading.Thread(target=look)
    worker.start()
    worker.join()
    assert told == [False]
