"""Small diffusers models with random weights."""

from entry import Entry

DIFFUSERS: list[Entry] = []
