"""Make chosen layers of a PyTorch model compute in a chosen precision, and undo it exactly."""

from dtypepin._audit import audit
from dtypepin._errors import PinError, PinWarning
from dtypepin._handles import PinHandle, PinHandles
from dtypepin._pin import Selection, apply, pin_dtype, select, unpin
from dtypepin._plan import Plan, load_plan
from dtypepin._report import AuditReport
from dtypepin._suggest import suggest

__all__ = [
    "AuditReport",
    "PinError",
    "PinHandle",
    "PinHandles",
    "PinWarning",
    "Plan",
    "Selection",
    "apply",
    "audit",
    "load_plan",
    "pin_dtype",
    "select",
    "suggest",
    "unpin",
]
