"""What every test gets: one seed, no frame left behind, autocast as it was."""

from pathlib import Path

import pytest
import torch

from dtypepin._pin import frames

torch.set_num_threads(1)  # the models are tiny

#: Needs frameworks that the other tests do not; ``pytest tests/zoo``, as ``tox -e zoo`` does.
collect_ignore = ["zoo"]


def pytest_addoption(parser):
    parser.addoption("--overwrite", action="store_true", help="write the golden files anew")


@pytest.fixture(autouse=True)
def clean():
    torch.manual_seed(0)
    yield
    assert frames.current() is None, "a test left a pinned region open"
    assert not torch.is_autocast_enabled("cpu"), "a test left autocast on"


@pytest.fixture
def golden(request):
    """Compare a text with a file of tests/golden; ``pytest --overwrite`` writes it anew."""

    def compare(name, text):
        path = Path(__file__).parent / "golden" / name
        if request.config.getoption("--overwrite"):
            path.write_text(text + "\n", encoding="utf-8")
        assert text + "\n" == path.read_text(encoding="utf-8")

    return compare
