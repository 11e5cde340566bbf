"""What an audit found, as tables and as plain data. Nothing is measured here."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from dtypepin._base.errors import PinError
from dtypepin._base.tables import aligned, markdown

HONOURED, PARTLY, NO_EFFECT = "honoured", "partly", "no effect"
NEVER_RAN, BAD_INPUT = "never ran", "input already non-finite"
#: Verdicts, the widest problem first.
_ORDER = (NEVER_RAN, PARTLY, BAD_INPUT, NO_EFFECT, HONOURED)


@dataclass
class ModuleRow:
    """What one module did.

    Attributes:
        name: its first dotted name.
        class_name: the name of its class.
        calls: how often it was called.
        recomputed: how often a checkpoint called it again in backward.
        dtype_in: floating dtypes of its inputs, before a pin cast them.
        compute: how many ops computed in which dtype: those run directly in it, not its children's.
        moved: how many ops run directly in it only moved data.
        dtype_out: floating dtypes of its outputs, after a pin cast them back.
        nonfinite_in: calls with an inf or a nan in the inputs.
        nonfinite_out: calls with an inf or a nan in the outputs.
        overflowed: calls whose output was finite until a pin cast it back.
        seconds: time spent in it, its children included; None without ``timing=True``.
    """

    name: str
    class_name: str
    calls: int = 0
    recomputed: int = 0
    dtype_in: list[str] = field(default_factory=list)
    compute: dict[str, int] = field(default_factory=dict)
    moved: int = 0
    dtype_out: list[str] = field(default_factory=list)
    nonfinite_in: int = 0
    nonfinite_out: int = 0
    overflowed: int = 0
    seconds: float | None = None


@dataclass
class PinRow:
    """What became of one pin.

    Attributes:
        name: the module's first dotted name.
        class_name: the name of its class.
        method: the pinned method.
        dtype: the pin's dtype.
        calls: how often the pinned method was called, recomputations included.
        verdict: ``honoured``, ``partly``, ``no effect``, ``never ran`` or
            ``input already non-finite``.
        detail: the op and dtype, the likely cause, or the first bad module.
        stored_bytes: what storing parameters in the pin's dtype takes in addition.
        cast_bytes: size of all casts that the pin made, per call.
    """

    name: str
    class_name: str
    method: str
    dtype: str
    calls: int
    verdict: str
    detail: str
    stored_bytes: int
    cast_bytes: int


class AuditReport:
    """What :class:`audit` saw; complete when its block has ended.

    It does not keep the model alive, nor any of its tensors.

    Attributes:
        modules: one row for each module of the model that was called, in order of first call.
        pins: one row for each pin, those with a problem first.
        first_bad: one line on the first non-finite value; empty if there was none.
        notes: what the reader has to know about how this was measured.
    """

    def __init__(self) -> None:
        self.modules: list[ModuleRow] = []
        self.pins: list[PinRow] = []
        self.first_bad = ""
        self.notes: list[str] = []

    def assert_honoured(self) -> None:
        """Raise unless every pin computed in its dtype; for a user's own tests.

        ``no effect`` passes, for the module did compute in that dtype.

        Raises:
            PinError: with the table; also where there was no pin at all.
        """
        bad = [row for row in self.pins if row.verdict not in (HONOURED, NO_EFFECT)]
        if bad or not self.pins:
            what = f"{len(bad)} of {len(self.pins)} pins were not honoured"
            raise PinError(f"{what if self.pins else 'there was no pin to honour'}\n\n{self}")

    def diff(self, other: AuditReport) -> Difference:
        """The modules that computed in other dtypes in another report of the same model.

        Args:
            other: for example of the same model in an inference engine, or before a change.

        Returns:
            The difference; empty, and false, if there is none.
        """
        mine = {row.name: row for row in self.modules}
        theirs = {row.name: row for row in other.modules}
        rows = []
        for name in dict.fromkeys([*mine, *theirs]):
            here, there = (
                "not called" if row is None else _dtypes(row)
                for row in (mine.get(name), theirs.get(name))
            )
            if here != there:
                rows.append((name, (mine.get(name) or theirs[name]).class_name, here, there))
        return Difference(rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "first_bad": self.first_bad,
            "pins": [asdict(row) for row in self.pins],
            "modules": [asdict(row) for row in self.modules],
            "notes": list(self.notes),
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write ``to_dict()`` to a file.

        Args:
            path: the file; written anew.
        """
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=2)
            file.write("\n")

    def to_markdown(self) -> str:
        """The tables in Markdown."""
        parts = [self.first_bad] if self.first_bad else []
        parts += [markdown(table) for table in self._tables()]
        parts += [f"- {note}" for note in self.notes]
        return "\n\n".join(parts) + "\n"

    def __str__(self) -> str:
        parts = [self.first_bad] if self.first_bad else []
        parts += [aligned(table) for table in self._tables()]
        parts += [f"note: {note}" for note in self.notes]
        return "\n\n".join(parts) or "no module of the model was called"

    def __repr__(self) -> str:
        return f"AuditReport({len(self.pins)} pins, {len(self.modules)} modules)"

    def _tables(self) -> list[list[list[str]]]:
        """The table of pins and that of modules, each with its head, if there are any."""
        pins = [["pin", "class", "method", "dtype", "calls", "verdict", "stored", "cast", "detail"]]
        for pin in self.pins:
            about = [pin.name or "(root)", pin.class_name, pin.method, pin.dtype, str(pin.calls)]
            sizes = [_size(pin.stored_bytes), _size(pin.cast_bytes)]
            pins.append([*about, pin.verdict, *sizes, pin.detail])
        timed = any(row.seconds is not None for row in self.modules)
        modules = [["module", "class", "calls", "in", "computes in", "out", "non-finite"]]
        modules[0] += ["ms"] * timed
        for row in sorted(self.modules, key=_badness):
            calls = str(row.calls) + (f" ({row.recomputed} again)" if row.recomputed else "")
            bad = [
                f"{what} {count}"
                for what, count in (
                    ("in", row.nonfinite_in),
                    ("out", row.nonfinite_out),
                    ("cast back", row.overflowed),
                )
                if count
            ]
            line = [row.name or "(root)", row.class_name, calls, ", ".join(row.dtype_in) or "-"]
            line += [_dtypes(row), ", ".join(row.dtype_out) or "-", ", ".join(bad) or "-"]
            modules.append(line + [f"{1e3 * (row.seconds or 0.0):.3f}"] * timed)
        return [table for table in (pins, modules) if len(table) > 1]


class Difference(list[tuple[str, str, str, str]]):
    """Rows of name, class, dtypes here, dtypes there; ``print`` shows a table."""

    def __str__(self) -> str:
        if not self:
            return "no module computed in other dtypes"
        head = ["module", "class", "computes in", "computes in (other)"]
        return aligned([head, *([row[0] or "(root)", *row[1:]] for row in self)])


def by_severity(row: PinRow) -> int:
    """Sorts pins, those with a problem first."""
    return _ORDER.index(row.verdict)


def _badness(row: ModuleRow) -> int:
    """Sorts modules: those with a fault of their own first, then those that pass one on."""
    if row.overflowed or (row.nonfinite_out and not row.nonfinite_in):
        return 0
    return 1 if row.nonfinite_in or row.nonfinite_out else 2


def _dtypes(row: ModuleRow) -> str:
    return ", ".join(sorted(row.compute)) or "-"


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(number) < 1024:
            return f"{number:.0f} {unit}" if number else "-"
        number /= 1024
    return f"{number:.1f} GiB"
