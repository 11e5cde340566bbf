"""Runs in two processes; rank 0 writes what happened as JSON. Started by test_distributed.py."""

import copy
import importlib.util
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import dtypepin
from dtypepin import PinError

BF16, F32 = torch.bfloat16, torch.float32
RESULTS = {}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), Norm(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(self.norm(self.a(x)))


class Norm(nn.LayerNorm):
    """Records what it computes in."""

    def forward(self, x):
        weight = self.weight
        out = nn.functional.layer_norm(x, self.normalized_shape, weight, self.bias, self.eps)
        self.__dict__.setdefault("seen", []).append((x.dtype, weight.dtype, out.dtype))
        return out


def net():
    torch.manual_seed(0)
    return Net()


def data():
    torch.manual_seed(1)
    return torch.randn(2, 6, 8)  # one batch a rank


def refusal(act):
    try:
        act()
    except PinError as error:
        return str(error)
    return "not refused"


def full(grad):
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def reference(dtype, autocast):
    """The same step in one process, on both batches, pinned the same way."""
    model = net().to(dtype)
    dtypepin.apply(model, "^norm$")
    for x in data():
        with torch.autocast("cpu", BF16, enabled=autocast):  # each batch with its own weight cache
            loss = model(x.to(dtype)).float().pow(2).mean()
        (loss / 2).backward()
    return {name: value.grad.float() for name, value in model.named_parameters()}


def compare(grads, expected):
    return max(
        ((full(grad).float() - expected[name]).norm() / expected[name].norm()).item()
        for name, grad in grads.items()
    )


def agree(value):
    found = [torch.empty_like(value) for _ in range(2)]
    dist.all_gather(found, value.contiguous())
    return torch.equal(*found)


def ddp(rank, name, order, override):
    """DDP under autocast: pin before wrapping or after."""
    model = net()
    if override:
        model.bfloat16()
    dtype = BF16 if override else F32

    def pin(target):
        dtypepin.apply(target, "^norm$", override_parameters=override)

    if order == "pin first":
        pin(model)
    wrapped = DistributedDataParallel(model)
    if order == "wrap first":
        pin(wrapped)
    with torch.autocast("cpu", BF16, enabled=not override):
        out = wrapped(data()[rank].to(dtype))
    out.float().pow(2).mean().backward()
    grads = {key: value.grad for key, value in model.named_parameters()}
    RESULTS[name] = {
        "seen": sorted({str(dtypes) for dtypes in model.norm.seen}),
        "error": compare(grads, reference(dtype, not override)),
        "agree": all(agree(grad.float()) for grad in grads.values()),
        "grad dtypes": {key: str(grad.dtype) for key, grad in grads.items()},
    }


def fsdp(rank, name, policy, reshard, checkpointed, order):
    """fully_shard of each layer and the root."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = net()
    if checkpointed:
        model.norm = checkpoint_wrapper(model.norm)
    norm = model.norm._checkpoint_wrapped_module if checkpointed else model.norm
    if order == "pin first":
        dtypepin.apply(model, "^norm$")
    kwargs = {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16)} if policy else {}
    for part in (model.a, model.norm, model.b, model):
        fully_shard(part, reshard_after_forward=reshard, **kwargs)
    if order == "shard first":
        dtypepin.apply(model, "^norm$")
    model(data()[rank]).float().pow(2).mean().backward()
    grads = {
        key.replace("_checkpoint_wrapped_module.", ""): value.grad
        for key, value in model.named_parameters()
    }
    expected = reference(F32, autocast=policy)
    RESULTS[name] = {
        "seen": sorted({str(dtypes) for dtypes in norm.seen}),
        "error": compare(grads, expected),
        "grad dtypes": sorted({str(grad.dtype) for grad in grads.values()}),
        "override refused": refusal(
            lambda: dtypepin.apply(model, "^norm$", dtype="float64", override_parameters=True)
        ),
        "removed": dtypepin.unpin(model),
    }


def ddp_refusals():
    model = net().bfloat16()
    wrapped = DistributedDataParallel(model)
    before = copy.deepcopy(model.state_dict())
    RESULTS["ddp refusals"] = {
        "through the wrapper": refusal(
            lambda: dtypepin.apply(wrapped, "^norm$", override_parameters=True)
        ),
        "through module": refusal(
            lambda: dtypepin.apply(wrapped.module, "^norm$", override_parameters=True)
        ),
        "untouched": all(
            torch.equal(value, before[key]) and value.dtype is before[key].dtype
            for key, value in model.state_dict().items()
        )
        and not model.norm._forward_hooks,
    }


def ddp_remove_while_wrapped():
    import warnings

    model = net().bfloat16()
    pins = dtypepin.apply(model, "^norm$", override_parameters=True)
    wrapped = DistributedDataParallel(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pins.remove()
    RESULTS["ddp remove"] = {
        "warnings": [str(found.message) for found in caught],
        "dtype": str(wrapped.module.norm.weight.dtype),
    }


def ddp_check():
    """``check`` where DDP has laid out a parameter in the dtype that it was cast to."""
    import warnings

    model = net()
    pins = dtypepin.apply(model, "^norm$", override_parameters=True)
    model.bfloat16()
    wrapped = DistributedDataParallel(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names = pins.check()
    for _ in range(2):
        wrapped(data()[dist.get_rank()].bfloat16()).float().pow(2).mean().backward()
    expected = {name: value.grad.clone() for name, value in model.named_parameters()}
    for grad in expected.values():
        dist.all_reduce(grad)
    RESULTS["ddp check"] = {
        "warnings": [str(found.message) for found in caught],
        "names": names,
        "agree": all(
            torch.allclose(2 * value.grad, expected[name], rtol=2e-2, atol=1e-3)
            for name, value in model.named_parameters()
        ),
    }


def lightning_ddp(rank, override):
    """A fit of Lightning's in both processes: the callback, its DDP strategy, gradients reduced."""
    import warnings

    import lightning.pytorch as lightning

    from dtypepin.trainers.lightning import PinDtypeCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()
            self.grads = {}

        def training_step(self, batch, number):
            return self.net(batch.to(self.net.a.weight.dtype)).float().pow(2).mean()

        def on_before_optimizer_step(self, optimizer):
            self.grads = {name: value.grad for name, value in self.net.named_parameters()}

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Module()
    callback = PinDtypeCallback("norm$", override_parameters=override)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        precision="bf16-true" if override else "bf16-mixed",
        callbacks=[callback],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning has some of its own
        trainer.fit(module, torch.utils.data.DataLoader(list(data()), batch_size=None))
    expected = reference(BF16 if override else F32, autocast=not override)
    RESULTS[f"lightning ddp {override}"] = {
        "ranks": trainer.world_size,
        "seen": sorted({str(seen) for seen in module.net.norm.seen}),
        "grad dtypes": {name: str(grad.dtype) for name, grad in module.grads.items()},
        "error": compare(module.grads, expected),
        "left": len(module.net.norm._forward_hooks),
    }


def main(path):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    for order in ("pin first", "wrap first"):
        ddp(rank, f"ddp {order}", order, override=False)
    ddp(rank, "ddp stored", "pin first", override=True)
    ddp_refusals()
    ddp_remove_while_wrapped()
    ddp_check()
    if hasattr(dist.fsdp, "fully_shard"):
        from torch.distributed.device_mesh import init_device_mesh

        init_device_mesh("cpu", (2,))
        for policy in (False, True):
            for reshard in (False, True):
                for checkpointed in (False, True):
                    for order in ("pin first", "shard first"):
                        name = f"fsdp {policy} {reshard} {checkpointed} {order}"
                        fsdp(rank, name, policy, reshard, checkpointed, order)
    if importlib.util.find_spec("lightning"):
        for override in (False, True):
            lightning_ddp(rank, override)
    if rank == 0:
        with open(path, "w") as file:
            json.dump(RESULTS, file)
    dist.barrier()
    # Not ``destroy_process_group``: in torch 2.4 gloo's can wait for ever for a rank that is gone.
    os._exit(0)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(sys.argv[1])
