"""Adapters for trainers: each turns their events into :func:`dtypepin.apply` and back.

They may import everything of dtypepin, and their own framework; nothing of dtypepin imports them.
Start reading at ``_overrider.py``, the hook that needs no framework.
"""

from dtypepin.trainers._overrider import DtypeOverrider

__all__ = ["DtypeOverrider"]
