"""What dtypepin raises and warns with."""

from __future__ import annotations

import os
import sys
import warnings

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class PinError(ValueError):
    """A pin that was refused; nothing was changed."""


class PinWarning(UserWarning):
    """A pin that stands, with something the user should know about it."""


def warn(message: str) -> None:
    """Warn with the file and line of the first caller outside this package."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
        level += 1
    warnings.warn(message, PinWarning, stacklevel=level)
