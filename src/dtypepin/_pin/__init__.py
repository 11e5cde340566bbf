"""A pin: the region that one pinned call is, how parameters read in it, and how it comes off again.

It may import ``_base``.
Start reading at ``verbs.py`` for what users call, at ``region.py`` for what happens in a call.
"""
