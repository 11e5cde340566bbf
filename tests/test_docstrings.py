"""The examples in the docstrings do what they say."""

import doctest

import pytest

from dtypepin._advice import suggest
from dtypepin._audit import audit
from dtypepin._pin import handles, verbs
from dtypepin.trainers import _overrider


@pytest.mark.parametrize(
    "module", [audit, handles, verbs, _overrider, suggest], ids=lambda m: m.__name__
)
def test_examples(module):
    found = doctest.testmod(module)
    assert found.attempted >= 4
    assert found.failed == 0
