"""What a pinned call costs, against the same module bare, by hand, wrapped and in diffusers.

Ratios of medians of CPU time, of interleaved runs in one process::

    python benchmarks/hooks.py            # about five minutes
    python benchmarks/hooks.py --quick    # about a minute, rougher
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.util import find_spec

import measure
import torch
from torch import Tensor, nn

import dtypepin

SHAPES = [(8,), (4, 128, 768), (16, 512, 1024)]


class ByHand(nn.Module):
    """What people write into their models."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return self.inner(x.float()).to(x.dtype)


class ByHandCasting(nn.Module):
    """The same for a module whose parameters are stored in low precision."""

    def __init__(self, inner: nn.LayerNorm | nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        inner, call = self.inner, nn.functional
        weight, bias = inner.weight.float(), inner.bias.float()
        with torch.autocast(x.device.type, enabled=False):
            if isinstance(inner, nn.Linear):
                return call.linear(x.float(), weight, bias).to(x.dtype)
            shape = inner.normalized_shape
            return call.layer_norm(x.float(), shape, weight, bias, inner.eps).to(x.dtype)


def wrapped(module: nn.Module) -> nn.Module:
    """A replaced ``forward`` that casts and leaves autocast as it is."""
    inner = module.forward

    def forward(x: Tensor) -> Tensor:
        return inner(x.to(torch.float32)).to(x.dtype)

    module.forward = forward
    return module


def pinned(module: nn.Module) -> nn.Module:
    """The product."""
    dtypepin.apply(module, "")
    return module


def stored(module: nn.Module) -> nn.Module:
    """The product, with parameters stored in float32."""
    dtypepin.apply(module, "", override_parameters=True)
    return module


def layerwise(module: nn.Module) -> nn.Module:
    """Casting by diffusers: parameters for the call; it casts no input, so the wrapper does."""
    from diffusers.hooks import apply_layerwise_casting

    kept = next(module.parameters()).dtype
    apply_layerwise_casting(module, kept, torch.float32, skip_modules_pattern=None)
    return wrapped(module)


def plain(kind: str, width: int) -> nn.LayerNorm | nn.Linear:
    """A bare module."""
    return nn.LayerNorm(width) if kind == "LayerNorm" else nn.Linear(width, width)


def timed(
    module: nn.Module,
    ways: dict[str, Callable[[nn.Module], nn.Module]],
    x: Tensor,
    autocast: bool,
    grad: bool,
    seconds: float,
) -> measure.Times:
    """Forward in all ways, in turns. All but the bare one must give the very same bits."""
    modules = {name: way(copy.deepcopy(module)) for name, way in ways.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.set_grad_enabled(grad):
        for name in ("pinned", "stored"):
            if name in modules:
                assert torch.equal(modules[name](x), modules["by hand"](x)), name
        calls = {name: (lambda m=m: m(x)) for name, m in modules.items()}
        return measure.interleaved(calls, seconds)


def run(report: measure.Report, quick: bool) -> None:
    """(a) A call."""
    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "bare": lambda module: module,
        "pinned": pinned,
        "by hand": ByHand,
        "by hand again": ByHand,
        "wrapper": wrapped,
    }
    if find_spec("diffusers"):
        ways["diffusers"] = layerwise
    rows = []
    for kind in ("LayerNorm", "Linear"):
        for shape in SHAPES[: 2 if quick else 3]:
            for autocast in (False, True):
                for grad in (False, True):
                    x = torch.randn(shape, dtype=torch.bfloat16 if autocast else torch.float32)
                    seconds = 1 if quick else 6
                    module = plain(kind, shape[-1])
                    times = timed(module, ways, x, autocast, grad, seconds)
                    name = "x".join(map(str, shape))
                    hand = measure.ratio(times, "pinned", "by hand")
                    patch = measure.ratio(times, "pinned", "wrapper")
                    where = f"{kind} {name}, autocast {'on' if autocast else 'off'}, grad {grad}"
                    report.target(f"pinned / by hand, {where}", hand, 1.0)
                    if shape != SHAPES[2]:
                        limit = 1.25 if shape == SHAPES[0] else 1.05
                        report.target(f"pinned / wrapper, {where}", patch, limit)
                    rows.append(
                        {
                            "module": kind,
                            "shape": name,
                            "input": str(x.dtype).removeprefix("torch."),
                            "autocast": autocast,
                            "grad": grad,
                            "pinned us": measure.median(times, "pinned"),
                            "/ bare": measure.ratio(times, "pinned", "bare"),
                            "/ by hand": hand,
                            "low": hand.low,
                            "high": hand.high,
                            "by hand / itself": measure.ratio(times, "by hand again", "by hand"),
                            "/ wrapper": patch,
                            "/ diffusers": measure.ratio(times, "pinned", "diffusers")
                            if "diffusers" in times
                            else None,
                        }
                    )
    report.table("(a) a forward call, pinned to float32; parameters are float32", rows)


def run_parameters(report: measure.Report, quick: bool) -> None:
    """(f) Parameters in bfloat16, cast for the call or stored in float32."""
    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "bare": lambda module: module,
        "pinned": pinned,
        "stored": stored,
        "by hand": ByHandCasting,
    }
    if find_spec("diffusers"):
        ways["diffusers"] = layerwise
    rows = []
    for kind in ("LayerNorm", "Linear"):
        for shape in SHAPES[: 2 if quick else 3]:
            for grad in (False, True):
                here = dict(ways)
                if grad:
                    here.pop("diffusers", None)  # its autograd graph holds parameters cast back
                x = torch.randn(shape, dtype=torch.bfloat16)
                module = plain(kind, shape[-1]).bfloat16()
                times = timed(module, here, x, False, grad, 1 if quick else 6)
                hand = measure.ratio(times, "pinned", "by hand")
                name = "x".join(map(str, shape))
                report.target(
                    f"cast for the call / by hand, {kind} {name}, bfloat16, grad {grad}", hand, 1.0
                )
                rows.append(
                    {
                        "module": kind,
                        "shape": name,
                        "grad": grad,
                        "cast us": measure.median(times, "pinned"),
                        "stored us": measure.median(times, "stored"),
                        "cast / stored": measure.ratio(times, "pinned", "stored"),
                        "cast / bare": measure.ratio(times, "pinned", "bare"),
                        "cast / by hand": hand,
                        "low": hand.low,
                        "high": hand.high,
                        "cast / diffusers": measure.ratio(times, "pinned", "diffusers")
                        if "diffusers" in times
                        else None,
                    }
                )
    report.table(
        "(f) a forward call of a bfloat16 module, pinned to float32: parameters cast for the call, "
        "or stored (override_parameters)",
        rows,
    )


if __name__ == "__main__":
    measure.main(__doc__, run, run_parameters)
