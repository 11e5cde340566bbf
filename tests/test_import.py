"""``import dtypepin`` costs little and brings in no framework."""

import subprocess
import sys

import pytest

CHECK = """
import sys, torch
before = set(sys.modules)
{first}
import dtypepin, dtypepin.trainers
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
foreign = new - {{"dtypepin", "typing_extensions", "torch"}} - set(sys.stdlib_module_names)
late = [name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))]
assert not foreign, foreign
assert not late, late
"""


def run(first):
    return subprocess.run(
        [sys.executable, "-c", CHECK.format(first=first)], capture_output=True, text=True
    )


def test_nothing_but_torch_is_imported():
    done = run("pass")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("first", ["import hypothesis", "import torch._dynamo"])
def test_the_test_above_can_fail(first):
    assert "AssertionError" in run(first).stderr
