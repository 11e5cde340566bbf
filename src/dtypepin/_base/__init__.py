"""What knows nothing of pins: errors, dtypes, the walk through nested values, selection, tables.

It may import torch and nothing of dtypepin outside this folder.
Start reading at ``selection.py``; every private name of torch is in ``torch_private.py``.
"""
