"""``python -m dtypepin``."""

import subprocess
import sys

import pytest

from dtypepin import PinHandles, __main__


def run(*args):
    return subprocess.run(
        [sys.executable, "-m", "dtypepin", *args], capture_output=True, text=True, timeout=120
    )


def test_the_demonstration_pins_measures_and_undoes():
    done = run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("A transformer of 2 blocks under bf16 autocast")
    lines = done.stdout.splitlines()
    verdicts = {tuple(line.split()[:4]): line.split()[5] for line in lines if " forward " in line}
    assert verdicts["head", "Linear", "forward", "float32"] == "honoured"
    assert verdicts["blocks.0.norm1", "LayerNorm", "forward", "float32"] == "no"  # no effect
    dtypes = {line.split()[0]: line.split()[1:] for line in lines if line and line[0] != " "}
    assert dtypes["blocks.0.mlp.0"] == ["bfloat16", "float32"]
    assert dtypes["blocks.0.norm1"] == ["float32", "float32"]
    error = next(line for line in lines if line.startswith("error against fp32"))
    before, after = map(float, error.split()[-2:])
    assert after < before
    assert "The undo was exact" in done.stdout


def _hook(module):
    module.register_forward_hook(lambda *_: None)


def _pre_hook(module):
    module.register_forward_pre_hook(lambda *_: None)


def _attribute(module):
    module.left = 1


def _dict(module):
    module._parameters = type("Parameters", (dict,), {})(module._parameters)


@pytest.mark.parametrize("leave", [None, _hook, _pre_hook, _attribute, _dict])
def test_an_undo_that_is_not_exact_gives_1(monkeypatch, capsys, leave):
    def remove(pins):
        if leave is not None:
            real(pins)
            leave(pins[0].module)

    real = PinHandles.remove
    monkeypatch.setattr(sys, "argv", ["dtypepin"])
    monkeypatch.setattr(PinHandles, "remove", remove)
    assert __main__.main() == 1
    assert "The undo was NOT exact" in capsys.readouterr().out


@pytest.mark.parametrize("args", [["--wrong"], ["extra"]])
def test_a_wrong_argument_gives_usage_and_2(args):
    done = run(*args)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: python -m dtypepin")
