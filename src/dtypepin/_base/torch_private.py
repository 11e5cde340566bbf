"""Every private name of torch that dtypepin uses, each with a correct fallback.

``tests/base/test_torch_private.py`` notices when a torch release moves one of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

#: torch's own version, major and minor.
_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def _unknown_autocast() -> bool:
    return True  # "perhaps": the per-device question, which is public, is asked then


#: Is autocast on for any device at all? Costs 40 ns; ``tensor.device.type`` 900 ns.
any_autocast_enabled: Callable[[], bool] = getattr(
    torch._C, "_is_any_autocast_enabled", _unknown_autocast
)


def autocast_outside(kind: str) -> bool:
    """Whether autocast was on for a device where dynamo began the trace in which it calls this."""
    tracing = getattr(sys.modules.get("torch._guards"), "TracingContext", None)
    context = None if tracing is None else tracing.try_get()
    states = getattr(getattr(context, "global_context", None), "global_state", {})
    state = states.get("autocast_cpu_enabled" if kind == "cpu" else "autocast_enabled")
    return state is None or bool(state[1])


# As ``torch.compiler.assume_constant_result`` does, which would import dynamo: it is called for
# real while dynamo traces, and its result is a constant of the compiled code.
autocast_outside._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_exporting() -> bool:
    # torch before 2.7: only export, not dynamo, sets the flag that is read here.
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


#: Whether ``torch.export`` is tracing the call.
is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", _is_exporting)


#: Whether ``torch.jit.trace`` is tracing the call; the public question takes 170 ns.
is_tracing: Callable[[], bool] = getattr(torch._C, "_is_tracing", torch.jit.is_tracing)  # type: ignore[attr-defined]


#: The ``__torch_function__`` of a subclass whose ops give plain tensors, as ``nn.Parameter``'s.
disabled_torch_function: Any = nn.Parameter.__torch_function__


def is_subclass(value: object) -> bool:
    """Whether a tensor is a wrapper around others, such as a DTensor."""
    return is_traceable_wrapper_subclass(value)  # for mypy, its TypeGuard excludes every Tensor


def in_functorch() -> bool:
    """Whether a ``torch.func`` transform (grad, vmap, jvp ...) is active in this thread."""
    functorch = getattr(torch._C, "_functorch", None)
    peek = getattr(functorch, "peek_interpreter_stack", None)
    return peek is not None and peek() is not None


def _names(code: CodeType) -> set[object]:
    """All names and constants in a function's code, nested functions included."""
    found = {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
    return found.union(*(_names(c) for c in code.co_consts if isinstance(c, CodeType)))


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    task: Callable[[], int] | None = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def in_recomputation() -> bool:
    """Whether ``torch.utils.checkpoint`` computes something again, in a backward of this thread."""
    if not in_backward():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False


def run_by_dynamo() -> bool:
    """Whether dynamo runs this for real while it compiles, as it does to answer ``hasattr``."""
    context = getattr(sys.modules.get("torch._guards"), "CompileContext", None)
    return context is not None and context.try_get() is not None and not is_exporting()


#: Whether ``nn.TransformerEncoderLayer`` gives up its fast path, which calls no child, where a
#: child has hooks. torch 2.4 does not.
FAST_PATH_SEES_HOOKS = "_forward_hooks" in _names(torch.nn.TransformerEncoderLayer.forward.__code__)


def renumber(handle: RemovableHandle, number: int) -> None:
    """Give a hook just registered the id that it had before, if that id is free.

    Dynamo guards on hook ids: with new ones each time, entering and leaving ``pin_dtype`` round
    every step would compile the model anew each time.
    """
    dicts = [ref() for ref in (handle.hooks_dict_ref, *handle.extra_dict_ref)]
    if number == handle.id or any(found is None or number in found for found in dicts):
        return
    hooks, *flags = dicts
    old, handle.id = handle.id, number
    # Other threads may be calling the module: a hook is never there without its flags.
    for found in flags:
        if old in found:
            found[number] = found[old]
    first = next(iter(hooks)) == old
    hooks[number] = hooks.pop(old)
    if first and len(hooks) > 1:
        hooks.move_to_end(number, last=False)  # it was registered with prepend=True
    for found in flags:
        found.pop(old, None)


def register_global_forward_hook(hook: Callable[..., None]) -> Callable[[], None]:
    """Call ``hook(module, args, kwargs, output)`` after every forward, until the result is called.

    torch 2.4 does not hand out keyword arguments here: kwargs is empty there.
    """
    register = torch.nn.modules.module.register_module_forward_hook
    try:
        handle = register(hook, with_kwargs=True)
    except TypeError:
        handle = register(lambda module, args, output: hook(module, args, {}, output))
    # Removal forgets one of torch's dicts, and compiled modules warn of global hooks from then on.
    keywords = getattr(torch.nn.modules.module, "_global_forward_hooks_with_kwargs", {})

    def remove() -> None:
        handle.remove()
        keywords.pop(handle.id, None)

    return remove


def see_hooks() -> None:
    """Have dynamo notice that a module's hooks changed; called whenever ours do.

    By default it does not look whether a module without hooks still has none, and runs a pinned
    one with the code that it compiled for an unpinned one. What was compiled before it was told
    to look is dropped, once; each time where it cannot be told, and on torch before 2.5, where
    telling it is not enough.
    """
    if _TORCH < (2, 5):
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
    elif _CONFIG not in sys.modules:
        if not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
            sys.meta_path.insert(0, _WhenImported())
    elif not _look_at_hooks(sys.modules[_CONFIG]):
        torch.compiler.reset()


_CONFIG = "torch._dynamo.config"


def _look_at_hooks(config: Any) -> bool:
    """Switch dynamo's guards on hooks on; False if they were not on before."""
    # What is set counts for the thread or task that sets it, in newer torch; the default for all.
    entry = getattr(config, "_config", {}).get("skip_nnmodule_hook_guards")
    on = True
    if entry is not None and getattr(entry, "default", False) is not False:
        entry.default, on = False, False
    if getattr(config, "skip_nnmodule_hook_guards", None) is not False:
        on = False
        with suppress(AttributeError):
            config.skip_nnmodule_hook_guards = False
    return on


class _WhenImported(MetaPathFinder):
    """Sets dynamo's guards once it is imported, which takes a second: not before somebody does."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != _CONFIG:
            return None
        with suppress(ValueError):  # somebody may have put another list there
            sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _look_at_hooks(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def keep_out_of_dynamo_frames(*modules: ModuleType) -> bool:
    """Tell dynamo not to compile the functions of our modules as frames of their own.

    After a graph break inside a pinned module dynamo would compile the hooks alone, and AOT
    backends then drop the ``set_autocast_enabled`` in them: the pin would be silently gone.
    The functions are still traced where dynamo inlines them, so ``fullgraph=True`` holds.

    Args:
        *modules: all functions, methods and nested functions that they define are marked.

    Returns:
        Whether torch could be told. If not, a compiled model with a graph break inside a pinned
        module is not supported on that torch.
    """
    mark = _marker()
    if mark is None:
        return False
    for module in modules:
        todo: list[Any] = list(vars(module).values())
        while todo:
            found = todo.pop()
            if isinstance(found, CodeType):
                mark(found)
                todo += found.co_consts
            elif getattr(found, "__module__", None) != module.__name__:
                continue
            elif isinstance(found, FunctionType):
                todo.append(found.__code__)
            elif isinstance(found, type):
                todo += [getattr(value, "fget", value) for value in vars(found).values()]
    return True


def _marker() -> Callable[[CodeType], None] | None:
    try:
        from torch._C._dynamo import eval_frame
    except ImportError:
        return None
    try:
        skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
        strategy = eval_frame._FrameExecStrategy(skip, default)
        set_strategy = eval_frame.set_code_exec_strategy
    except (AttributeError, TypeError):
        return getattr(eval_frame, "skip_code", None)  # torch before 2.6
    return lambda code: set_strategy(code, strategy)
