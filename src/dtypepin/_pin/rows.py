"""Pins as lines of a table, before and after they are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload

import torch
from torch import nn

from dtypepin._base.dtypes import short
from dtypepin._base.selection import parts
from dtypepin._base.tables import aligned
from dtypepin._pin.reads import own_floats


class Row(NamedTuple):
    """One pinned method, as a line of a table."""

    name: str
    class_name: str
    method: str
    dtype: torch.dtype
    parameters: str
    aliases: tuple[str, ...]


def table(rows: Sequence[Row]) -> str:
    """Aligned columns; the aliases column is left out where there are none."""
    head = ["name", "class", "method", "dtype", "parameters", "aliases"]
    lines = [
        [
            row.name or "(root)",
            row.class_name,
            row.method,
            short(row.dtype),
            row.parameters,
            ", ".join(row.aliases) or "-",
        ]
        for row in rows
    ]
    columns = len(head) if any(row.aliases for row in rows) else len(head) - 1
    return aligned([line[:columns] for line in [head, *lines]])


def parameters_kind(module: nn.Module, dtype: torch.dtype, override: bool) -> str:
    """``stored``, ``cast per call`` or ``none``: how floating parameters and buffers become dtype.

    ``as they are`` where they are in that dtype already.
    """
    own = [value.dtype for _, value in own_floats(module)]
    if override and own:
        return "stored"
    floats = [v.dtype for part in parts(module) for _, v in own_floats(part)]
    if not floats:
        return "none"
    return "cast per call" if any(found is not dtype for found in floats) else "as they are"


class Selection(Sequence[Row]):
    """What ``select`` found.

    A row has the fields name, class_name, method, dtype, parameters and aliases. ``print`` shows
    all rows as a table; ``names`` lists all dotted names.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = tuple(rows)

    @property
    def names(self) -> list[str]:
        """All dotted names of the selected modules, aliases of shared ones included."""
        return list(dict.fromkeys(n for row in self._rows for n in (row.name, *row.aliases)))

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __str__(self) -> str:
        return table(self._rows)

    def __repr__(self) -> str:
        return f"Selection({self.names})"
