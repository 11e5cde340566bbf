"""What really ran, in which dtype, and a verdict on every pin.

It may import ``_base`` and ``_pin``.
Start reading at ``recorder.py``, which sees, and ``verdicts.py``, which judges.
"""
