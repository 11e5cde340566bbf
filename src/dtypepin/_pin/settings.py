"""The arguments of ``apply``, checked, and what they mean for one model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from dtypepin._base.dtypes import resolve_dtype
from dtypepin._base.errors import PinError
from dtypepin._base.selection import Named, Patterns, compiled, find, named, suggestion
from dtypepin._pin import methods, refusals
from dtypepin._pin.hooks import Pin
from dtypepin._pin.rows import Row, parameters_kind

Inputs = Literal["first", "all"]

Output = Literal["restore", "keep"] | torch.dtype | str


class Settings:
    """The arguments of ``apply`` without the model, resolved and checked."""

    def __init__(
        self,
        patterns: Patterns,
        class_patterns: Patterns,
        dtype: torch.dtype | str,
        methods_to_override: Sequence[str] | str,
        override_parameters: bool,
        inputs: Inputs,
        output: Output,
    ) -> None:
        self.dtype = resolve_dtype(dtype)
        if inputs not in ("first", "all"):
            raise PinError(f'inputs: got {inputs!r}, expected "first" or "all"')
        self.inputs: Inputs = inputs
        self.output: Any = output
        if output not in ("restore", "keep"):
            try:
                self.output = resolve_dtype(output, "output")
            except PinError as error:
                raise PinError(f'{error}, or "restore" or "keep"') from None
        if not isinstance(override_parameters, bool):
            raise PinError(f"override_parameters: got {override_parameters!r}, expected a bool")
        self.override = override_parameters
        methods: Any = methods_to_override
        if isinstance(methods, str):
            methods = [methods]
        elif isinstance(methods, Iterable):
            methods = list(methods)
        if not (isinstance(methods, list) and methods and all(isinstance(m, str) for m in methods)):
            raise PinError(
                f"methods_to_override: got {methods_to_override!r}, expected names of methods"
            )
        self.methods: list[str] = methods
        self.patterns, self.class_patterns = compiled(patterns, class_patterns)


class Targets:
    """What ``apply`` will do to a model, checked; nothing changed yet."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.settings = settings
        self.pairs: list[tuple[Named, str]] = []
        everything = named(model)
        chosen = find(model, settings.patterns, settings.class_patterns, everything)
        for name in dict.fromkeys(settings.methods):
            self.pairs += self._having(name, chosen)
        order = {id(found.module): i for i, found in enumerate(chosen)}
        self.pairs.sort(key=lambda target: order[id(target[0].module)])
        having = {id(found.module) for found, _ in self.pairs}
        chosen = [c for c in chosen if id(c.module) in having]
        refusals.check(model, everything, chosen, settings.dtype, settings.override)

    def _having(self, method: str, chosen: list[Named]) -> list[tuple[Named, str]]:
        """The chosen modules that have this method; a method that none has is an error."""
        if method.startswith("__") and method.endswith("__"):
            raise PinError(
                f"methods_to_override: got {method!r}, which Python looks up on the class, where "
                "no wrapper of one module can stand; expected 'forward' for the call of a module, "
                "or an ordinary method"
            )
        having = [(found, method) for found in chosen if methods.can_wrap(found.module, method)]
        if not having:
            example = chosen[0]
            kind = type(example.module)
            raise PinError(
                f"methods_to_override: got {method!r}, which no matched module has (for one "
                f"{example.names[0]!r}, {example.class_name})"
                + suggestion(
                    method, [n for n in dir(kind) if n[0] != "_" and callable(getattr(kind, n))]
                )
            )
        return having

    def rows(self) -> list[Row]:
        dtype, override = self.settings.dtype, self.settings.override
        return [
            Row(
                found.names[0],
                found.class_name,
                method,
                dtype,
                parameters_kind(found.module, dtype, override),
                found.names[1:],
            )
            for found, method in self.pairs
        ]

    def pin(self, found: Named, method: str) -> Pin:
        wanted = self.settings
        # A parametrization is handed all parts of one tensor, as weight norm's two originals.
        return Pin(
            wanted.dtype,
            "all" if found.parametrizes else wanted.inputs,
            wanted.output,
            found.names[0],
            method,
            override=wanted.override,
        )
