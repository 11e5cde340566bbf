"""The Lightning callback in real trainings."""

import importlib
import pickle
import signal
import sys
import warnings
from types import ModuleType

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from digits import Head
from dtypepin import PinError, PinWarning, unpin

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a framework imports is its own affair
    lightning = pytest.importorskip("lightning.pytorch")
    from dtypepin.trainers.lightning import PinDtypeCallback

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.filterwarnings(
        "ignore:::lightning", "ignore:::torch.utils.data", "ignore:::torch.optim"
    ),
]
BF16, F32 = torch.bfloat16, torch.float32


class Digits(lightning.LightningModule):
    def __init__(self, late=False, fail=None):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU())
        self.fail = fail
        self.head = None if late else Head(32, 10)

    def configure_model(self):
        if self.head is None:
            self.head = Head(32, 10)

    def forward(self, x):
        return self.head(self.body(x))

    def loss(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self(x.to(self.body[0].weight.dtype)).float(), y)

    def training_step(self, batch, number):
        if self.fail is not None and number == 1:
            raise self.fail
        return self.loss(batch)

    def validation_step(self, batch, number):
        self.log("loss", self.loss(batch))

    def test_step(self, batch, number):
        self.log("loss", self.loss(batch))

    def predict_step(self, batch, number):
        return self(batch[0].to(self.body[0].weight.dtype))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x[:96] / 16, dtype=F32), torch.tensor(y[:96]))
    return DataLoader(data, batch_size=32)


def trainer(tmp_path, *callbacks, precision="bf16-mixed", **more):
    more = {"max_epochs": 1, "logger": False, **more}
    return lightning.Trainer(
        accelerator="cpu",
        precision=precision,
        callbacks=list(callbacks),
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )


def seen(model):
    found = model.head.__dict__.pop("seen", [])
    return set(found), len(found)


def test_fit_and_its_validation_are_pinned_and_nothing_is_left(digits, tmp_path):
    model, callback = Digits(), PinDtypeCallback("head")
    before = list(model.head.__dict__)
    trainer(tmp_path, callback).fit(model, digits, digits)
    assert seen(model) == ({(F32, F32, F32)}, 2 + 3 + 3)  # sanity check, training, validation
    assert callback.pins is None
    assert list(model.head.__dict__) == before
    assert unpin(model) == 0
    # Without the callback autocast makes it bfloat16.
    trainer(tmp_path).fit(model, digits)
    assert seen(model)[0] == {(BF16, F32, BF16)}
    # The same callback once more.
    trainer(tmp_path, callback).fit(model, digits)
    assert seen(model) == ({(F32, F32, F32)}, 3)
    assert callback.pins is None


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_stages_are_pinned(digits, tmp_path, stage):
    model, callback = Digits(), PinDtypeCallback("head", output="keep")
    getattr(trainer(tmp_path, callback), stage)(model, digits)
    assert seen(model) == ({(F32, F32, F32)}, 3)
    assert callback.pins is None
    assert unpin(model) == 0


@pytest.mark.parametrize("fail", [ZeroDivisionError("no"), KeyboardInterrupt()])
def test_an_exception_takes_the_pins_off(digits, tmp_path, fail):
    model, callback = Digits(fail=fail), PinDtypeCallback(class_patterns="Head|LayerNorm")
    was = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises((ZeroDivisionError, SystemExit)):  # Lightning exits on Ctrl-C
            trainer(tmp_path, callback).fit(model, digits)
    finally:
        signal.signal(signal.SIGINT, was)
    assert seen(model) == ({(F32, F32, F32)}, 1)
    assert callback.pins is None
    assert unpin(model) == 0


def test_layers_that_configure_model_makes_are_pinned(digits, tmp_path):
    model = Digits(late=True)
    trainer(tmp_path, PinDtypeCallback("head")).fit(model, digits)
    assert seen(model)[0] == {(F32, F32, F32)}


def test_stored_parameters_are_trained_in_float32(digits, tmp_path):
    callback = PinDtypeCallback("head", override_parameters=True)

    class Look(lightning.Callback):
        found = None

        def on_train_end(self, trainer, module):
            state = trainer.optimizers[0].state
            self.found = {
                name: (value.dtype, state[value]["exp_avg"].dtype)
                for name, value in module.named_parameters()
            }

    model, look = Digits(), Look()
    fit = trainer(tmp_path, callback, look, precision="bf16-true")
    with warnings.catch_warnings():
        warnings.simplefilter("error", PinWarning)
        fit.fit(model, digits, digits)
    assert "convert_module" not in vars(fit.precision_plugin)
    assert look.found["head.weight"] == (F32, F32)
    assert look.found["body.0.weight"] == (BF16, BF16)
    assert model.head.weight.dtype is BF16
    assert seen(model)[0] == {(F32, F32, F32)}


@pytest.mark.parametrize("both", [False, True], ids=["one", "two"])
@pytest.mark.parametrize("cast", [False, True], ids=["float32", "bfloat16"])
def test_bf16_true_leaves_stored_parameters_and_a_checkpoint_their_digits(
    digits, tmp_path, cast, both
):
    path = tmp_path / "a.ckpt"

    class Look(lightning.Callback):
        def on_train_start(self, trainer, module):
            self.start = {key: value.clone() for key, value in module.state_dict().items()}

        def on_train_epoch_end(self, trainer, module):
            trainer.save_checkpoint(path)

    def run(model, epochs=1, resume=None):
        look = Look()
        callbacks = [PinDtypeCallback("head", override_parameters=True), look]
        if both:
            callbacks.append(PinDtypeCallback("^body.1$", override_parameters=True))
        fit = trainer(tmp_path, *callbacks, precision="bf16-true", max_epochs=epochs)
        fit.fit(model, digits, ckpt_path=resume)
        assert "convert_module" not in vars(fit.precision_plugin)
        return look.start

    def make():
        return Digits().bfloat16() if cast else Digits()

    model = make()
    before = model.head.weight.detach().clone()
    start = run(model)
    assert torch.equal(start["head.weight"], before.float())  # to the bit
    assert model.head.weight.dtype is BF16  # as without the pin
    saved = torch.load(path, weights_only=False)["state_dict"]
    stored = {"head.weight", "head.bias"} | ({"body.1.weight", "body.1.bias"} if both else set())
    assert {key for key, value in saved.items() if value.dtype is F32} == stored
    assert not torch.equal(saved["head.weight"], saved["head.weight"].bfloat16().float())
    resumed = run(make(), 2, path)
    assert all(torch.equal(resumed[key], value) for key, value in saved.items())


def test_storing_what_configure_model_makes_is_refused_and_the_plugin_is_left_alone(
    digits, tmp_path
):
    callback = PinDtypeCallback("head", override_parameters=True)
    fit = trainer(tmp_path, callback)
    with pytest.raises(PinError, match="configure_model makes is not there yet"):
        fit.fit(Digits(late=True), digits)
    assert "convert_module" not in vars(fit.precision_plugin)

    class Fails(lightning.Callback):
        def setup(self, trainer, module, stage):
            assert "convert_module" in vars(trainer.precision_plugin)
            raise RuntimeError("out of luck")

    model = Digits()
    fit = trainer(tmp_path, callback, Fails())
    with pytest.raises(RuntimeError, match="out of luck"):
        fit.fit(model, digits)
    assert "convert_module" not in vars(fit.precision_plugin)
    assert unpin(model) == 0


@pytest.mark.parametrize("override", [False, True])
def test_a_checkpoint_of_a_pinned_fit_resumes_and_loads_unpinned(digits, tmp_path, override):
    def cast():
        return Digits().bfloat16()

    def make():
        return PinDtypeCallback("head", override_parameters=override)

    model = cast()
    first = trainer(tmp_path, make(), precision="32-true")
    first.fit(model, digits)
    assert seen(model)[0] == {(F32, F32, F32)}
    path = tmp_path / "a.ckpt"
    pinned = make()
    again = trainer(tmp_path, pinned, precision="32-true", max_epochs=2)

    class Save(lightning.Callback):
        def on_train_epoch_end(self, trainer, module):
            trainer.save_checkpoint(path)

    model = cast()
    trainer(tmp_path, make(), Save(), precision="32-true").fit(model, digits)
    saved = torch.load(path, weights_only=False)
    plain = cast()
    assert list(saved["state_dict"]) == list(plain.state_dict())
    stored = saved["state_dict"]["head.weight"]
    assert stored.dtype is (F32 if override else BF16)
    plain.load_state_dict(saved["state_dict"])
    assert torch.equal(plain.head.weight, stored.bfloat16())

    class Look(lightning.Callback):
        weight = None

        def on_train_start(self, trainer, module):
            self.weight = module.head.weight.detach().clone()
            self.dtype = trainer.optimizers[0].state[module.head.weight]["exp_avg"].dtype

    resumed, look = cast(), Look()
    again.callbacks.append(look)
    again.fit(resumed, digits, ckpt_path=path)
    assert again.current_epoch == 2
    assert torch.equal(look.weight, stored)  # to the bit
    assert look.dtype is stored.dtype
    assert seen(resumed) == ({(F32, F32, F32)}, 3)


def test_what_is_wrong_is_said_at_once_and_nothing_stays_pinned(digits, tmp_path):
    with pytest.raises(PinError, match="dtype"):
        PinDtypeCallback("head", dtype="float31")
    with pytest.raises(PinError, match="no pattern"):
        PinDtypeCallback()
    with pytest.raises(PinError, match="expected a bool"):
        PinDtypeCallback("head", override_parameters=1)
    model = Digits()
    for override in (False, True):
        callback = PinDtypeCallback("haed", override_parameters=override)
        with pytest.raises(PinError, match="near misses: 'head'"):
            trainer(tmp_path, callback).fit(model, digits)
        assert callback.pins is None
        assert unpin(model) == 0
    assert seen(model) == (set(), 0)


def test_two_callbacks_and_the_table(digits, tmp_path, caplog):
    caplog.set_level("INFO", logger="dtypepin")
    both = PinDtypeCallback("head", verbose=True), PinDtypeCallback(class_patterns="LayerNorm")
    model = Digits()
    trainer(tmp_path, *both).fit(model, digits)
    assert both[0].state_key != both[1].state_key
    assert "head  Head   forward  float32  as they are" in caplog.text
    assert unpin(model) == 0


def fresh_import(monkeypatch, **modules):
    """Import the adapter anew, with other frameworks than there are."""
    names = ("lightning", "lightning.pytorch", "pytorch_lightning")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name.replace("__", "."), module)
    monkeypatch.delitem(sys.modules, "dtypepin.trainers.lightning")
    return importlib.import_module("dtypepin.trainers.lightning")


def test_the_base_class_is_that_of_the_package_in_use(monkeypatch):
    old, new = ModuleType("pytorch_lightning"), ModuleType("lightning.pytorch")
    old.Callback, new.Callback = type("Callback", (), {}), type("Callback", (), {})
    with monkeypatch.context() as patch:
        ours = fresh_import(patch, pytorch_lightning=old)
        assert issubclass(ours.PinDtypeCallback, old.Callback)
    with monkeypatch.context() as patch:
        ours = fresh_import(patch, pytorch_lightning=old, lightning=new, lightning__pytorch=new)
        assert issubclass(ours.PinDtypeCallback, new.Callback)
    needs = pytest.raises(ImportError, match=r"pip install 'dtypepin\[lightning\]'")
    with monkeypatch.context() as patch, needs:
        fresh_import(patch, lightning=None, lightning__pytorch=None, pytorch_lightning=None)


@pytest.mark.parametrize("override", [False, True])
def test_a_tuner_runs_pinned(digits, tmp_path, override):
    from lightning.pytorch.callbacks import LearningRateFinder

    class Tuned(Digits):
        def __init__(self):
            super().__init__()
            self.lr = 1e-3

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), self.lr)

    model, callback = Tuned(), PinDtypeCallback("head", override_parameters=override)
    finder = LearningRateFinder(num_training_steps=3, update_attr=False)
    trainer(tmp_path, finder, callback).fit(model, digits)
    assert seen(model) == ({(F32, F32, F32)}, 6)
    assert unpin(model) == 0


@pytest.mark.parametrize("override", [False, True])
def test_a_trainer_inside_another_one_on_the_same_model(digits, tmp_path, override):
    callback, counts = PinDtypeCallback("head", override_parameters=override), []

    class Inner(lightning.Callback):
        def on_train_batch_start(self, outer, module, batch, number):
            if number == 1:
                trainer(tmp_path, callback).validate(module, digits, verbose=False)
                module.trainer = outer  # Lightning leaves the other one there

        def on_validation_end(self, outer, module):
            counts.append(len(callback._standing))

    model = Digits()
    trainer(tmp_path, callback, Inner(), max_epochs=3).fit(model, digits, digits)
    assert seen(model)[0] == {(F32, F32, F32)}
    assert set(counts) == {1}  # they do not pile up
    assert callback.pins is None
    assert unpin(model) == 0


def test_what_a_failed_stage_left_goes_with_the_next(digits, tmp_path):
    class Fails(lightning.Callback):
        def on_exception(self, trainer, module, exception):
            raise RuntimeError("again")

    model, callback = Digits(fail=ZeroDivisionError("no")), PinDtypeCallback("head")
    first = trainer(tmp_path, Fails(), callback)
    with pytest.raises(RuntimeError, match="again"):
        first.fit(model, digits)
    assert callback.pins is not None  # Lightning did not tell us
    model.fail = None
    trainer(tmp_path, callback).fit(model, digits)
    assert unpin(model) == 0


def test_digits_of_a_narrowed_layer_survive_a_stage_in_another_precision(digits, tmp_path):
    models = [Digits(), Digits()]
    models[1].load_state_dict(models[0].state_dict())
    callback = PinDtypeCallback("head", dtype="bf16", override_parameters=True)
    for model, callbacks in zip(models, ([callback], []), strict=True):
        trainer(tmp_path, *callbacks, precision="64-true").validate(model, digits, verbose=False)
    assert models[0].head.weight.dtype is torch.float64
    assert torch.equal(models[0].head.weight, models[1].head.weight)


@pytest.mark.parametrize("override", [False, True])
def test_a_trainer_inside_another_one(digits, tmp_path, override):
    callback, other = PinDtypeCallback("head", override_parameters=override), Digits()

    class Inner(lightning.Callback):
        def on_train_batch_start(self, outer, module, batch, number):
            if number == 1:
                trainer(tmp_path, callback).validate(other, digits, verbose=False)
                assert unpin(other) == 0
                assert callback.pins is not None

    model = Digits()
    trainer(tmp_path, callback, Inner()).fit(model, digits)
    assert seen(model) == seen(other) == ({(F32, F32, F32)}, 3)
    assert callback.pins is None
    assert unpin(model) == 0


def test_a_callback_that_has_pinned_can_be_pickled(digits, tmp_path):
    class Look(lightning.Callback):
        def on_train_start(self, trainer, module):
            copied = pickle.loads(pickle.dumps(callback))
            assert callback.pins is not None
            assert copied.pins is None
            assert copied.settings.dtype is F32

    callback = PinDtypeCallback("head")
    trainer(tmp_path, callback, Look()).fit(Digits(), digits)


def test_what_is_made_after_the_cast_is_pinned_too(digits, tmp_path):
    class Adds(lightning.Callback):
        def on_fit_start(self, trainer, module):
            module.body.add_module("head", Head(32, 32))

    model = Digits()
    trainer(tmp_path, Adds(), PinDtypeCallback("head$")).fit(model, digits)
    assert set(model.body.head.seen) == {(F32, F32, F32)}
    assert unpin(model) == 0


def test_the_validations_of_a_fit_do_not_pin_again(digits, tmp_path):
    callback = PinDtypeCallback(["head", "nothing like it"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(tmp_path, callback, max_epochs=4).fit(Digits(), digits, digits)
    ours = [found for found in caught if found.category is PinWarning]
    assert len(ours) == 2  # when the model was cast, and at the start
    assert {found.filename for found in ours} == {__file__}
