"""Many threads on one pinned model: every result right. F5 of the cases."""

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import dtypepin
from dtypepin._pin import frames, hooks

DTYPES = [torch.half, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("override", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_eight_threads_with_mixed_dtypes(override, grad):
    m = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8).eval()).bfloat16()
    other = nn.LayerNorm(8).bfloat16()
    dtypepin.apply(m, "^$" if not override else r"^\d$", override_parameters=override)
    inputs = {dtype: torch.randn(4, 8).to(dtype) for dtype in DTYPES}
    expected = {dtype: m(x).detach() for dtype, x in inputs.items()}
    assert {dtype: y.dtype for dtype, y in expected.items()} == {dtype: dtype for dtype in DTYPES}
    weight, done = m[0].weight, threading.Event()

    def call(number):
        wrong = 0
        for i in range(500):
            dtype = DTYPES[(number + i) % 4]
            with (
                torch.set_grad_enabled(grad),
                torch.autocast("cpu", torch.bfloat16, enabled=bool(i % 3)),
            ):
                out = m(inputs[dtype])
                wrong += torch.is_autocast_enabled("cpu") is not bool(i % 3)
            wrong += out.dtype is not dtype or not torch.equal(out, expected[dtype])
            if grad:
                (gradient,) = torch.autograd.grad(out.sum(), weight)
                wrong += gradient.dtype is not weight.dtype
        return wrong

    def toggle():
        wrong = 0
        while not done.is_set():
            with dtypepin.apply(other, "^$", override_parameters=override):
                wrong += other(inputs[torch.bfloat16]).dtype is not torch.bfloat16
            wrong += bool(other._forward_hooks) or other.weight.dtype is not torch.bfloat16
        return wrong

    with ThreadPoolExecutor(9) as pool:
        toggling = pool.submit(toggle)
        wrong = list(pool.map(call, range(8)))
        done.set()
        assert wrong == [0] * 8
        assert toggling.result() == 0
    assert m[0].weight is weight


def test_each_thread_keeps_its_own_autocast():  # F5
    m, seen = nn.Linear(4, 4), {}
    dtypepin.apply(m, "^$")
    ready = threading.Barrier(2)

    def work(name, on):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            for _ in range(50):
                ready.wait()
                m(torch.ones(1, 4))
                seen.setdefault(name, set()).add(torch.is_autocast_enabled("cpu"))

    threads = [threading.Thread(target=work, args=("off", False))]
    threads[0].start()
    work("on", True)
    threads[0].join()
    assert seen == {"on": {True}, "off": {False}}


def test_who_changes_pins_waits_for_the_other():
    m = nn.Linear(4, 4)
    pins = dtypepin.apply(m, "^$")
    for change in (pins.remove, lambda: dtypepin.apply(m, "^$"), lambda: dtypepin.unpin(m)):
        with hooks.changing:
            worker = threading.Thread(target=change)
            worker.start()
            worker.join(0.1)
            assert worker.is_alive()
        worker.join(10)
        assert not worker.is_alive()
    assert not m._forward_hooks


def test_threads_that_ended_leave_no_frames():
    m = nn.Linear(4, 4)
    dtypepin.apply(m, "^$")
    for _ in range(3):
        worker = threading.Thread(target=m, args=(torch.ones(1, 4),))
        worker.start()
        worker.join()
    assert not {life.thread_id for life in frames._lives} - sys._current_frames().keys()


def test_the_collector_rests_while_the_stacks_of_other_threads_are_asked_for(monkeypatch):
    asked, real = [], sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: (asked.append(gc.isenabled()), real())[1])
    m, running, done = nn.Linear(4, 4), threading.Event(), threading.Event()
    pins = dtypepin.apply(m, "^$")
    m.register_forward_pre_hook(lambda *_: (running.set(), done.wait(10))[0] and None)
    worker = threading.Thread(target=m, args=(torch.ones(1, 4),))
    worker.start()
    running.wait(10)
    assert asked == []  # a thread's first call does without
    pins.remove()
    done.set()
    worker.join(10)
    m(torch.ones(1, 4))
    assert asked
    assert not any(asked)
    assert gc.isenabled()
