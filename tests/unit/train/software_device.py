"""A script: training on an accelerator made of software, in a process of its own.

Such a device stays for the life of a process; ``test_train_software_device.py`` runs this one. Its
tensors hold their numbers on the CPU and an operator that mixes devices is refused. What reads a
value back to the host, which on a real accelerator waits for all the work queued before it, is
counted. Prints one JSON object.
"""

import json
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.data import DataLoader
from train_helpers import QUIET, batches, loader, losses, mlp, points, sgd, state, trainer

import hasten
from hasten.devices import runtime
from hasten.errors import NonFiniteLoss

_setup_privateuseone_for_python_backend("soft")
SOFT = torch.device("soft:0")
reads = []


class SoftTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, raw):
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=SOFT,
        )
        wrapper.raw = raw
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def run(func, args, kwargs):
    name, target = str(func), kwargs.get("device")
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    soft = [x for x in tensors if isinstance(x, SoftTensor)]
    if "record_stream" in name:
        return None
    to_host = target is not None and torch.device(target).type == "cpu"
    if soft and (to_host or "_local_scalar" in name or "is_nonzero" in name):
        reads.append(name)
    mixed = any(x.dim() for x in tensors if not isinstance(x, SoftTensor))
    if soft and mixed and "copy" not in name and "index" not in name:
        raise RuntimeError(f"Expected all tensors to be on the same device (running {name})")
    if target is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = pytree.tree_map(lambda x: getattr(x, "raw", x), (args, kwargs))
    out = func(*args, **kwargs)
    on_soft = bool(soft) if target is None else torch.device(target).type == "soft"
    if not on_soft or "_local_scalar" in name:
        return out
    own = {id(x.raw): x for x in soft}  # an operator that works in place gives its own argument

    def wrapped(x):
        if not isinstance(x, torch.Tensor):
            return x
        return own[id(x)] if id(x) in own else SoftTensor(x)

    return pytree.tree_map(wrapped, out)


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


@contextmanager
def untimed_events():
    """This device's events know no time."""
    event = runtime.event
    runtime.event = lambda device, timing=False: None if timing else event(device, timing=False)
    try:
        yield
    finally:
        runtime.event = event


class Watching(nn.Module):
    """A loss that notes how much was read from its second call to its fifth, within an epoch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 3.0]))
        self.calls, self.read = 0, []

    def forward(self, outputs, labels):
        self.calls += 1
        if self.calls == 2:
            reads.clear()
        if self.calls == 5:
            self.read = list(reads)
        return nn.functional.cross_entropy(outputs, labels, weight=self.weight)


def train(device, **options):
    loss = Watching()
    training = trainer(loss=loss, device=device, **options)
    result = training.fit(loader(), loader(points(20, 5)), epochs=2)
    return losses(result), loss.read, training


def same(**options):
    """Whether losses are those of the CPU, what was read, and where parameters and loss are."""
    with Operators():
        here, read, training = train(SOFT, **options)
        where = {str(p.device) for p in (*training.model.parameters(), training.loss.weight)}
    there, _, _ = train("cpu", **options)
    return {"same": here == there, "read": read, "where": sorted(where)}


def own_loop():
    hasten.Run(**QUIET)  # seeds
    run = hasten.Run(**QUIET | {"device": SOFT})
    model = mlp()
    model, optimizer = run.prepare(model, sgd(model.parameters()))
    where = set()
    for _ in run.epochs(1):
        for place, (data, labels) in enumerate(run.batches(DataLoader(points(), batch_size=8))):
            where.add(str(data.device))
            if place == 1:
                reads.clear()
            run.backward(nn.functional.cross_entropy(model(data), labels))
            run.step(optimizer)
            if place == 4:
                found = list(reads)
    return {"where": sorted(where), "read": found, "loss": run.history[0].loss}


def bad_loss():
    given = batches([4] * 10)
    given[6][0][1, 1] = float("nan")
    try:
        trainer(device=SOFT).fit(given, epochs=1)
    except NonFiniteLoss as error:
        return {"step": error.step, "text": str(error)}
    return {}


def main():
    found = {}
    with untimed_events():
        found["plain"] = same(log_every=1000)
        found["all"] = same(
            log_every=1000,
            accumulate=2,
            clip_norm=0.5,
            optimizer=torch.optim.Adam,
            scheduler=lambda o, n: lr_scheduler.LinearLR(o, total_iters=n),
            schedule_per="step",
        )
        found["logged"] = same(log_every=1)
        with Operators():
            found["own"] = own_loop()
            found["bad"] = bad_loss()
            torch.manual_seed(1)
            training = trainer(device=SOFT)
            training.fit(loader(), epochs=1)
            found["host"] = {name: str(v.device) for name, v in state(training.model).items()}
    print(json.dumps(found))


main()
