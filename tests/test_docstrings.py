"""The examples in the docstrings do what they say."""

import doctest

import pytest

from dtypepin import _audit, _handles, _pin, _suggest
from dtypepin.trainers import _overrider


@pytest.mark.parametrize(
    "module", [_audit, _handles, _pin, _overrider, _suggest], ids=lambda m: m.__name__
)
def test_examples(module):
    found = doctest.testmod(module)
    assert found.attempted >= 4
    assert found.failed == 0
