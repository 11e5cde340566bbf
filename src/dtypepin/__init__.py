"""Make chosen layers of a PyTorch model compute in a chosen precision, and undo it exactly."""

from dtypepin._advice.plan import Plan, load_plan
from dtypepin._advice.suggest import suggest
from dtypepin._audit.audit import audit
from dtypepin._audit.report import AuditReport
from dtypepin._base.errors import PinError, PinWarning
from dtypepin._pin.handles import PinHandle, PinHandles
from dtypepin._pin.rows import Selection
from dtypepin._pin.verbs import apply, pin_dtype, select, unpin

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
