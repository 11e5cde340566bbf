"""An audit leaves nothing behind."""

import gc
import weakref

import pytest
import torch
from audited import BF16, verdicts, x
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import dtypepin
from dtypepin import PinError
from dtypepin._audit import nonfinite
from dtypepin._pin import frames


def left_behind(model):
    """Everything that an audit must give back."""
    return (
        [list(part.__dict__) for part in model.modules()],
        [len(v) for part in model.modules() for k, v in part.__dict__.items() if "hooks" in k],
        {
            k: list(v)
            for k, v in vars(torch_module).items()
            if k.startswith("_global_") and "hooks" in k
        },
        len(_get_current_dispatch_mode_stack()),
        {key: value.tolist() for key, value in model.state_dict().items()},
        torch.get_rng_state().tolist(),
        nonfinite.quiet.on,
        list(frames.thread.disabled),
    )


def test_inputs_are_not_kept():
    m, value = nn.Sequential(nn.LayerNorm(4)).bfloat16(), x()
    alive = weakref.ref(value)
    with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m):
        m(value)
        del value
        gc.collect()
        assert alive() is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["block", "module", "extra run"])
def test_nothing_is_left_behind(error, where):
    class Fails(nn.Linear):
        def forward(self, x):
            if where == "module" or (where == "extra run" and x.dtype is BF16):
                raise error
            return super().forward(x)

    m = nn.Sequential(nn.Linear(4, 4), Fails(4, 4)).bfloat16()
    value = x()
    before = left_behind(m)
    pins = dtypepin.apply(m, "1")
    try:
        with dtypepin.audit(m) as report:
            m(value)
            if where == "block":
                raise error
    except error:
        assert where != "extra run" or error is not ValueError
    pins.remove()
    assert left_behind(m) == before
    frames.current()
    assert not frames.thread.frames
    assert {r.name for r in report.modules} >= {"", "0", "1"}
    with dtypepin.audit(m) as report:
        m[0](value)
    assert [r.name for r in report.modules] == ["0"]


def test_ran_is_what_it_was():
    m = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    pins = dtypepin.apply(m, "[01]")
    m[0](x())
    with dtypepin.audit(m) as report:
        m[1](x())
    assert [pin.ran for pin in pins] == [True, True]
    assert verdicts(report)["0"][0] == "never ran"


def test_a_report_keeps_no_model_alive():
    import gc
    import weakref

    m = nn.Sequential(nn.Linear(4, 4))
    dtypepin.apply(m, "0")
    with dtypepin.audit(m) as report:
        m(x())
    alive = weakref.ref(m)
    del m
    gc.collect()
    assert alive() is None
    assert len(report.modules) == 2


def test_what_is_no_module_is_refused():
    with pytest.raises(PinError, match=r"model: got function, expected a torch\.nn\.Module"):
        dtypepin.audit(lambda: None)
