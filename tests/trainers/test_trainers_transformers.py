"""The callback of Hugging Face's Trainer, and Accelerate, in real trainings."""

import importlib
import pickle
import sys
import warnings

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import dtypepin
from digits import Head
from dtypepin import PinError, unpin

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a framework imports is its own affair
    transformers = pytest.importorskip("transformers", minversion="5")
    accelerate = pytest.importorskip("accelerate")
    from dtypepin.trainers.transformers import PinDtypeCallback

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.filterwarnings("ignore:::transformers", "ignore:::accelerate"),
    pytest.mark.filterwarnings("ignore:::torch.utils.data", "ignore:::torch.optim"),
]
BF16, F32 = torch.bfloat16, torch.float32


class Digits(nn.Module):
    def __init__(self, fail=None):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU())
        self.head = Head(32, 10)
        self.fail, self.steps = fail, 0

    def forward(self, x, labels=None):
        self.steps += 1
        if self.fail is not None and self.steps == 2:
            raise self.fail
        logits = self.head(self.body(x.to(self.body[0].weight.dtype))).float()
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    rows = zip(torch.tensor(x[:96] / 16, dtype=F32), y[:96].tolist(), strict=True)
    return [{"x": pixels, "labels": label} for pixels, label in rows]


def trainer(model, digits, tmp_path, *callbacks, **more):
    settings = {"bf16": True, "num_train_epochs": 1, "save_strategy": "no", **more}
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=32,
        **settings,
    )
    return transformers.Trainer(
        model, arguments, train_dataset=digits, eval_dataset=digits, callbacks=list(callbacks)
    )


def seen(model):
    found = model.head.__dict__.pop("seen", [])
    return set(found), len(found)


def test_a_training_is_pinned_and_nothing_is_left(digits, tmp_path):
    model, callback = Digits(), PinDtypeCallback("head")
    train = trainer(model, digits, tmp_path, callback)
    train.train()
    assert seen(model) == ({(F32, F32, F32)}, 3)
    assert callback.pins == []
    assert unpin(model) == 0
    train.evaluate()  # after the training, outside of a block
    assert seen(model)[0] == {(BF16, F32, BF16)}
    with callback:
        train.train()
        train.evaluate()
    assert seen(model) == ({(F32, F32, F32)}, 6)
    assert callback.pins == []
    assert unpin(model) == 0


@pytest.mark.parametrize("fail", [ZeroDivisionError("no"), KeyboardInterrupt()])
def test_an_exception_ends_the_pins_of_a_block(digits, tmp_path, fail):
    model, callback = Digits(fail=fail), PinDtypeCallback(class_patterns="Head|LayerNorm")
    train = trainer(model, digits, tmp_path, callback)
    with pytest.raises(type(fail)), callback:
        train.train()
    assert seen(model) == ({(F32, F32, F32)}, 1)
    assert callback.pins == []
    assert unpin(model) == 0


def test_without_a_block_the_next_training_or_remove_ends_what_an_exception_left(digits, tmp_path):
    model, callback = Digits(fail=ZeroDivisionError("no")), PinDtypeCallback("head")
    train = trainer(model, digits, tmp_path, callback)
    with pytest.raises(ZeroDivisionError):
        train.train()
    assert len(callback.pins) == 1
    train.train()
    assert callback.pins == []
    assert unpin(model) == 0
    model.fail, model.steps = ZeroDivisionError("no"), 0
    with pytest.raises(ZeroDivisionError):
        train.train()
    callback.remove()
    callback.remove()
    assert unpin(model) == 0


@pytest.mark.parametrize("override", [False, True])
def test_a_checkpoint_of_a_pinned_training_resumes_and_loads_unpinned(digits, tmp_path, override):
    def make(epochs):
        model = Digits().bfloat16()
        callback = PinDtypeCallback("head", override_parameters=override)
        train = trainer(
            model,
            digits,
            tmp_path,
            callback,
            save_strategy="epoch",
            bf16=False,
            num_train_epochs=epochs,
        )
        return model, callback, train

    model, callback, train = make(1)
    with callback:
        train.train()
        trained = model.head.weight.detach().clone()
    assert trained.dtype is (F32 if override else BF16)
    assert model.head.weight.dtype is BF16
    assert seen(model)[0] == {(F32, F32, F32)}
    (path,) = tmp_path.glob("checkpoint-*")
    plain = Digits().bfloat16()
    (file,) = [f for f in path.iterdir() if f.name in ("model.safetensors", "pytorch_model.bin")]
    if file.suffix == ".bin":
        state = torch.load(file)
    else:
        state = importlib.import_module("safetensors.torch").load_file(file)
    assert sorted(state) == sorted(plain.state_dict())
    assert torch.equal(state["head.weight"], trained)
    plain.load_state_dict(state)
    assert torch.equal(plain.head.weight, trained.bfloat16())

    class Look(transformers.TrainerCallback):
        weight = None

        def on_step_begin(self, args, state, control, model, optimizer, **kwargs):
            if self.weight is None:
                self.weight = model.head.weight.detach().clone()
                moments = optimizer.state[model.head.weight]["exp_avg"]
                self.dtype = moments.dtype

    look = Look()
    model, callback, train = make(2)
    train.add_callback(look)
    with callback:
        train.train(resume_from_checkpoint=str(path))
    assert torch.equal(look.weight, trained)  # to the bit
    assert look.dtype is trained.dtype
    assert seen(model) == ({(F32, F32, F32)}, 3)
    assert unpin(model) == 0


def test_storing_parameters_of_a_resumed_training_needs_the_block(digits, tmp_path):
    first = trainer(Digits(), digits, tmp_path, save_strategy="epoch", bf16=False)
    first.train()
    (path,) = tmp_path.glob("checkpoint-*")
    callback = PinDtypeCallback("head", dtype="float64", override_parameters=True)
    model = Digits()
    train = trainer(model, digits, tmp_path, callback, num_train_epochs=2)
    with pytest.raises(PinError, match=r"with callback: trainer\.train"):
        train.train(resume_from_checkpoint=str(path))
    assert unpin(model) == 0
    assert model.head.weight.dtype is F32


def test_a_model_from_model_init_is_pinned(digits, tmp_path):
    callback = PinDtypeCallback("head")
    arguments = trainer(Digits(), digits, tmp_path).args
    models = []

    def make():
        models.append(Digits())
        return models[-1]

    train = transformers.Trainer(
        args=arguments, train_dataset=digits, model_init=make, callbacks=[callback]
    )
    train.train()
    with callback:
        train.train()
    assert seen(models[-1]) == ({(F32, F32, F32)}, 3)
    assert all(unpin(model) == 0 for model in models)


def test_what_is_wrong_is_said_at_once_and_nothing_stays_pinned(digits, tmp_path, monkeypatch):
    with pytest.raises(PinError, match="dtype"):
        PinDtypeCallback("head", dtype="float31")
    with pytest.raises(PinError, match="no pattern"):
        PinDtypeCallback()
    with (
        pytest.raises(PinError, match="expected a Trainer that was made with callbacks="),
        PinDtypeCallback("head"),
    ):
        pass
    model, callback = Digits(), PinDtypeCallback("haed")
    train = trainer(model, digits, tmp_path, callback)
    with pytest.raises(PinError, match="near misses: 'head'"):
        train.train()
    with pytest.raises(PinError, match="near misses: 'head'"), callback:
        pass
    assert callback.pins == []
    assert unpin(model) == 0
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "dtypepin.trainers.transformers")
    with pytest.raises(ImportError, match=r"pip install 'dtypepin\[transformers\]'"):
        importlib.import_module("dtypepin.trainers.transformers")


# Accelerate needs no adapter.


@pytest.mark.parametrize("first", ["pin", "prepare"])
@pytest.mark.parametrize("override", [False, True])
def test_accelerate_with_bf16(digits, tmp_path, first, override):
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model = Digits()
    arguments = {"dtype": "float64" if override else "float32", "override_parameters": override}
    want = torch.float64 if override else F32

    def prepare():
        optimizer = torch.optim.Adam(model.parameters())
        return accelerator.prepare(model, optimizer)

    if first == "pin":
        pins = dtypepin.apply(model, "head", **arguments)
        prepared, optimizer = prepare()
    else:
        prepared, optimizer = prepare()
        pins = dtypepin.apply(prepared, "head", **arguments)
    batches = [torch.utils.data.default_collate(digits[i : i + 32]) for i in (0, 32, 64)]
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(prepared(**batch)["loss"])
        optimizer.step()
    assert seen(model) == ({(want, want, want)}, 3)
    accelerator.save_state(str(tmp_path))
    trained = model.head.weight.detach().clone()
    assert trained.dtype is (want if override else F32)
    with torch.no_grad():
        model.head.weight.zero_()
    accelerator.load_state(str(tmp_path))
    assert torch.equal(model.head.weight, trained)
    assert sorted(accelerator.get_state_dict(prepared)) == sorted(Digits().state_dict())
    pins.remove()
    assert model.head.weight.dtype is F32
    prepared(**batches[0])
    assert seen(model)[0] == {(BF16, F32, BF16)}
    Digits().load_state_dict(model.state_dict())


def test_a_callback_of_two_trainers_pins_both_models(digits, tmp_path):
    callback, models = PinDtypeCallback("head"), [Digits(), Digits()]
    trainers = [trainer(model, digits, tmp_path, callback) for model in models]
    with callback:
        for one in trainers:
            one.evaluate()
    for model in models:
        assert {dtype for dtypes in seen(model)[0] for dtype in dtypes} == {F32}
        assert unpin(model) == 0
    assert callback.pins == []
    broken = nn.Linear(2, 2)
    callback.on_init_end(None, None, None, model=broken)
    with pytest.raises(PinError, match="no module matched"), callback:
        pass
    assert callback.pins == []
    assert unpin(models[0]) == 0
    callback.on_init_end(None, None, None, model=models[0])  # the one that is broken is older now
    with pytest.warns(dtypepin.PinWarning, match="older Trainer's Linear is not pinned"), callback:
        assert len(callback.pins) == 3


def test_a_second_training_stores_parameters_again(digits, tmp_path):
    model, callback = Digits().bfloat16(), PinDtypeCallback("head", override_parameters=True)
    train = trainer(model, digits, tmp_path, callback, bf16=False)
    train.train()
    train.train()
    assert seen(model) == ({(F32, F32, F32)}, 6)
    assert model.head.weight.dtype is BF16


def test_a_training_inside_another_one(digits, tmp_path):
    callback, models = PinDtypeCallback("head"), [Digits(), Digits()]

    class Inner(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                trainer(models[1], digits, tmp_path, callback).train()
                assert unpin(models[1]) == 0
                copied = pickle.loads(pickle.dumps(callback))
                assert (len(callback.pins), len(copied.pins)) == (1, 0)

    trainer(models[0], digits, tmp_path, callback, Inner()).train()
    for model in models:
        assert seen(model) == ({(F32, F32, F32)}, 3)
    assert callback.pins == []
    assert unpin(models[0]) == 0
