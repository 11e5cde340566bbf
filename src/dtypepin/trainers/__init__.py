"""Adapters for trainers; each is thin, over :func:`dtypepin.apply`."""

from dtypepin.trainers._overrider import DtypeOverrider

__all__ = ["DtypeOverrider"]
