"""Dtype names, and the walk through nested values."""

import dataclasses
import warnings
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
from torch import nn

import dtypepin
from dtypepin import PinError
from dtypepin._base.dtypes import resolve_dtype
from dtypepin._base.nested import map_tensors


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (torch.float16, torch.float16),
        (torch.float64, torch.float64),
        ("float16", torch.float16),
        ("fp16", torch.float16),
        ("half", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("BF16", torch.bfloat16),
        ("torch.bfloat16", torch.bfloat16),
        ("float", torch.float32),
        ("float32", torch.float32),
        ("fp32", torch.float32),
        ("float64", torch.float64),
        ("fp64", torch.float64),
        ("double", torch.float64),
    ],
)
def test_dtype_names(name, dtype):
    assert resolve_dtype(name) is dtype


@pytest.mark.parametrize("wrong", ["int8", "float8_e4m3fn", torch.int32, torch.complex64, None, 32])
def test_other_dtypes_are_refused_with_the_valid_ones(wrong):
    with pytest.raises(PinError, match="expected float16, bfloat16, float32 or float64"):
        dtypepin.apply(nn.LayerNorm(2), "", dtype=wrong)


class Ordered(OrderedDict):
    pass


class Items(list):
    pass


Pair = namedtuple("Pair", "x n")


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    n: int = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    x: torch.Tensor
    n: int = 3


class Triple(tuple):
    __slots__ = ()


@dataclasses.dataclass
class Late:
    x: torch.Tensor
    y: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        self.y = self.x + 1


def x():
    return torch.ones(2)


VALUES = {
    "dict": {"x": x(), "n": 1, "none": None},
    "defaultdict": defaultdict(list, x=x()),
    "ordered subclass": Ordered(a=x(), b=torch.ones(2, dtype=torch.int64)),
    "list": [x(), "s"],
    "list subclass": Items([x()]),
    "tuple": (x(), (x(), None)),
    "named tuple": Pair(x(), 2),
    "tuple subclass": Triple((x(), 1, None)),
    "frozen dataclass": Frozen(x()),
    "dataclass with slots": Slots(x()),
    "field without init": Late(x()),
    "packed": nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]),
    "struct sequence": torch.ones(2, 2).max(0),
    "nested": {"a": [(x(), {"b": Frozen(x())})]},
}


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif dataclasses.is_dataclass(value):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return []


@pytest.mark.parametrize("kind", VALUES)
def test_every_container_comes_back_as_what_it_was(kind):
    value = VALUES[kind]
    before = [leaf.dtype for leaf in leaves(value)]
    new = map_tensors(value, torch.Tensor.double)
    assert type(new) is type(value)
    for old, one in zip(leaves(value), leaves(new), strict=True):
        assert one.dtype is (torch.float64 if old.is_floating_point() else old.dtype)
        assert torch.equal(one, old.to(one.dtype))
    assert [leaf.dtype for leaf in leaves(value)] == before  # the caller's own is not touched
    if isinstance(value, dict):
        assert list(new) == list(value)
    if isinstance(value, defaultdict):
        assert new["missing"] == []


@pytest.mark.parametrize("kind", VALUES)
def test_the_same_object_comes_back_where_nothing_changes(kind):
    assert map_tensors(VALUES[kind], lambda tensor: tensor) is VALUES[kind]


def quantized():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates making them; models still hold them
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


class Unknown:
    def __init__(self):
        self.x = x()


@pytest.mark.parametrize(
    "value",
    [
        None,
        "text",
        3.0,
        x().numpy(),
        Unknown(),
        torch.ones(2, dtype=torch.bool),
        torch.ones(2, dtype=torch.int64),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2).to(torch.float8_e4m3fn),
        quantized(),
    ],
    ids=lambda value: str(getattr(value, "dtype", type(value).__name__)),
)
def test_everything_else_passes_through(value):  # I4, I5, P8
    assert map_tensors(value, torch.Tensor.double) is value
    assert map_tensors([value], torch.Tensor.double)[0] is value


def test_one_tensor_twice_stays_one_tensor():
    one = x()
    new = map_tensors({"a": one, "b": [one]}, torch.Tensor.double)
    assert new["a"] is new["b"][0]


@pytest.mark.parametrize("kind", [dict, list])
def test_a_container_that_holds_itself_ends(kind):
    value = {0: x()} if kind is dict else [x(), None]
    value[1] = value
    new = map_tensors(value, torch.Tensor.double)
    assert new[0].dtype is torch.float64
    assert new[1] is value  # the loop is not unrolled
    assert map_tensors(value, lambda tensor: tensor) is value


@pytest.mark.parametrize("kind", ["list", "dict", "dataclass"])
def test_what_a_subclass_carries_besides_comes_along(kind):
    value = {"list": Items([x()]), "dict": Ordered(x=x()), "dataclass": Late(x())}[kind]
    value.extra = "kept"
    new = map_tensors(value, torch.Tensor.double)
    assert new is not value
    assert new.extra == "kept"


def test_a_shared_container_is_walked_once_and_stays_shared():
    value = [torch.ones(1)]
    for _ in range(40):  # 2**40 paths
        value = [value, value]
    new = map_tensors(value, torch.Tensor.half)
    assert new[0] is new[1]
    while isinstance(new, list):
        new = new[0]
    assert new.dtype is torch.half


def test_a_dataclass_with_slots_that_is_a_dict_is_copied():
    @dataclasses.dataclass(slots=True)
    class Out(dict):
        extra: int = 3

    out = Out()
    out["a"] = torch.ones(1)
    new = map_tensors(out, torch.Tensor.bfloat16)
    assert type(new) is Out
    assert (new["a"].dtype, new.extra) == (torch.bfloat16, 3)
    assert out["a"].dtype is torch.float32
