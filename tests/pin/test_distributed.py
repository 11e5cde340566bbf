"""DDP and FSDP2 with two real processes, started once by torchrun. D1, D2 of the cases."""

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch.distributed.fsdp

pytestmark = pytest.mark.multiprocess

HERE = os.path.dirname(__file__)
IN_F32 = ["(torch.float32, torch.float32, torch.float32)"]
needs_fully_shard = pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp, "fully_shard"), reason="fully_shard is public since 2.6"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("distributed") / "results.json"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([HERE, *filter(None, sys.path)])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, os.path.join(HERE, "distributed_worker.py"), str(path)],
        capture_output=True,
        text=True,
        env=env,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", ["ddp pin first", "ddp wrap first", "ddp stored"])
def test_ddp(results, name):  # D1
    found = results[name]
    assert found["seen"] == IN_F32
    assert found["agree"]
    assert found["error"] < (1e-2 if name == "ddp stored" else 1e-6)  # bf16 gradients are reduced
    norm = {k: v for k, v in found["grad dtypes"].items() if k.startswith("norm")}
    assert set(norm.values()) == {"torch.float32"}


@pytest.mark.parametrize("how", ["through the wrapper", "through module"])
def test_changing_a_dtype_that_ddp_owns_is_refused(results, how):  # D1
    text = results["ddp refusals"][how]
    assert "DistributedDataParallel" in text
    assert "pin before wrapping the model, or leave override_parameters off" in text
    assert results["ddp refusals"]["untouched"]


def test_giving_a_dtype_back_that_ddp_owns_warns(results):
    (text,) = results["ddp remove"]["warnings"]
    assert "DistributedDataParallel" in text
    assert "wrap the model anew" in text
    assert results["ddp remove"]["dtype"] == "torch.bfloat16"


def test_check_leaves_alone_what_ddp_owns(results):
    found = results["ddp check"]
    assert found["names"] == ["norm.weight", "norm.bias"]
    (text,) = found["warnings"]
    assert "DistributedDataParallel owns them" in text
    assert found["agree"]


@pytest.mark.trainers
@pytest.mark.parametrize("override", [False, True], ids=["cast", "stored"])
def test_lightning_with_ddp(results, override):
    pytest.importorskip("lightning")
    found = results[f"lightning ddp {override}"]
    assert found["ranks"] == 2
    assert found["seen"] == IN_F32
    assert found["error"] < (1e-2 if override else 1e-6)
    dtypes = found["grad dtypes"]
    assert dtypes["norm.weight"] == "torch.float32"
    assert dtypes["a.weight"] == ("torch.bfloat16" if override else "torch.float32")
    assert found["left"] == 0


@needs_fully_shard
@pytest.mark.parametrize("order", ["pin first", "shard first"])
@pytest.mark.parametrize(
    ("policy", "reshard", "checkpointed"), list(itertools.product([False, True], repeat=3))
)
def test_fully_shard(results, policy, reshard, checkpointed, order):  # D2
    found = results[f"fsdp {policy} {reshard} {checkpointed} {order}"]
    assert found["seen"] == IN_F32
    assert found["grad dtypes"] == ["torch.float32"]
    # The reference runs under autocast where the policy computes in bf16, rounding elsewhere.
    assert found["error"] < (2e-2 if policy else 1e-6)
    text = found["override refused"]
    assert "leave override_parameters off" in text
    assert found["removed"] == 1
