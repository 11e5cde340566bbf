"""DtypeOverrider with MMEngine's own runner, and in the order of calls of two other trainers."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import dtypepin
from digits import Net, digits
from dtypepin import PinError, PinWarning
from dtypepin.trainers import DtypeOverrider

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.filterwarnings("ignore"),  # what MMEngine has to say about its dependencies
    pytest.mark.filterwarnings("error::dtypepin.PinWarning"),
]
BF16, F32 = torch.bfloat16, torch.float32


def is_free(model):
    return not any(
        part._forward_pre_hooks
        or part._forward_hooks
        or type(part._parameters).__module__.startswith("dtypepin")
        for part in model.modules()
    )


# What detectron2 and Pointcept ask of a hook, and the order in which their trainers call it, as
# detectron2/engine/train_loop.py and pointcept/engines/train.py have it. Neither can be installed
# from the index.


class HookBase:
    trainer = None

    def before_train(self): ...
    def after_train(self): ...
    def before_epoch(self): ...
    def after_epoch(self): ...
    def before_step(self): ...
    def after_backward(self): ...
    def after_step(self): ...
    def state_dict(self):
        return {}


class Overrider(DtypeOverrider, HookBase):
    pass


class TrainerBase:
    def __init__(self, model, hooks, fail_at=None):
        self.model, self._hooks, self.fail_at = model, [], fail_at
        self.optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for hook in hooks:
            assert isinstance(hook, HookBase)
            hook.trainer = weakref.proxy(self)
        self._hooks.extend(hooks)
        (self.x, self.y), _ = digits()

    def call(self, name):
        for hook in self._hooks:
            getattr(hook, name)()

    def run_step(self, step):
        if step == self.fail_at:
            raise RuntimeError("out of luck")
        at = slice(64 * step, 64 * step + 64)
        with torch.autocast("cpu", BF16):
            loss = nn.functional.cross_entropy(self.model(self.x[at]).float(), self.y[at])
        self.optimizer.zero_grad()
        loss.backward()
        self.after_backward()
        self.optimizer.step()

    def after_backward(self): ...


class Detectron2(TrainerBase):
    def train(self):
        try:
            self.call("before_train")
            for step in range(3):
                self.call("before_step")
                self.run_step(step)
                self.call("after_step")
        finally:
            self.call("after_train")

    def after_backward(self):
        self.call("after_backward")

    def checkpoint(self):
        return {type(hook).__qualname__: hook.state_dict() for hook in self._hooks}


class Pointcept(TrainerBase):
    def train(self):
        self.call("before_train")
        for _ in range(2):
            self.call("before_epoch")
            for step in range(3):
                self.call("before_step")
                self.run_step(step)
                self.call("after_step")
            self.call("after_epoch")
        self.call("after_train")


@pytest.mark.parametrize("override_parameters", [False, True])
@pytest.mark.parametrize("kind", [Detectron2, Pointcept])
def test_the_order_of_calls_of_detectron2_and_pointcept(kind, override_parameters):
    hook = Overrider(["norm", "head"], override_parameters=override_parameters)
    model = Net().bfloat16()
    trainer = kind(model, [hook])
    trainer.train()
    assert len(model.head.seen) == (3 if kind is Detectron2 else 6)
    assert {(weight, out) for _, weight, out in model.head.seen} == {(F32, F32)}
    assert is_free(model)
    assert {value.dtype for value in model.parameters()} == {BF16}
    if kind is Detectron2:
        assert trainer.checkpoint() == {"Overrider": {}}


@pytest.mark.parametrize("kind", [Detectron2, Pointcept])
def test_an_error_in_them(kind):
    hook, model = Overrider(["norm", "head"]), Net()
    trainer = kind(model, [hook], fail_at=1)
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.train()
    assert is_free(model) is (kind is Detectron2)  # Pointcept has no ``finally``
    hook.remove()
    assert is_free(model)
    hook = Overrider(["nrom"])
    trainer = kind(model, [hook])
    with pytest.raises(PinError, match="no module matched"):
        trainer.train()
    assert is_free(model)


@pytest.mark.parametrize("kind", [Detectron2, Pointcept])
def test_an_optimizer_that_was_resumed_before_agrees_with_stored_parameters(kind):
    model = Net().bfloat16()
    hook = Overrider(["norm", "head"], override_parameters=True)
    trainer = kind(model, [hook])
    model(trainer.x[:8].bfloat16()).sum().backward()
    trainer.optimizer.step()
    assert trainer.optimizer.state[model.norm.weight]["exp_avg"].dtype is BF16
    with pytest.warns(PinWarning, match="weights were rounded") as caught:
        trainer.train()
    assert caught[0].filename == __file__
    assert trainer.optimizer.state[model.norm.weight]["exp_avg"].dtype is F32
    assert trainer.optimizer.state[model.rows.weight]["exp_avg"].dtype is BF16


def test_pinned_before_a_checkpoint_is_loaded_its_digits_stay_to_the_start():
    saved = Net().state_dict()
    with torch.no_grad():
        saved["norm.weight"].normal_()
    model = Net().bfloat16()
    hook = Overrider(["norm", "head"], override_parameters=True)
    trainer = Detectron2(model, [hook])
    hook.before_train()
    model.load_state_dict(saved)  # as resume_or_load does
    trainer.call("before_train")
    assert torch.equal(model.norm.weight, saved["norm.weight"])
    assert len(model.norm._forward_hooks) == 1
    trainer.call("after_train")
    assert is_free(model)


class Digits(Dataset):
    def __init__(self):
        self.x, self.y = digits()[0]

    def __len__(self):
        return 128

    def __getitem__(self, index):
        return self.x[index], self.y[index]


@pytest.fixture
def mm(tmp_path):
    """A model and a runner of MMEngine, and DtypeOverrider in its registry of hooks."""
    pytest.importorskip("mmengine")
    from mmengine.evaluator import BaseMetric, Evaluator
    from mmengine.hooks import Hook
    from mmengine.model import BaseModel
    from mmengine.registry import HOOKS
    from mmengine.runner import Runner

    class Model(BaseModel):
        fail = False

        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x, y, mode="tensor"):
            if self.fail:
                raise RuntimeError("out of luck")
            with torch.autocast("cpu", BF16):  # MMEngine's own needs a GPU
                loss = nn.functional.cross_entropy(self.net(x).float(), y)
            return {"loss": loss} if mode == "loss" else [loss]

    class Count(BaseMetric):
        def process(self, data_batch, data_samples):
            self.results.append(1)

        def compute_metrics(self, results):
            return {"count": sum(results)}

    @HOOKS.register_module()
    class MMOverrider(DtypeOverrider, Hook):
        pass

    def runner(model, more=(), **hook):
        return Runner(
            model=model,
            work_dir=str(tmp_path),
            train_dataloader={
                "dataset": Digits(),
                "batch_size": 64,
                "num_workers": 0,
                "sampler": {"type": "DefaultSampler", "shuffle": False},
                "collate_fn": {"type": "default_collate"},
            },
            train_cfg={"by_epoch": True, "max_epochs": 2},
            optim_wrapper={"optimizer": {"type": "Adam", "lr": 3e-3}},
            custom_hooks=[{"type": "MMOverrider", **hook}],
            default_hooks={"logger": None, "checkpoint": {"type": "CheckpointHook", "interval": 1}},
            log_level="ERROR",
            experiment_name=f"{tmp_path.name}_{id(model)}",  # one of a name in a process
            **dict(more),
        )

    yield SimpleNamespace(Model=Model, Hook=Hook, Evaluator=Evaluator, Count=Count, runner=runner)
    HOOKS.module_dict.pop("MMOverrider")


@pytest.mark.parametrize("override_parameters", [False, True])
def test_mmengine_builds_and_calls_it(mm, override_parameters):
    run = mm.runner(mm.Model(), patterns=["norm", "head"], override_parameters=override_parameters)
    run.train()
    assert [out for _, _, out in run.model.net.head.seen] == [F32] * 4
    assert is_free(run.model)


def test_mmengine_counts_steps_and_has_drift_repaired(mm):
    run = mm.runner(mm.Model(), patterns=["norm"], override_parameters=True, check_interval=3)

    class Drift(mm.Hook):
        """Casts a pinned module after the third step."""

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            if runner.iter == 2:
                runner.model.net.norm.bfloat16()

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            seen.append(runner.model.net.norm.weight.dtype)

    seen = []
    run.register_hook(Drift(), priority="VERY_HIGH")
    with pytest.warns(PinWarning, match=r"net\.norm\.weight \(bfloat16, expected float32\)"):
        run.train()
    assert seen == [F32] * 4


def test_mmengine_after_an_error_and_with_a_bad_pattern(mm):
    model = mm.Model()
    model.fail = True
    with pytest.raises(RuntimeError, match="out of luck"):
        mm.runner(model, patterns=["norm"]).train()
    assert not is_free(model)  # MMEngine has no ``finally``
    assert dtypepin.unpin(model) == 1
    assert is_free(model)
    run = mm.runner(mm.Model(), patterns=["nrom"])
    with pytest.raises(PinError, match="no module matched"):
        run.train()
    assert is_free(run.model)


@pytest.mark.parametrize("override_parameters", [False, True])
def test_mmengine_resumes_from_the_usual_keys(mm, tmp_path, monkeypatch, override_parameters):
    # MMEngine's checkpoints hold objects of its own, and it does not tell torch to trust them.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")

    def run(**more):
        model = mm.Model()
        model.net.head.bfloat16()
        arguments = {"patterns": ["norm", "head"], "override_parameters": override_parameters}
        return mm.runner(model, more, **arguments)

    whole = run()
    whole.train()
    path = tmp_path / "epoch_1.pth"
    saved = torch.load(path)["state_dict"]
    plain = mm.Model()
    assert list(saved) == list(plain.state_dict())
    assert saved["net.head.weight"].dtype is (F32 if override_parameters else BF16)
    plain.load_state_dict(saved)
    resumed = run(load_from=str(path), resume=True)
    resumed.train()
    assert len(resumed.model.net.head.seen) == 2
    assert {out for _, _, out in resumed.model.net.head.seen} == {F32}
    assert is_free(resumed.model)
    for (name, value), other in zip(
        resumed.model.state_dict().items(), whole.model.state_dict().values(), strict=True
    ):
        assert torch.equal(value, other), name


@pytest.mark.parametrize("stage", ["val", "test"])
def test_mmengine_pins_for_val_and_test_too(mm, stage):
    loader = {"dataset": Digits(), "batch_size": 128, "num_workers": 0}
    loader |= {"sampler": {"type": "DefaultSampler"}, "collate_fn": {"type": "default_collate"}}
    more = {
        f"{stage}_dataloader": loader,
        f"{stage}_cfg": {},
        f"{stage}_evaluator": mm.Evaluator([mm.Count()]),
    }
    run = mm.runner(mm.Model(), more, patterns=["norm", "head"])
    assert getattr(run, stage)() == {"count": 1}
    assert [out for _, _, out in run.model.net.head.seen] == [F32]
    assert is_free(run.model)
