"""What a pinned forward writes to buffers arrives, however its regions nest."""

import pytest
import torch
from torch import Tensor, nn

import dtypepin
from helpers import fullgraph

BF16 = torch.bfloat16
BACKENDS = [None, pytest.param("aot_eager", marks=fullgraph)]


class Counter(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x * 2


class Assigns(Counter):
    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x * 2


class CountsThenRecurs(Counter):
    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        self.count += 1
        return self(x, depth - 1) if depth else x


class RecursThenCounts(Counter):
    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        if depth:
            x = self(x, depth - 1)
        self.count += 1
        return x


class WritesToItsChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = Counter()

    def forward(self, x: Tensor) -> Tensor:
        self.child.count.add_(10)
        x = self.child(x)
        self.child.count.mul_(2)
        x = self.child(x)
        self.child.count.add_(0.5)
        return x


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Counter(), Counter()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def make(kind: type[nn.Module]) -> nn.Module:
    model = kind().to(BF16)
    if isinstance(model, Tied):
        model.b.count = model.a.count
    return model


def run(model: nn.Module, backend: str | None) -> list[list[float]]:
    torch.compiler.reset()
    call = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    with torch.no_grad():
        for _ in range(2):
            call(torch.ones(2, dtype=BF16))
    assert all(buffer.dtype is BF16 for buffer in model.buffers())
    return [buffer.tolist() for buffer in model.buffers()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pins", [[("", "float32")], [("^$", "float32")], [("^$", "float64")]])
@pytest.mark.parametrize(
    "kind",
    [Counter, Assigns, CountsThenRecurs, RecursThenCounts, WritesToItsChild, Tied],
)
def test_buffers_hold_what_they_hold_unpinned(kind, pins, backend):
    model = make(kind)
    for pattern, dtype in pins:
        dtypepin.apply(model, pattern, dtype=dtype)
    assert run(model, backend) == run(make(kind), None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inner", ["bfloat16", "float64"])
def test_an_inner_pin_of_another_dtype_writes_to_the_same_buffer(inner, backend):
    model = make(WritesToItsChild)
    dtypepin.apply(model, "^$")
    dtypepin.apply(model, "^child$", dtype=inner)
    assert run(model, backend) == run(make(WritesToItsChild), None)


@pytest.mark.parametrize("how", ["torch.compile", "compile", "child.compile"])
@pytest.mark.parametrize("kind", [Counter, Assigns])
def test_a_pinned_forward_that_is_compiled_as_a_frame_of_its_own(kind, how):
    torch.compiler.reset()
    model = nn.Sequential(make(kind))
    dtypepin.apply(model, "^0$")
    call = model
    if how == "torch.compile":
        call = torch.compile(model[0], backend="aot_eager")
    else:
        (model if how == "compile" else model[0]).compile(backend="aot_eager")
    with torch.no_grad():
        for _ in range(3):
            call(torch.ones(2, dtype=BF16))
    assert model[0].count.tolist() == [3, 3]


def test_gradients_go_through_what_was_written():
    class Remembers(nn.Module):
        memory: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("memory", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.memory.copy_(self.weight * x)
            return x * self.weight

    grads = []
    for pin in (False, True):
        model = Remembers().to(BF16)
        if pin:
            dtypepin.apply(model, "^$")
        out = model(torch.ones(2, dtype=BF16))
        (out.sum() + 3 * model.memory.sum()).backward()
        grads.append(model.weight.grad.tolist())
    assert grads == [[4, 4], [4, 4]]


def test_a_buffer_that_is_resized_in_a_forward():
    class Grows(Counter):
        def forward(self, x: Tensor) -> Tensor:
            self.count.resize_(4).fill_(1)
            return x

    model = Grows().to(BF16)
    buffer = model.count
    dtypepin.apply(model, "^$")
    model(torch.ones(2, dtype=BF16))
    assert model.count is buffer
    assert buffer.dtype is BF16
    assert buffer.tolist() == [1, 1, 1, 1]
