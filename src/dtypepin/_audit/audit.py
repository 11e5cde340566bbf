"""The audit as users enter it."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from types import TracebackType

from torch import nn

from dtypepin._audit.recorder import Recorder
from dtypepin._audit.report import AuditReport
from dtypepin._base.errors import PinError
from dtypepin._base.model_state import run_eagerly


class audit:
    """Record, for a block, in which dtypes the modules of a model compute.

    Ops are seen as they run, below autocast: this is what happened, not what was asked for. Ops of
    the backward are out of scope; what a checkpoint computes again in it is counted apart. Only
    the thread that enters the block is recorded. Compiled code runs eagerly in it.

    To tell a pin that changes nothing, a copy of each pinned module runs without pins on the same
    inputs: at its first call, and again under another autocast or with inputs of other dtypes. The
    model and the random numbers do not notice, except of a ``torch.Generator`` that belongs to
    nobody; forward hooks of yours run in it too. It takes the memory of the module meanwhile.

    Example:
        >>> import torch, dtypepin
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1)).bfloat16()
        >>> with dtypepin.pin_dtype(model, "1"), dtypepin.audit(model) as report:
        ...     out = model(torch.zeros(2, 4, dtype=torch.bfloat16))
        >>> report.pins[0].verdict
        'honoured'
        >>> report.modules[-1].compute
        {'float32': 1}

    Args:
        model: the model; wrappers are seen through. Modules added inside the block are not seen.
        timing: also measure the time in each module, disturbed by the measuring.
        without_pins: False leaves out the extra runs; ``no effect`` is not told then.

    Returns:
        On entering, an :class:`AuditReport` that is complete after the block.

    Raises:
        PinError: ``model`` is no module, or it is compiled and torch is older than 2.6.

    Limits:
        The extra runs are left out where more than one process takes part, where a module cannot
        be copied or does not run by itself, and for pinned methods other than forward; a note in
        the report says so.
    """

    def __init__(
        self, model: nn.Module, *, timing: bool = False, without_pins: bool = True
    ) -> None:
        if not isinstance(model, nn.Module):
            raise PinError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
        self._arguments = (model, timing, without_pins)
        self._entered: list[tuple[ExitStack, Recorder]] = []

    def __enter__(self) -> AuditReport:
        recorder = Recorder(*self._arguments)
        with ExitStack() as stack:
            stack.callback(recorder.finish)
            if stack.enter_context(run_eagerly()):
                stack.enter_context(warnings.catch_warnings())
                # They fire once more, for torch.compile's wrapper, which is no module of the model.
                warnings.filterwarnings("ignore", "(?s).*when there are global hooks on modules")
            stack.enter_context(recorder.hooked)
            recorder.hook()
            stack.enter_context(recorder)
            self._entered.append((stack.pop_all(), recorder))
        return recorder.report

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stack, _ = self._entered.pop()
        stack.__exit__(kind, error, trace)
