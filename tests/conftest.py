"""What every test gets: one seed, no frame left behind, autocast as it was."""

import pytest
import torch

from dtypepin import _region

torch.set_num_threads(1)  # the models are tiny


@pytest.fixture(autouse=True)
def clean():
    torch.manual_seed(0)
    yield
    assert _region.current() is None, "a test left a pinned region open"
    assert not torch.is_autocast_enabled("cpu"), "a test left autocast on"
