"""Make chosen layers of a PyTorch model compute in a chosen precision, and undo it exactly."""

from dtypepin._errors import PinError, PinWarning
from dtypepin._handles import PinHandle, PinHandles
from dtypepin._pin import Selection, apply, pin_dtype, select, unpin

__all__ = [
    "PinError",
    "PinHandle",
    "PinHandles",
    "PinWarning",
    "Selection",
    "apply",
    "pin_dtype",
    "select",
    "unpin",
]
