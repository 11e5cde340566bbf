"""The examples in the docstrings do what they say."""

import doctest

import pytest

from dtypepin import _handles, _pin
from dtypepin.trainers import _overrider


@pytest.mark.parametrize("module", [_handles, _pin, _overrider], ids=lambda m: m.__name__)
def test_examples(module):
    found = doctest.testmod(module)
    assert found.attempted >= 5
    assert found.failed == 0
