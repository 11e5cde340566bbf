"""Every private name of torch that dtypepin uses, each with a correct fallback.

``tests/test_private.py`` notices when a torch release moves one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch


def _unknown_autocast() -> bool:
    return True  # "perhaps": the per-device question, which is public, is asked then


#: Is autocast on for any device at all? A shortcut: 40 ns against 900 ns for ``tensor.device.type``.
any_autocast_enabled: Callable[[], bool] = getattr(
    torch._C, "_is_any_autocast_enabled", _unknown_autocast
)


def in_functorch() -> bool:
    """Whether a ``torch.func`` transform (grad, vmap, jvp ...) is active in this thread."""
    functorch = getattr(torch._C, "_functorch", None)
    peek = getattr(functorch, "peek_interpreter_stack", None)
    return peek is not None and peek() is not None


def keep_out_of_dynamo_frames(*functions: Callable[..., Any]) -> bool:
    """Tell dynamo not to compile these functions as frames of their own.

    After a graph break inside a pinned module dynamo would compile the hooks alone, and AOT
    backends then drop the ``set_autocast_enabled`` in them: the pin would be silently gone.
    The functions are still traced where dynamo inlines them, so ``fullgraph=True`` holds.

    Args:
        *functions: plain Python functions.

    Returns:
        Whether torch could be told. If not, compiled models with a graph break inside a pinned
        module are not supported on that torch.
    """
    try:
        from torch._C._dynamo import eval_frame

        skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
        strategy = eval_frame._FrameExecStrategy(skip, default)

        def mark(code: CodeType) -> None:
            eval_frame.set_code_exec_strategy(code, strategy)

    except (ImportError, AttributeError, TypeError):
        try:
            from torch._C._dynamo.eval_frame import skip_code as mark  # torch < 2.6
        except (ImportError, AttributeError):
            return False
    for function in functions:
        assert isinstance(function, FunctionType)
        mark(function.__code__)
    return True
