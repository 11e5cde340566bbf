"""Which modules a pin means: patterns in, modules and names out. Nothing is changed here."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils import parametrize

from dtypepin._base.errors import PinError, warn

Pattern = str | re.Pattern[str]
Patterns = Pattern | Sequence[Pattern] | None

#: Child names that only wrappers use: never part of a name.
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
#: Classes whose child ``module`` is the wrapped model; by name, so that none is imported.
_WRAPPERS = frozenset(
    {
        "DataParallel",
        "DistributedDataParallel",
        "FullyShardedDataParallel",
        "AveragedModel",
        "DeepSpeedEngine",
        "MMDataParallel",
        "MMDistributedDataParallel",
    }
)
#: A module shared in many places keeps this many names; nested sharing multiplies them.
_MOST_NAMES = 64


class Named(NamedTuple):
    """A module with all its names and its class name, wrappers left out.

    ``parametrizes``: whether it is a parametrization of somebody's parameter.
    """

    module: nn.Module
    names: tuple[str, ...]
    class_name: str
    parametrizes: bool


def class_name(module: nn.Module) -> str:
    """The name of the class as the user wrote it.

    ``fully_shard`` and ``torch.nn.utils.parametrize`` give a module a subclass of their own.
    """
    if "parametrizations" in module._modules and parametrize.is_parametrized(module):
        return parametrize.type_before_parametrizations(module).__name__
    kind = type(module)
    if any(base.__name__ == "FSDPModule" for base in kind.__mro__[1:2]):
        kind = kind.__mro__[2]
    return kind.__name__


def parts(module: nn.Module) -> list[nn.Module]:
    """The module and all that is in it, each once; ``modules()`` is slow for a leaf."""
    return list(module.modules()) if module._modules else [module]


def wrapped(module: nn.Module) -> nn.Module | None:
    """What a wrapper (DDP, compile, checkpoint ...) wraps; None for any other module."""
    if not module._modules:
        return None
    for name in _WRAPPED:
        if name in module._modules:
            return module._modules[name]
    if "module" in module._modules and any(
        kind.__name__ in _WRAPPERS for kind in type(module).__mro__
    ):
        return module._modules["module"]
    return None


def named(model: nn.Module) -> list[Named]:
    """Every module of a model once, the root included, with all its dotted names.

    Modules that only wrap another one are left out, and so are their prefixes. Shared modules
    and cycles are fine.

    Raises:
        PinError: it is no module.
    """
    if not isinstance(model, nn.Module):
        raise PinError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    names: dict[nn.Module, list[str]] = {}
    parametrizing: set[nn.Module] = set()
    todo: list[tuple[nn.Module, str, nn.Module | None, frozenset[int]]] = [
        (model, "", None, frozenset())
    ]
    while todo:
        module, name, parent, above = todo.pop()
        inner = wrapped(module)
        while inner is not None:
            module, inner = inner, wrapped(inner)
        if id(module) in above:
            continue  # a child that refers to one of its parents
        known = names.setdefault(module, [])
        if isinstance(parent, parametrize.ParametrizationList):
            parametrizing.add(module)
        if name in known or len(known) >= _MOST_NAMES:
            continue
        known.append(name)
        if not module._modules:
            continue
        below = above | {id(module)}
        prefix = f"{name}." if name else ""
        for child, value in reversed(module._modules.items()):
            if value is not None:
                todo.append((value, prefix + child, module, below))
    return [
        Named(module, tuple(known), class_name(module), module in parametrizing)
        for module, known in names.items()
    ]


def find(
    model: nn.Module,
    patterns: Patterns,
    class_patterns: Patterns,
    everything: list[Named] | None = None,
) -> list[Named]:
    """The modules that any of the patterns finds.

    Args:
        model: searched with its root.
        patterns: searched in every dotted name, ``re.search``.
        class_patterns: searched in the class name, ``re.search``.
        everything: ``named(model)``, if it is known.

    Returns:
        The modules found, in the model's order, each once.

    Raises:
        PinError: nothing was found, or a pattern is broken.

    Warns:
        PinWarning: some, but not all patterns found nothing.
    """
    modules = named(model) if everything is None else everything
    by_name, by_class = compiled(patterns, class_patterns)
    hits: dict[int, bool] = {}
    dead: list[str] = []
    for pattern in by_name:
        found = [m for m in modules if any(pattern.search(name) for name in m.names)]
        hits.update((id(m.module), True) for m in found)
        if not found:
            dead.append(_near_misses(pattern, "patterns", modules))
    for pattern in by_class:
        found = [m for m in modules if pattern.search(m.class_name)]
        hits.update((id(m.module), True) for m in found)
        if not found:
            dead.append(_near_misses(pattern, "class_patterns", modules))
    if not hits:
        raise PinError("no module matched: " + "; ".join(dead))
    for text in dead:
        warn(text)
    return [m for m in modules if id(m.module) in hits]


def compiled(
    patterns: Patterns, class_patterns: Patterns
) -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
    """Both kinds of patterns, checked; at least one pattern is needed.

    Raises:
        PinError: there is none, or one is broken.
    """
    by_name = _compile(patterns, "patterns")
    by_class = _compile(class_patterns, "class_patterns")
    if not by_name and not by_class:
        raise PinError(
            "got no pattern, expected patterns= (searched in dotted names such as 'blocks.0.norm') "
            "or class_patterns= (searched in class names such as 'LayerNorm')"
        )
    return by_name, by_class


def suggestion(wrong: str, right: Iterable[str]) -> str:
    """``; did you mean 'x'?``, or nothing."""
    near = difflib.get_close_matches(wrong, list(dict.fromkeys(right)), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def _compile(patterns: object, argument: str) -> list[re.Pattern[str]]:
    if patterns is None:
        return []
    given: list[Any]
    if isinstance(patterns, (str, bytes, re.Pattern)):
        given = [patterns]  # a str is one pattern, never its letters
    elif isinstance(patterns, Iterable):
        given = list(patterns)
    else:
        given = [patterns]
    found = []
    for pattern in given:
        if not isinstance(pattern, (str, re.Pattern)) or isinstance(
            getattr(pattern, "pattern", ""), bytes
        ):
            raise PinError(
                f"{argument}: got {pattern!r}, expected a regular expression (str or re.Pattern) "
                "or a list of them"
                + (f"; class_patterns={pattern.__name__!r}" if isinstance(pattern, type) else "")
            )
        try:
            found.append(re.compile(pattern))
        except re.error as error:
            hint = "; a glob's '*' is '.*' in a regex" if str(pattern).startswith("*") else ""
            raise PinError(
                f"{argument}: {pattern!r} is not a regular expression: {error}{hint}"
            ) from error
    return found


def _near_misses(pattern: re.Pattern[str], argument: str, modules: list[Named]) -> str:
    """Why a pattern found nothing, as far as one can tell."""
    text = f"{argument}: {pattern.pattern!r} matches no "
    text += "module name" if argument == "patterns" else "class name"
    names = [name for m in modules for name in m.names if name]
    classes = list(dict.fromkeys(m.class_name for m in modules))
    if argument == "patterns":
        own, other, other_is, use = names, classes, "a class", "class_patterns"
    else:
        own, other, other_is, use = classes, names, "a module name", "patterns"
    plain = pattern.pattern.replace("\\", "")
    prefix = next((p for p in (*_WRAPPED, "module") if f"{p}." in plain), None)
    if argument == "patterns" and prefix:
        return f"{text}; names are without the prefix {prefix!r} of wrappers: leave it out"
    crossed = [name for name in other if pattern.search(name)]
    if crossed:
        return f"{text}, but {other_is} {crossed[0]!r} exists: use {use}={pattern.pattern!r}"
    near = _similar(pattern.pattern, own)
    if near:
        return f"{text}; near misses: {', '.join(map(repr, near))}"
    crossed = _similar(pattern.pattern, other)
    if crossed:
        return f"{text}; {other_is} {crossed[0]!r} is near: use {use}= for those"
    some = ", ".join(map(repr, own[:5])) or "the root alone, whose name is '' (pattern '^$')"
    return f"{text}; there are: {some}{', ...' if len(own) > 5 else ''}"


def _similar(pattern: str, names: list[str]) -> list[str]:
    """Up to five names that come near the letters of a pattern."""

    def letters(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower())

    # Without what only a regex has: escapes such as \b, and what is not a letter.
    wanted = letters(re.sub(r"\\[a-zA-Z]", "", pattern))
    if not wanted:
        return []
    inside = [name for name in names if wanted in letters(name)]
    if inside:
        return inside[:5]
    parts: dict[str, str] = {}
    for name in names:
        for part in (name, *name.split(".")):
            parts.setdefault(letters(part), name)
    near = difflib.get_close_matches(wanted, list(parts), n=5, cutoff=0.7)
    return list(dict.fromkeys(parts[part] for part in near))
