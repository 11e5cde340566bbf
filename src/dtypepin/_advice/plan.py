"""What ``suggest`` found: which modules to pin, with figures. Nothing is measured here."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import nn

from dtypepin._base.errors import PinError
from dtypepin._base.selection import named
from dtypepin._base.tables import aligned

_VERSION = 1


@dataclass
class PlanRow:
    """One candidate.

    Attributes:
        name: its first dotted name.
        class_name: the name of its class.
        pinned: whether the plan pins it.
        share: its part of the squared error in low precision, 1 for all of it.
        gain: the part that a pin takes away; negative where it adds.
        gain_keep: the same with ``output="keep"``.
        price: what the pin costs, in the plan's unit.
        remark: ``must`` (not finite in low precision), ``harmful``, ``useless``, or empty.
    """

    name: str
    class_name: str
    pinned: bool
    share: float
    gain: float
    gain_keep: float
    price: float
    remark: str = ""


@dataclass
class Plan:
    """Which modules to pin, how much it helps and what it costs.

    It holds no model: ``pin_arguments()`` are what ``apply`` and ``pin_dtype`` take.

    Attributes:
        rows: all candidates; the pinned ones first, by gain for the price.
        output: ``"restore"`` or ``"keep"``, for all pins.
        unit: what prices are in: ``flops``, ``ms``, ``bytes`` or ``fewest``.
        error_before: error of the output with nothing pinned.
        target: the error that was asked for.
        error_predicted: error that the shares predict for this plan.
        error_measured: error of a real run with these pins.
        error_held_out: error with these pins on the held-out inputs, and before, if there were any.
        reached: whether ``error_measured`` is within the target.
        runs: real runs with pins, and one without.
        forward_equivalents: all that was computed, in forwards of the model.
        notes: what the reader has to know.
    """

    rows: list[PlanRow]
    output: str
    unit: str
    error_before: float
    target: float
    error_predicted: float
    error_measured: float
    error_held_out: tuple[float, float] | None
    reached: bool
    runs: int
    forward_equivalents: float
    notes: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The dotted names of the modules to pin."""
        return [row.name for row in self.rows if row.pinned]

    def pin_arguments(self) -> dict[str, Any]:
        """The arguments for ``pin_dtype`` and ``apply``, without the model.

        Raises:
            PinError: the plan pins nothing.
        """
        if not self.names:
            raise PinError(
                "the plan pins nothing: the error is within the target without pins, or no "
                f"module helps (error {self.error_before:.2e}, target {self.target:.2e})"
            )
        return {
            "patterns": [f"^{re.escape(name)}$" for name in self.names],
            "dtype": "float32",
            "inputs": "all",
            "output": self.output,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file.

        Args:
            path: the file; written anew.
        """
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"dtypepin_plan": _VERSION, **asdict(self)}, file, indent=2)
            file.write("\n")

    def check(self, model: nn.Module) -> None:
        """Refuse a model that does not have the plan's candidates under their names.

        Raises:
            PinError: names the first module that is missing or of another class.
        """
        classes = {name: found.class_name for found in named(model) for name in found.names}
        for row in self.rows:
            if classes.get(row.name) != row.class_name:
                has = classes.get(row.name)
                raise PinError(
                    f"the plan does not fit {type(model).__name__}: got "
                    f"{'no module' if has is None else has} at {row.name!r}, expected "
                    f"{row.class_name}; make a plan for this model with suggest()"
                )

    def __str__(self) -> str:
        lines = [
            f"error {self.error_before:.2e} with nothing pinned, target {self.target:.2e}",
            f"with these pins: predicted {self.error_predicted:.2e}, "
            f"measured {self.error_measured:.2e}" + ("" if self.reached else " (not reached)"),
        ]
        if self.error_held_out is not None:
            before, after = self.error_held_out
            lines.append(f"on held-out inputs: {before:.2e} before, {after:.2e} with these pins")
        total = sum(row.price for row in self.rows if row.pinned)
        lines.append(
            f"{len(self.names)} of {len(self.rows)} candidates pinned, price "
            f"{_number(total, self.unit)}; {self.runs} runs, {self.forward_equivalents:.1f} "
            "forwards in all"
        )
        table = [["pin", "module", "class", "share", "gain", "keep", "price", "remark"]]
        shown = [row for row in self.rows if row.pinned]
        others = [row for row in self.rows if not row.pinned]
        for row in shown + others[:10]:
            table.append(
                [
                    "x" if row.pinned else "",
                    row.name or "(root)",
                    row.class_name,
                    f"{row.share:.1%}",
                    f"{row.gain:.1%}",
                    f"{row.gain_keep:.1%}",
                    _number(row.price, self.unit),
                    row.remark,
                ]
            )
        lines += ["", aligned(table)]
        if len(others) > 10:
            lines.append(f"... and {len(others) - 10} more that are not pinned")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def load_plan(path: str | os.PathLike[str], model: nn.Module | None = None) -> Plan:
    """Read a plan that ``Plan.save`` wrote.

    It does not pin anything.

    Args:
        path: the JSON file.
        model: if given, the plan must fit it.

    Returns:
        The plan.

    Raises:
        PinError: the file holds no plan, or one that does not fit ``model``.
    """
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
        if data.pop("dtypepin_plan", None) != _VERSION or set(data) != {
            f.name for f in fields(Plan)
        }:
            raise ValueError("no plan of this version")
        data["rows"] = [PlanRow(**row) for row in data["rows"]]
        if data["error_held_out"] is not None:
            data["error_held_out"] = tuple(data["error_held_out"])
        plan = Plan(**data)
        _check_types(plan)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PinError(f"{os.fspath(path)}: got {error}, expected a file of Plan.save") from None
    if model is not None:
        plan.check(model)
    return plan


def _check_types(plan: Plan) -> None:
    """Refuse values that this plan's methods could not use."""
    for row in plan.rows:
        _expect(row, str, "name", "class_name", "remark")
        _expect(row, bool, "pinned")
        _expect(row, float, "share", "gain", "gain_keep", "price")
    _expect(plan, bool, "reached")
    _expect(plan, int, "runs")
    _expect(plan, float, "error_before", "target", "error_predicted", "error_measured")
    _expect(plan, float, "forward_equivalents")
    if plan.output not in ("restore", "keep"):
        raise ValueError(f"output {plan.output!r}")
    if plan.unit not in ("flops", "ms", "bytes", "fewest"):
        raise ValueError(f"unit {plan.unit!r}")
    if not isinstance(plan.notes, list) or not all(isinstance(note, str) for note in plan.notes):
        raise TypeError(f"notes {plan.notes!r}")
    held_out = plan.error_held_out
    if held_out is not None:
        if len(held_out) != 2:
            raise ValueError(f"error_held_out {held_out!r}")
        for number in held_out:
            _expect_number("error_held_out", number)


def _expect(holder: Plan | PlanRow, kind: type, *names: str) -> None:
    for name in names:
        value = getattr(holder, name)
        if kind is float:
            _expect_number(name, value)
        elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise TypeError(f"{name} {value!r}")


def _expect_number(name: str, value: object) -> None:
    # An error can be infinite, but nothing compares with nan.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise TypeError(f"{name} {value!r}")


def _number(value: float, unit: str) -> str:
    if unit == "fewest":
        return f"{value:.0f}"
    if unit == "ms":
        return f"{value:.2f} ms"
    for prefix in ("", "k", "M", "G"):
        if abs(value) < 1000:
            return f"{value:.3g} {prefix}{'FLOP' if unit == 'flops' else 'B'}"
        value /= 1000
    return f"{value:.3g} T{'FLOP' if unit == 'flops' else 'B'}"
