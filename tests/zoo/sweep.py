"""What is asked of every model: pins must hold in it, change nothing else, and come off again."""

from __future__ import annotations

import copy
import dataclasses
import random
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import dtypepin
from dtypepin._pin import hooks

#: What is pinned, as arguments of ``dtypepin.apply``: whatever is called after a norm, or after
#: attention, and in some models that is more than one layer, up to the whole model.
KINDS: dict[str, dict[str, Any]] = {
    "norms": {"class_patterns": r"[Nn]orm\w*$"},
    "attention": {"class_patterns": r"Att(entio)?n\w*$", "inputs": "all"},
}
#: How the model is run: stored in float32 under autocast, or stored in bf16 without it.
MODES = ("autocast", "bf16")

HONOURED = "honoured"
REFUSED = "refused"
FAILED = "failed"
NOTHING = "nothing to pin"
MODEL_FAILS = "model itself fails"

#: What dtypepin says where a pinned module got floating inputs that ``inputs="first"`` leaves.
ADVICE = 'inputs="all" would cast them too'

Built = tuple[nn.Module, dict[str, Any]]


@dataclass
class Outcome:
    """What one kind of pins came to in one mode of one model."""

    kind: str
    mode: str
    verdict: str
    detail: str = ""
    pins: int = 0
    never_ran: int = 0
    other_dtype: str = ""
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass
class Run:
    """What one forward and backward gave."""

    dtypes: dict[str, torch.dtype]
    values: dict[str, Tensor]
    grads: dict[str, Tensor]
    state: State


def sweep(build: Callable[[], Built]) -> Iterator[Outcome]:
    """All outcomes of one model."""
    seed()
    try:
        model, inputs = build()
    except Exception as error:
        for mode in MODES:
            for kind in KINDS:
                yield Outcome(kind, mode, MODEL_FAILS, f"not built: {brief(error)}")
        return
    model.train()
    for mode in MODES:
        yield from sweep_mode(model, inputs, mode)


def sweep_mode(model: nn.Module, inputs: dict[str, Any], mode: str) -> Iterator[Outcome]:
    """All outcomes of one model in one mode."""
    pristine = copy.deepcopy(model)
    if mode == "bf16":
        pristine = pristine.to(torch.bfloat16)
        inputs = map_floats(inputs, Tensor.bfloat16)
    try:
        unpinned = run(copy.deepcopy(pristine), inputs, mode)
    except Exception as error:
        for kind in KINDS:
            yield Outcome(kind, mode, MODEL_FAILS, brief(error))
        return
    for kind, arguments in KINDS.items():
        outcome = check(copy.deepcopy(pristine), inputs, mode, kind, arguments, unpinned)
        if outcome.problems and all(ADVICE in problem for problem in outcome.problems):
            # A norm of several inputs: dtypepin said what to do, and that has to be true.
            every = {**arguments, "inputs": "all"}
            again = check(copy.deepcopy(pristine), inputs, mode, kind, every, unpinned)
            if again.verdict == HONOURED:
                outcome.verdict = REFUSED
            else:
                outcome.detail += f"; and with inputs='all': {again.detail}"
        if outcome.verdict == FAILED and not reproducible(pristine, inputs, mode):
            outcome.verdict = MODEL_FAILS
            outcome.detail = f"its unpinned runs differ; {outcome.detail}"
        yield outcome


def reproducible(pristine: nn.Module, inputs: dict[str, Any], mode: str) -> bool:
    """Whether two unpinned runs of a model give the same bits."""
    one, two = (run(copy.deepcopy(pristine), inputs, mode) for _ in range(2))
    return not other_bits(one, two)


def check(
    model: nn.Module,
    inputs: dict[str, Any],
    mode: str,
    kind: str,
    arguments: dict[str, Any],
    unpinned: Run,
) -> Outcome:
    """Pin, run, judge, unpin, run again."""
    outcome = Outcome(kind, mode, HONOURED)
    before = state_of(model)
    try:
        pins = dtypepin.apply(model, **arguments)
    except dtypepin.PinError as error:
        outcome.verdict = NOTHING if "no module matched" in str(error) else REFUSED
        outcome.detail = str(error)
        problems = differences(before, before, state_of(model))
        if problems:
            outcome.verdict, outcome.detail = FAILED, f"refused, but changed: {problems}"
        return outcome
    outcome.pins = len(pins)
    problems = []
    seen: list[tuple[str, torch.dtype, torch.dtype, dict[str, torch.dtype]]] = []
    watching = watch(model, arguments, seen)
    try:
        with dtypepin.audit(model, without_pins=False) as report:
            pinned = run(model, inputs, mode)
    except Exception as error:
        problems.append(f"raised {brief(error)}")
        pinned = None
    finally:
        for handle in watching:
            handle.remove()
        pins.remove()
    if pinned is not None:
        problems += [
            f"{row.name} ({row.class_name}) {row.verdict}: {row.detail}"
            for row in report.pins
            if row.verdict == "partly"
        ]
        outcome.never_ran = sum(row.verdict == "never ran" for row in report.pins)
        outcome.remarks += sorted(
            {
                f"{row.name} ({row.class_name}) never ran: {row.detail}"
                for row in report.pins
                if row.verdict == "never ran" and "was not called" not in row.detail
            }
        )
        problems += wrong_outputs(seen)
        problems += compare_dtypes(unpinned, pinned, mode, outcome)
        if outcome.never_ran == outcome.pins and not problems:
            outcome.verdict, outcome.detail = NOTHING, "none of the pinned modules was called"
    problems += differences(before, unpinned.state, state_of(model))
    problems += not_exact(model, before, inputs, mode, unpinned)
    if problems:
        outcome.verdict, outcome.problems = FAILED, problems
        outcome.detail = "; ".join(problems)
    return outcome


def watch(model: nn.Module, arguments: dict[str, Any], seen: list[Any]) -> list[Any]:
    """Record, from outside the pins, which dtypes go into the pinned modules and come out."""
    handles = []
    for name, module in model.named_modules():
        if not any(True for _ in hooks.on(module)):
            continue

        every = arguments.get("inputs") == "all"
        first: list[torch.dtype | None] = []

        def before(
            module: nn.Module, args: Any, kwargs: Any, every: bool = every, first: Any = first
        ) -> None:
            inputs = leaves((args, kwargs)) if every else leaves(dict(enumerate(args)) | kwargs, 1)
            first.append(next((t.dtype for t in inputs.values() if t.is_floating_point()), None))

        def after(
            module: nn.Module, args: Any, output: Any, name: str = name, first: Any = first
        ) -> None:
            came = first.pop()
            found = {p: t.dtype for p, t in leaves(output).items() if t.is_floating_point()}
            if came is not None:
                seen.append((name, came, found))

        # Before the pin's own hook, and after it: both see the call from outside.
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(after))
    return handles


def wrong_outputs(seen: list[Any]) -> list[str]:
    """Pinned modules whose outputs do not have the dtype of their first floating input."""
    wrong = {}
    for name, first, found in seen:
        for path, dtype in found.items():
            if dtype is not first:
                wrong[f"{name} got {first} and gave {dtype} in output{path}"] = None
    return list(wrong)


def compare_dtypes(unpinned: Run, pinned: Run, mode: str, outcome: Outcome) -> list[str]:
    """Outputs and gradients that have another dtype, or are missing, with the pins."""
    problems = []
    if unpinned.dtypes.keys() != pinned.dtypes.keys():
        problems.append(f"other outputs: {unpinned.dtypes.keys() ^ pinned.dtypes.keys()}")
    for path, dtype in pinned.dtypes.items():
        want = unpinned.dtypes.get(path, dtype)
        if dtype is want:
            continue
        text = f"output{path} is {dtype}, unpinned {want}"
        # Autocast decides by the op which dtype comes out of a module; a pin hands out what came
        # in. That each pinned module does so has been checked, so a model's own output may differ.
        if mode == "autocast":
            outcome.other_dtype = text
        else:
            problems.append(text)
    missing = unpinned.grads.keys() ^ pinned.grads.keys()
    if missing:
        problems.append(f"gradients with pins alone or without alone: {sorted(missing)[:5]}")
    problems += [
        f"gradient of {name} is {grad.dtype}, unpinned {unpinned.grads[name].dtype}"
        for name, grad in pinned.grads.items()
        if name in unpinned.grads and grad.dtype is not unpinned.grads[name].dtype
    ][:5]
    return problems


def not_exact(
    model: nn.Module, before: State, inputs: dict[str, Any], mode: str, unpinned: Run
) -> list[str]:
    """Whether the model, with its buffers put back, runs to the very bits of one never pinned."""
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in before.bits and before.bits[name].shape == buffer.shape:
                buffer.copy_(before.bits[name])
    try:
        again = run(model, inputs, mode)
    except Exception as error:
        return [f"after unpinning: raised {brief(error)}"]
    return [f"after unpinning, other bits: {text}" for text in other_bits(unpinned, again)]


def other_bits(one: Run, two: Run) -> list[str]:
    """The first output and the first gradient that two runs do not have alike."""
    found = []
    for what, mine, theirs in (
        ("output", one.values, two.values),
        ("gradient of ", one.grads, two.grads),
    ):
        different = sorted(
            name
            for name in mine.keys() | theirs.keys()
            if name not in mine or name not in theirs or not same_bits(mine[name], theirs[name])
        )
        found += [f"{what}{different[0]} and {len(different) - 1} others"] if different else []
    return found


def run(model: nn.Module, inputs: dict[str, Any], mode: str) -> Run:
    """One forward and one backward, from one seed."""
    seed()
    on = torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else nullcontext()
    with on:
        output = model(**copy.deepcopy(inputs))
    found = leaves(output)
    loss = sum(
        torch.nan_to_num(value.float()).clamp(-10, 10).sin().sum()
        for value in found.values()
        if value.is_floating_point() and value.requires_grad
    )
    if not isinstance(loss, Tensor):
        raise ValueError("no output has a gradient")
    loss.backward()
    return Run(
        {path: value.dtype for path, value in found.items()},
        {path: value.detach() for path, value in found.items()},
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
        state_of(model),
    )


# The state of a model.


@dataclass
class State:
    """Everything about a model that a pin might leave changed."""

    objects: dict[str, int]
    dtypes: dict[str, torch.dtype]
    bits: dict[str, Tensor]
    views: dict[str, list[tuple[str, int]]]
    attributes: dict[str, list[str]]
    hooks: dict[str, tuple[int, ...]]
    keys: list[str]


def state_of(model: nn.Module) -> State:
    parameters = dict(model.named_parameters())
    tensors = parameters | dict(model.named_buffers())
    modules = dict(model.named_modules())
    return State(
        objects={n: id(t) for n, t in parameters.items()},
        dtypes={n: t.dtype for n, t in tensors.items()},
        bits={n: t.detach().clone() for n, t in tensors.items()},
        views={n: dicts_of(m) for n, m in modules.items()},
        attributes={n: sorted(vars(m)) for n, m in modules.items()},
        hooks={n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in modules.items()},
        keys=list(model.state_dict()),
    )


def dicts_of(module: nn.Module) -> list[tuple[str, int]]:
    """The very dicts of a module, which come back after a pin."""
    return [(type(values).__name__, id(values)) for values in (module._parameters, module._buffers)]


def differences(before: State, own: State, after: State) -> list[str]:
    """What is not as it was before, and not as the model itself leaves it after a run either."""
    problems = []
    for what in ("objects", "dtypes", "views", "attributes", "hooks"):
        old, ran, new = (getattr(state, what) for state in (before, own, after))
        changed = [n for n in old | new if new.get(n) != old.get(n) and new.get(n) != ran.get(n)]
        if what == "dtypes":
            # Caches that a forward makes anew in the dtype of what comes in.
            changed = [n for n in changed if old.get(n) == ran.get(n)]
        if changed:
            problems.append(f"{what} not as before: {changed[:5]}")
    parameters = [n for n in before.objects if not same_bits(before.bits[n], after.bits[n])]
    if parameters:
        problems.append(f"bits of parameters not as before: {parameters[:5]}")
    if before.keys != after.keys != own.keys:
        problems.append("state_dict has other keys")
    return problems


# Small things.


def seed() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def leaves(value: Any, depth: int = 20) -> dict[str, Tensor]:
    """All tensors in a nested value by their path; written apart from dtypepin's own walk."""
    if isinstance(value, Tensor):
        return {"": value}
    if depth == 0:
        return {}
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    else:
        return {}
    found = {}
    for key, item in items:
        for path, tensor in leaves(item, depth - 1).items():
            found[f"[{key!r}]{path}"] = tensor
    return found


def map_floats(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: map_floats(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_floats(item, function) for item in value)
    return value


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    if a.is_floating_point():
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a, b)


def brief(error: BaseException) -> str:
    """One line: the error, where it was raised, and what was noted on it."""
    text = str(error).strip().splitlines() or [""]
    last = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
    where = f" ({last.filename.rpartition('site-packages/')[2]}:{last.lineno})" if last else ""
    notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {text[0][:200]}{where}{notes}"


def main(names: list[str]) -> None:
    """Run some models by name and print what came of them: for finding a cause."""
    from catalogue import MODELS

    warnings.simplefilter("ignore")
    for name, model in MODELS.items():
        if not names or any(wanted in name for wanted in names):
            for outcome in sweep(model.build):
                print(name, outcome, flush=True)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
