"""What was written in a region arrives in the tensors that the modules own."""

from __future__ import annotations

from dtypepin._pin.casts import TracedCast
from dtypepin._pin.frames import Frame, thread


def write_back(frame: Frame) -> None:
    """What was written so far to the casts of these regions arrives."""
    home = frame.home
    for known in home.casts.values() if home.casts is not None else ():
        known.write_back(known.read)
    for traced in _traced_in(frame):
        traced.write_back()


def refresh(frame: Frame) -> None:
    """What a region of another dtype has written meanwhile arrives in these casts."""
    home = frame.home
    for known in home.casts.values() if home.casts is not None else ():
        known.refresh()
    for traced in _traced_in(frame):
        traced.refresh()


def _traced_in(frame: Frame) -> list[TracedCast]:
    """Of these regions, as far out as they share a dtype."""
    found: list[TracedCast] = []
    for outer in reversed(thread.frames):
        if outer.dtype is not frame.dtype:
            break
        found += outer.traced or ()
    return found


def settle(frame: Frame) -> None:
    """A region ends: what was written to its casts arrives, and parameters are where they were."""
    for traced in frame.traced or ():
        traced.write_back()
    errors: list[Exception] = []
    for known in list(frame.casts.values()) if frame.casts is not None else ():
        try:
            known.close()
        except Exception as error:  # the others are still to be closed
            errors.append(error)
    frame.put_back()
    if errors:
        raise errors[0]
