"""One model of the sweep."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """A model: what it is called, what it belongs to, and how to make it and its inputs."""

    name: str
    family: str
    build: Callable[[], tuple[Any, dict[str, Any]]]
