"""Pins before and after ``Accelerator.prepare``, in real trainings on digits."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dtypepin
from digits import Net, digits
from dtypepin import PinWarning

accelerate = pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.filterwarnings("ignore"),  # what accelerate has to say about its dependencies
    pytest.mark.filterwarnings("error::dtypepin.PinWarning"),
]
BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def data():
    return digits()


def accelerator(precision="bf16"):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=True, mixed_precision=precision)


class Run:
    """One model with its optimizer, pinned before or after they were prepared."""

    def __init__(self, model, data, order="before", patterns="norm|mlp.0|head", **arguments):
        self.model, self.accelerator = model, accelerator()
        if order == "before":
            self.pins = dtypepin.apply(model, patterns, **arguments)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        loader = DataLoader(TensorDataset(*data[0]), batch_size=64)
        self.prepared, self.optimizer, self.loader = self.accelerator.prepare(
            model, optimizer, loader
        )
        if order == "after":
            self.pins = dtypepin.apply(self.prepared, patterns, **arguments)

    def train(self, start, end):
        for step, (x, y) in enumerate(self.loader):
            if start <= step < end:
                loss = nn.functional.cross_entropy(self.prepared(x).float(), y)
                self.optimizer.zero_grad()
                self.accelerator.backward(loss)
                self.optimizer.step()
        return self


@pytest.mark.parametrize("override_parameters", [False, True])
@pytest.mark.parametrize("order", ["before", "after"])
def test_its_autocast_on_forward_does_not_defeat_a_pin(data, order, override_parameters):
    run = Run(Net(), data, order, override_parameters=override_parameters)
    for _ in range(8):
        run.train(0, 99)
    assert {out for _, _, out in run.model.head.seen} == {F32}
    with torch.no_grad():
        assert (run.prepared(data[1][0]).argmax(1) == data[1][1]).float().mean() > 0.9
    run.pins.remove()
    run.prepared(data[1][0])
    assert run.model.head.seen[-1][2] is BF16
    plain = run.accelerator.unwrap_model(run.prepared)
    assert plain is run.model
    assert plain(data[1][0]).dtype is F32
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in plain.modules())


def test_both_orders_give_the_same_bits(data):
    first = Net()
    runs = [Run(copy.deepcopy(first), data, order).train(0, 4) for order in ("before", "after")]
    values = [run.model.state_dict().values() for run in runs]
    assert all(torch.equal(*pair) for pair in zip(*values, strict=True))


@pytest.mark.parametrize("stored_in", [F32, BF16])
@pytest.mark.parametrize("override_parameters", [False, True])
def test_a_resumed_training_equals_one_that_went_through(
    data, tmp_path, stored_in, override_parameters
):
    def run():
        return Run(Net().to(stored_in), data, override_parameters=override_parameters)

    whole = run().train(0, 2)
    whole.accelerator.save_state(tmp_path)
    whole.train(2, 4)
    resumed = run()
    resumed.accelerator.load_state(tmp_path)
    resumed.train(2, 4)
    for (name, value), other in zip(
        resumed.model.state_dict().items(), whole.model.state_dict().values(), strict=True
    ):
        assert torch.equal(value, other), name

    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model.safetensors")
    plain = Net()
    plain.load_state_dict(saved)  # the usual keys
    assert saved["norm.weight"].dtype is (F32 if override_parameters else stored_in)
    assert saved["rows.weight"].dtype is stored_in
    whole.pins.remove()
    assert {value.dtype for value in whole.model.parameters()} == {stored_in}


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_pin_on_the_very_module_that_is_prepared_is_told_of_with_what_works(data, order):
    run = Run(Net(), data, order, patterns="^$")
    with pytest.warns(PinWarning, match="the root module.*counts inside") as warned:
        run.train(0, 2)
    assert len(warned.list) == 1
    assert warned.list[0].filename == __file__  # not torch's or Accelerate's
    assert {out for _, _, out in run.model.head.seen} == {BF16}
    instead = str(warned.list[0].message).partition("patterns='")[2].partition("'")[0]
    run = Run(Net(), data, order, patterns=instead).train(0, 2)
    assert {out for _, _, out in run.model.head.seen} == {F32}

    model = nn.ModuleDict({"part": Net()})
    part = accelerator().prepare(model["part"])
    pins = dtypepin.apply(model, "^part$")
    with pytest.warns(PinWarning, match=r"'part'.*patterns='\^part"):
        part(data[1][0])
    pins.remove()
    with dtypepin.pin_dtype(model, r"^part\.[^.]+$"):
        part(data[1][0])
    assert [out for _, _, out in model["part"].head.seen] == [BF16, F32]
    plain = accelerator("no").prepare(Net())
    dtypepin.apply(plain, "^$")
    plain(data[1][0])  # no autocast, no warning
