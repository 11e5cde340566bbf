"""Any pins on any model, put on and taken off in any order, leave a model never touched."""

import copy
import warnings

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import dtypepin
from dtypepin import PinError

WIDTH = 4
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


class Part(nn.Module):
    """Buffers of all kinds, a parameter, a method, children called in order."""

    def __init__(self, children, own, dtype):
        super().__init__()
        self.parts = nn.ModuleList(children)
        if own:
            self.scale = nn.Parameter(torch.rand(WIDTH))
            self.register_buffer("shift", torch.rand(WIDTH))
            self.register_buffer("count", torch.tensor(3))
        self.to(dtype)

    def forward(self, x):
        for part in self.parts:
            x = part(x.to(self.dtype_of(part, x)))
        if "scale" in self._parameters:
            x = x * self.scale + self.shift
        return x

    @staticmethod
    def dtype_of(part, x):
        """A model whose parts fit together in whatever dtype they read as."""
        weight = getattr(part, "weight", None)
        return x.dtype if weight is None else weight.dtype

    def encode(self, x):
        return self(x)


@st.composite
def models(draw):
    leaves = []

    def build(depth):
        if leaves and draw(st.integers(0, 4)) == 0:
            return draw(st.sampled_from(leaves))  # a shared module
        dtype = draw(st.sampled_from(DTYPES))
        kind = draw(st.sampled_from(["linear", "norm", "batch", "act", "part"]))
        if kind == "part" and depth:
            children = [build(depth - 1) for _ in range(draw(st.integers(0, 3)))]
            return Part(children, draw(st.booleans()), dtype)
        leaf = {
            "linear": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
            "norm": lambda: nn.LayerNorm(WIDTH),
            "batch": lambda: nn.BatchNorm1d(WIDTH, affine=draw(st.booleans())),
        }.get(kind, nn.Tanh)()
        leaf.to(dtype)
        linears = [other for other in leaves if isinstance(other, nn.Linear)]
        if kind == "linear" and linears and draw(st.booleans()):
            leaf.weight = draw(st.sampled_from(linears)).weight  # a tie
        leaves.append(leaf)
        return leaf

    children = [build(2) for _ in range(draw(st.integers(1, 4)))]
    return Part(children, draw(st.booleans()), torch.float32).eval()


RULES = st.fixed_dictionaries(
    {
        "patterns": st.sampled_from(["", "0", "1", r"parts\.\d$", "^$", "2|0", "nothing", "("]),
        "class_patterns": st.sampled_from([None, "Linear", "Norm", "Part"]),
        "dtype": st.sampled_from(DTYPES),
        "override_parameters": st.booleans(),
        "methods_to_override": st.sampled_from(["forward", ["forward", "encode"], "encode"]),
        "inputs": st.sampled_from(["first", "all"]),
        "output": st.sampled_from(["restore", "keep", torch.float64]),
    }
)


def bits(value):
    return value.detach().clone().reshape(-1).view(torch.uint8).tolist()


def picture(model):
    parts = {}
    for name, part in model.named_modules():
        hooks = {k: len(v) for k, v in part.__dict__.items() if k.endswith(("hooks", "kwargs"))}
        kinds = {k: type(v) for k, v in part.__dict__.items()}
        parts[name] = (kinds, hooks)
    state = {k: (v.dtype, bits(v)) for k, v in model.state_dict().items()}
    ids = [id(p) for p in model.parameters()]
    return parts, state, ids


def output(model, x):
    try:
        return bits(model(x))
    except RuntimeError as error:  # the parts of a random model need not fit together
        return str(error)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(models(), st.lists(RULES, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_pins_on_and_off_leave_a_model_never_touched(model, rules, random):
    never = copy.deepcopy(model)
    x = torch.ones(3, WIDTH)
    before = picture(model)
    standing = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dead patterns
        for rule in rules:
            so_far = picture(model)
            try:
                standing.append(dtypepin.apply(model, **rule))
            except PinError:
                assert picture(model) == so_far
            output(model, x)
            if standing and random.randrange(5) < 2:
                standing.pop(random.randrange(len(standing))).remove()
    twin = copy.deepcopy(model)
    random.shuffle(standing)
    for pins in standing:
        pins.remove()
    assert picture(model) == before
    assert output(model, x) == output(never, x)
    dtypepin.unpin(twin)
    assert picture(twin)[:2] == before[:2]
    assert output(twin, x) == output(never, x)
