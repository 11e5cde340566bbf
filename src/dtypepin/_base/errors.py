"""What dtypepin raises and warns with."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

#: Between the user's line and a warning of ours there may be frames of these packages.
_BETWEEN = frozenset(
    {
        "dtypepin",
        "torch",
        "lightning",
        "pytorch_lightning",
        "transformers",
        "accelerate",
        "mmengine",
    }
)


class PinError(ValueError):
    """A pin that was refused; nothing was changed."""


class PinWarning(UserWarning):
    """A pin that stands, with something the user should know about it."""


def warn(message: str) -> None:
    """Warn with the file and line of the first caller outside this package and the frameworks."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and _package(frame) in _BETWEEN:
        frame = frame.f_back
        level += 1
    warnings.warn(message, PinWarning, stacklevel=level)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]
