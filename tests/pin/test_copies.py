"""Copies and other processes: pinned on their own weights, freed on their own. U1, U2."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import dtypepin
from helpers import Seen

BF16, F32 = torch.bfloat16, torch.float32


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm = Seen(4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.a(x))

    def encode(self, x):
        return self.a(x)


def pinned(override):
    m = Net().bfloat16()
    dtypepin.apply(m, "^(a|norm)$", override_parameters=override)
    dtypepin.apply(m, "^$", methods_to_override="encode")
    return m


def x():
    return torch.ones(2, 4, dtype=BF16)


@pytest.mark.parametrize("override", [False, True])
def test_an_ema_model(override):
    m = pinned(override)
    ema = AveragedModel(m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    for _ in range(2):  # the first update only copies
        with torch.no_grad():
            for value in m.parameters():
                value.add_(1)
        ema.update_parameters(m)
    ema.module.a.seen.clear()
    assert ema(x()).dtype is BF16
    assert ema.module.a.seen == [(F32, F32, F32)]
    assert not torch.equal(ema.module.a.weight, m.a.weight)
    assert dtypepin.unpin(ema) == 3
    assert ema.module.a.weight.dtype is BF16
    assert m.a._forward_hooks


def test_copies_share_nothing_with_the_original():
    m = pinned(True)
    twin = copy.deepcopy(m)
    m_pin, twin_pin = (next(iter(n.a._forward_hooks.values())).__self__ for n in (m, twin))
    assert m_pin is not twin_pin
    assert m.a._parameters is not twin.a._parameters
    dtypepin.unpin(m)
    twin.a.seen.clear()
    assert twin(x()).dtype is BF16
    assert twin.a.seen == [(F32, F32, F32)]
    assert twin.a.weight.dtype is F32


def test_a_shallow_copy_still_computes():
    m = pinned(False)
    assert copy.copy(m)(x()).dtype is BF16


FRESH = """
    import pickle, sys
    import torch
    from test_copies import Net, x, BF16, F32
    for path in sys.argv[1:]:
        if path.endswith(".pt"):
            model = torch.load(path, weights_only=False)
        else:
            model = pickle.load(open(path, "rb"))
        # Hook ids start over in a new process: a later hook must not take the place of the pin.
        others = [model.a.register_forward_hook(lambda *_: None) for _ in range(20)]
        model.a.seen.clear()
        assert model(x()).dtype is BF16
        assert model.encode(x()).dtype is BF16
        assert model.a.seen == [(F32, F32, F32)] * 2, model.a.seen
        with torch.no_grad():
            model.a.weight.zero_()
        assert model.encode(x()).abs().max() == 0
        for other in others:
            other.remove()
        import dtypepin
        assert dtypepin.unpin(model) == 3
        assert "encode" not in model.__dict__ and not model.a._forward_hooks
        assert model.a.weight.dtype is BF16
        assert type(model.a._parameters) is type(torch.nn.Linear(1, 1)._parameters)
        print("right", path)
"""


@pytest.mark.multiprocess
def test_a_fresh_process(tmp_path):  # U2
    paths = []
    for override in (False, True):
        m = pinned(override)
        paths += [tmp_path / f"{override}.pt", tmp_path / f"{override}.pickle"]
        torch.save(m, paths[-2])
        paths[-1].write_bytes(pickle.dumps(m))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FRESH), *map(str, paths)],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("right") == 4


def in_a_child(model, queue):
    model.a.seen.clear()
    out = model(x())
    seen = [str(dtype) for dtype in model.a.seen[0]]
    queue.put((str(out.dtype), seen, dtypepin.unpin(model), str(model(x()).dtype)))


@pytest.mark.multiprocess
def test_spawn():
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=in_a_child, args=(pinned(False), queue))
    process.start()
    found = queue.get(timeout=300)
    process.join()
    assert found == ("torch.bfloat16", ["torch.float32"] * 3, 3, "torch.bfloat16")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda child: pickle.loads(pickle.dumps(child))])
def test_a_child_that_outlived_its_pinned_parent_can_be_copied(copied):
    child = nn.Linear(4, 4).bfloat16()
    dtypepin.apply(nn.Sequential(child), "^$")
    gc.collect()
    x = torch.randn(2, 4).bfloat16()
    assert torch.equal(copied(child)(x), child(x))
