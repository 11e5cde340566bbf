"""Which modules a pin means. S1 to S7 of the cases, names, near misses."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import dtypepin
from dtypepin import PinError, PinWarning
from dtypepin._base.selection import class_name, named


def model(**children):
    found = nn.Module()
    for name, child in children.items():
        found.add_module(name, child)
    return found


def names(module, *args, **kwargs):
    return dtypepin.select(module, *args, **kwargs).names


def test_a_pattern_is_searched_and_select_shows_it_first():  # S1
    t5 = model(wo=nn.Linear(2, 2), word_embedding=nn.Embedding(2, 2))
    assert names(t5, "wo") == ["wo", "word_embedding"]
    assert names(t5, r"\bwo\b") == names(t5, r"(^|\.)wo$") == ["wo"]
    assert not t5.wo._forward_hooks


def test_no_match_at_all_is_an_error_with_near_misses():  # S2
    llama = model(input_layernorm=nn.LayerNorm(2), post_attention_layernorm=nn.LayerNorm(2))
    with pytest.raises(PinError) as error:
        dtypepin.apply(llama, "layer_norm")
    for part in ("'layer_norm'", "'input_layernorm'", "'post_attention_layernorm'"):
        assert part in str(error.value)
    assert not llama.input_layernorm._forward_hooks


def test_a_dead_pattern_among_others_warns_once_at_the_users_line():  # S2
    llama = model(norm=nn.LayerNorm(2), head=nn.Linear(2, 2))
    with pytest.warns(PinWarning) as caught:
        pins = dtypepin.apply(llama, ["norm", "haed"])  # the line that the warning names
    assert len(caught) == 1
    assert "'haed'" in str(caught[0].message)
    assert "'head'" in str(caught[0].message)
    assert caught[0].filename == __file__
    with open(__file__) as file:
        assert "the line that the warning names" in file.readlines()[caught[0].lineno - 1]
    assert len(pins) == 1


@pytest.mark.parametrize(
    ("arguments", "exists", "use"),
    [
        ({"patterns": "LayerNorm"}, "a class 'LayerNorm' exists", "class_patterns='LayerNorm'"),
        ({"class_patterns": "ln_f"}, "a module name 'ln_f' exists", "patterns='ln_f'"),
    ],
)
def test_a_crossed_argument_is_explained(arguments, exists, use):  # S3
    with pytest.raises(PinError, match=exists) as error:
        dtypepin.apply(model(ln_f=nn.LayerNorm(2)), **arguments)
    assert use in str(error.value)


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_data_parallel_in_processes_is_no_part_of_a_name(one_process):  # S4
    norm = nn.LayerNorm(2)
    both = torch.compile(nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), norm)))
    with dtypepin.apply(both, "^1$") as pins:
        assert [(pin.name, pin.module) for pin in pins] == [("1", norm)]
    assert not norm._forward_hooks


def wrappers():
    plain = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    yield "plain", plain, plain[1]
    yield "compiled", torch.compile(plain), plain[1]
    yield "data parallel", nn.DataParallel(plain), plain[1]
    yield "averaged", (ema := torch.optim.swa_utils.AveragedModel(plain)), ema.module[1]
    norm = nn.LayerNorm(2)
    sharded = model(_fsdp_wrapped_module=nn.Sequential(nn.Linear(2, 2), norm))
    yield "sharded", sharded, norm
    yield "checkpoint", nn.Sequential(nn.Linear(2, 2), checkpoint_wrapper(norm)), norm
    yield "both", torch.compile(nn.Sequential(nn.Linear(2, 2), checkpoint_wrapper(norm))), norm


@pytest.mark.parametrize(("kind", "wrapped", "norm"), list(wrappers()))
def test_wrappers_are_no_part_of_a_name(kind, wrapped, norm):  # S4
    with dtypepin.apply(wrapped, "^1$") as pins:
        assert [(pin.name, pin.module) for pin in pins] == [("1", norm)]
    assert not norm._forward_hooks


@pytest.mark.parametrize(("kind", "wrapped", "norm"), list(wrappers()))
def test_only_what_is_wrapped_is_listed(kind, wrapped, norm):  # S4
    assert [found.names for found in named(wrapped)] == [("",), ("0",), ("1",)]


def test_a_users_own_child_called_module_keeps_its_name():  # S4
    assert names(model(module=model(norm=nn.LayerNorm(2))), r"^module\.norm$") == ["module.norm"]


def test_a_shared_module_is_pinned_once_under_all_its_names():  # S5
    norm = nn.LayerNorm(2)
    shared = model(a=norm, b=norm)
    pins = dtypepin.apply(shared, "^b$")
    assert len(pins) == len(norm._forward_hooks) == 1
    assert pins[0].names == ("a", "b")
    assert "aliases" in str(pins)
    pins.remove()
    assert not norm._forward_hooks


def test_names_of_a_shared_parents_children():  # S5
    block = model(norm=nn.LayerNorm(2))
    assert names(model(a=block, b=block), r"^b\.norm$") == ["a.norm", "b.norm"]


def test_a_cycle_of_modules_ends():  # S5
    parent, child = nn.Module(), nn.LayerNorm(2)
    parent.child = child
    child.parent = parent
    assert names(parent, "child") == ["child"]


def test_nested_sharing_does_not_explode():
    inner = nn.Linear(2, 2)
    for _ in range(30):  # 2 ** 30 names
        inner = nn.Sequential(inner, inner)
    assert len(named(inner)) == 31


def test_a_str_is_one_pattern_and_compiled_ones_are_welcome():  # S6
    m = model(norm=nn.LayerNorm(2), o=nn.Linear(2, 2))
    assert names(m, "norm") == ["norm"]
    assert names(m, re.compile("NORM", re.IGNORECASE)) == ["norm"]
    assert names(m, ("norm", re.compile("^o$"))) == ["norm", "o"]


@pytest.mark.parametrize("argument", ["patterns", "class_patterns"])
@pytest.mark.parametrize("wrong", ["(", ["norm", "("]])
def test_a_broken_regex_is_quoted(argument, wrong):  # S6
    with pytest.raises(PinError, match=rf"{argument}: '\(' is not a regular expression"):
        dtypepin.apply(model(norm=nn.LayerNorm(2)), **{argument: wrong})


@pytest.mark.parametrize("wrong", [3, [3], b"norm", [re.compile(b"norm")]])
def test_what_is_no_pattern_is_refused(wrong):
    with pytest.raises(PinError, match="expected a regular expression"):
        dtypepin.apply(model(norm=nn.LayerNorm(2)), wrong)


@pytest.mark.parametrize("nothing", [{}, {"patterns": []}, {"class_patterns": ()}])
def test_no_pattern_is_refused(nothing):
    with pytest.raises(PinError, match="got no pattern"):
        dtypepin.apply(model(norm=nn.LayerNorm(2)), **nothing)


def test_what_is_no_module_is_refused():
    with pytest.raises(PinError, match="model: got list, expected a torch"):
        dtypepin.apply([nn.LayerNorm(2)], "0")


def test_the_root_itself_is_pinned():  # S7
    norm = nn.LayerNorm(2)
    with dtypepin.apply(norm, class_patterns="LayerNorm") as pins:
        assert pins[0].module is norm
        assert str(pins).splitlines()[1].startswith("(root)")


def test_patterns_and_class_patterns_add_up():
    m = model(norm=nn.LayerNorm(2), head=nn.Linear(2, 2), body=nn.Linear(2, 2))
    assert names(m, "head", "LayerNorm") == ["norm", "head"]


def test_the_class_name_is_the_users_own():
    weighted = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert type(weighted).__name__ == "ParametrizedLinear"
    assert class_name(weighted) == "Linear"


def test_select_changes_nothing():
    m = nn.Sequential(nn.LayerNorm(2)).bfloat16()
    before = {name: dict(part.__dict__) for name, part in m.named_modules()}
    found = dtypepin.select(m, "0", override_parameters=True)
    assert found[0].parameters == "stored"
    assert {name: dict(part.__dict__) for name, part in m.named_modules()} == before
    assert m[0].weight.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"class_patterns": nn.LayerNorm}, "class_patterns='LayerNorm'"),
        ({"patterns": "*.norm"}, r"a glob's '\*' is '\.\*' in a regex"),
        ({"patterns": r"^_orig_mod\.1$"}, "without the prefix '_orig_mod' of wrappers"),
        ({"patterns": "module.1"}, "without the prefix 'module' of wrappers"),
        ({"patterns": "head"}, r"the root alone, whose name is '' \(pattern '\^\$'\)"),
    ],
)
def test_an_error_says_what_was_meant(arguments, hint):
    alone = arguments.get("patterns") == "head"
    model = nn.Linear(2, 2) if alone else nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    with pytest.raises(PinError, match=hint):
        dtypepin.apply(model, **arguments)
