"""DtypeOverrider in a small real training loop of the detectron2 and Pointcept style."""

import logging
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from digits import Net, digits
from dtypepin import PinError, PinWarning
from dtypepin.trainers import DtypeOverrider


class Registry(dict):
    """What such trainers build their hooks from."""

    def register_module(self):
        def register(kind):
            self[kind.__name__] = kind
            return kind

        return register

    def build(self, config):
        config = dict(config)
        return self[config.pop("type")](**config)


class Trainer:
    def __init__(self, model, hooks, autocast, steps=160):
        self.model, self.hooks, self.autocast, self.steps = model, hooks, autocast, steps
        self.logger = logging.getLogger("trainer")
        self.train_set, self.test_set = digits()
        for hook in hooks:
            hook.trainer = self

    def call(self, name):
        for hook in self.hooks:
            getattr(hook, name)()

    def train(self):
        try:
            self.call("before_train")
            self.call("before_epoch")
            optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
            for step in range(self.steps):
                self.call("before_step")
                at = slice(step * 64 % 1280, step * 64 % 1280 + 64)
                with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                    logits = self.model(self.train_set[0][at])
                loss = nn.functional.cross_entropy(logits.float(), self.train_set[1][at])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                self.call("after_step")
            self.call("after_epoch")
        finally:
            self.call("after_train")

    def accuracy(self):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return (self.model(self.test_set[0]).argmax(1) == self.test_set[1]).float().mean()


def trained(hooks, autocast, **kwargs):
    torch.manual_seed(0)
    trainer = Trainer(Net(), hooks, autocast, **kwargs)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def fp32_accuracy():
    return trained([], autocast=False).accuracy()


@pytest.mark.parametrize("override_parameters", [None, False, True])
def test_digits_reach_the_accuracy_of_fp32(fp32_accuracy, override_parameters):
    hooks = []
    if override_parameters is not None:
        registry = Registry()
        registry.register_module()(DtypeOverrider)
        config = {
            "type": "DtypeOverrider",
            "patterns": ["norm", "head"],
            "override_parameters": override_parameters,
        }
        hooks = [registry.build(config)]
    torch.manual_seed(0)
    trainer = Trainer(Net(), hooks, autocast=True)
    trainer.train()
    assert fp32_accuracy > 0.9
    assert abs(trainer.accuracy() - fp32_accuracy) < 0.01
    seen = trainer.model.head.seen
    assert len(seen) == trainer.steps + 1
    # Autocast casts inside F.linear: the module's own input and weight show nothing of it.
    inside = torch.float32 if hooks else torch.bfloat16
    assert {out for _, _, out in seen[:-1]} == {inside}
    assert seen[-1][2] is torch.bfloat16  # the pins are off after training


def test_drift_is_repaired_and_warned_about_at_the_interval():
    hook = DtypeOverrider(class_patterns=["Norm"], override_parameters=True, check_interval=3)
    model = Net().bfloat16()
    Trainer(model, [hook], autocast=False)
    hook.before_train()
    assert model.norm.weight.dtype is torch.float32
    model.bfloat16()
    hook.after_step()
    hook.after_step()
    assert model.norm.weight.dtype is torch.bfloat16
    with pytest.warns(PinWarning, match=r"norm\.weight \(bfloat16, expected float32\)"):
        hook.after_step()
    assert model.norm.weight.dtype is torch.float32
    model(torch.randn(2, 8, 8, dtype=torch.bfloat16))
    hook.after_train()
    assert model.norm.weight.dtype is torch.bfloat16


def test_an_interval_of_0_never_checks():
    hook = DtypeOverrider(class_patterns=["Norm"], override_parameters=True, check_interval=0)
    model = Net().bfloat16()
    trainer = Trainer(model, [hook], autocast=False)
    hook.before_train()
    trainer.model.bfloat16()
    for _ in range(20):
        hook.after_step()
    assert model.norm.weight.dtype is torch.bfloat16
    model(torch.randn(2, 8, 8, dtype=torch.bfloat16))
    hook.after_train()


def test_an_exception_in_the_loop_takes_the_pins_off():
    class Stop(DtypeOverrider):
        def after_step(self):
            super().after_step()
            raise KeyboardInterrupt

    hook = Stop(patterns=["norm"])
    trainer = Trainer(Net(), [hook], autocast=True)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not trainer.model.norm._forward_hooks
    assert hook.pins is None


def test_verbose_logs_each_method_and_parameter_and_a_summary(caplog):
    hook = DtypeOverrider(patterns=[r"^norm$"], override_parameters=True, verbose=True)
    Trainer(Net(), [hook], autocast=True)
    with caplog.at_level(logging.INFO, "trainer"):
        hook.before_train()
    hook.after_train()
    assert [record.message for record in caplog.records] == [
        "pinned norm.forward (LayerNorm) to float32",
        "stored norm.weight in float32",
        "stored norm.bias in float32",
        "1 methods pinned to float32, 2 parameters stored in it",
    ]


class Coder(nn.Module):
    """Has a method that its sibling below has not, and parameters of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def encode(self, x):
        return x * self.scale


def test_verbose_logs_parameters_whichever_methods_the_module_has(caplog):
    model = nn.Sequential(Coder(), nn.LayerNorm(4, bias=False)).bfloat16()
    hook = DtypeOverrider(
        patterns=["0", "1"],
        methods_to_override=["encode", "forward"],
        override_parameters=True,
        verbose=True,
    )
    trainer = Trainer(model, [hook], autocast=False)
    trainer.logger = None  # then it is the package's own logger
    with caplog.at_level(logging.INFO, "dtypepin"):
        hook.before_train()
    hook.after_train()
    assert [record.message for record in caplog.records] == [
        "pinned 0.encode (Coder) to float32",
        "stored 0.scale in float32",
        "pinned 0.forward (Coder) to float32",
        "pinned 1.forward (LayerNorm) to float32",
        "stored 1.weight in float32",
        "3 methods pinned to float32, 2 parameters stored in it",
    ]


def test_dead_patterns_warn_and_no_match_is_an_error():
    trainer = Trainer(Net(), [], autocast=True)
    hook = DtypeOverrider(patterns=["norm", "nrom"])
    hook.trainer = trainer
    with pytest.warns(PinWarning, match="'nrom' matches no module name"):
        hook.before_train()
    hook.after_train()
    hook = DtypeOverrider(patterns=["nrom"])
    hook.trainer = trainer
    with pytest.raises(PinError, match="no module matched"):
        hook.before_train()
    hook.after_train()  # nothing to take off


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "int8"},
        {"check_interval": -1},
        {"check_interval": None},
        {"check_interval": True},
        {"patterns": "("},
        {"patterns": None},
        {"class_patterns": [3]},
        {"methods_to_override": []},
        {"methods_to_override": [3]},
        {"methods_to_override": 3},
        {"override_parameters": 1},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_at_once(wrong):
    with pytest.raises(PinError, match=next(iter(wrong))):
        DtypeOverrider(**{"patterns": ["norm"], **wrong})


def test_without_a_trainer_it_says_so():
    with pytest.raises(PinError, match="trainer: got None"):
        DtypeOverrider(patterns=["norm"]).before_train()


def test_repr_shows_every_argument():
    hook = DtypeOverrider(
        "a", re.compile("B"), "bf16", "encode", True, True, 3, inputs="all", output=torch.float64
    )
    assert repr(hook) == (
        "DtypeOverrider(patterns=['a'], class_patterns=['B'], dtype='bfloat16', "
        "methods_to_override=['encode'], override_parameters=True, verbose=True, check_interval=3, "
        "inputs='all', output=torch.float64)"
    )


def test_inputs_and_output_are_those_of_apply():
    seen = []

    class Two(nn.Module):
        def forward(self, a, b):
            seen.append((a.dtype, b.dtype))
            return a + b

    model = nn.ModuleDict({"two": Two()})
    hook = DtypeOverrider("two", inputs="all", output="keep")
    hook.trainer = SimpleNamespace(model=model)
    hook.before_train()
    x = torch.randn(2, dtype=torch.bfloat16)
    assert model["two"](x, x).dtype is torch.float32
    assert seen == [(torch.float32, torch.float32)]
    hook.after_train()
    with pytest.raises(PinError, match="inputs"):
        DtypeOverrider("two", inputs="both")


def test_a_base_class_that_would_hide_the_pins_is_refused():
    class HookBase:
        def before_train(self): ...

    class Deep(HookBase): ...

    with pytest.raises(PinError, match=r"expected class Overrider\(DtypeOverrider, HookBase\)"):
        type("Overrider", (Deep, DtypeOverrider), {})

    class Mine(DtypeOverrider, Deep):
        def before_train(self, runner=None):
            super().before_train(runner)

    type("More", (Mine, HookBase), {})

    class Explicit(HookBase, DtypeOverrider):
        def before_train(self, runner=None):
            DtypeOverrider.before_train(self, runner)

    class Logs:
        def before_train(self, runner=None):
            super().before_train(runner)

    type("Cooperates", (Logs, DtypeOverrider), {})


@pytest.mark.parametrize("trainer", [SimpleNamespace(), SimpleNamespace(model="net")])
def test_a_trainer_without_a_model_is_refused(trainer):
    hook = DtypeOverrider("norm")
    hook.trainer = trainer
    with pytest.raises(PinError, match=r"trainer\.model: got (NoneType|str)"):
        hook.before_train()


def test_a_second_training_pins_once_and_anew():
    # An iterator of patterns must not be used up by the first training.
    hook = DtypeOverrider(patterns=iter([r"^norm$"]), methods_to_override=iter(["forward"]))
    trainer = Trainer(Net(), [hook], autocast=True, steps=1)
    hook.before_train()
    hook.before_train()
    assert len(trainer.model.norm._forward_hooks) == 1
    trainer.train()
    trainer.train()
    assert not trainer.model.norm._forward_hooks


def test_a_pin_that_was_never_called_is_named():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.read = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return nn.functional.linear(self.used(x), self.read.weight)

    hook = DtypeOverrider(patterns=["used", "read"])
    trainer = Trainer(Parent(), [hook], autocast=True)
    hook.before_train()
    trainer.model(torch.randn(2, 4))
    hook.after_step()
    with pytest.warns(PinWarning, match=r"not called in 1 steps: read\.forward\."):
        hook.after_train()


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wrap", [nn.DataParallel, nn.parallel.DistributedDataParallel])
def test_wrappers_are_seen_through(one_process, wrap):
    hook = DtypeOverrider(patterns=[r"^norm$", r"^head$"])
    net = Net()
    trainer = Trainer(wrap(net), [], autocast=True, steps=2)
    trainer.hooks, hook.trainer = [hook], weakref.proxy(trainer)  # as detectron2 sets it
    trainer.train()
    assert [out for _, _, out in net.head.seen] == [torch.float32] * 2
    hook.before_train()
    assert [pin.name for pin in hook.pins] == ["norm", "head"]
    hook.after_train()
    assert not net.norm._forward_hooks
