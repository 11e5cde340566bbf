"""Which modules are worth a pin: shares of the error, a search, and a plan that was verified.

It may import ``_base``, ``_pin`` and ``_audit``.
Start reading at ``suggest.py``, which calls the others in order.
"""
