"""A script: a device that no table of hasten knows, registered as PrivateUse1, and hasten on it.

Run by ``test_devices_private_use.py`` in a process of its own, since such a device stays for the
life of a process. Its tensors hold their numbers on the CPU, and an operator that mixes devices is
refused. Prints one JSON object.
"""

import json
import warnings

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import hasten
from hasten import devices
from hasten.devices import describing, runtime

_setup_privateuseone_for_python_backend("toy")
TOY = torch.device("toy:0")


class ToyTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, raw):
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=TOY,
        )
        wrapper.raw = raw
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def run(func, args, kwargs):
    leaves = pytree.tree_leaves((args, kwargs))
    toys = [leaf for leaf in leaves if isinstance(leaf, ToyTensor)]
    target = kwargs.get("device")
    if target is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = pytree.tree_map(lambda x: getattr(x, "raw", x), (args, kwargs))
    out = func(*args, **kwargs)
    on_toy = bool(toys) if target is None else torch.device(target).type == "toy"
    if not on_toy or "_local_scalar" in str(func):
        return out
    return pytree.tree_map(lambda x: ToyTensor(x) if isinstance(x, torch.Tensor) else x, out)


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def main():
    found = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found["without operators"] = str(hasten.device())
    found["warnings"] = [str(warning.message) for warning in caught]
    found["problem"] = devices.describe()[0].problem
    with Operators():
        found["auto"] = str(hasten.device())
        found["named"] = [str(hasten.device(spec)) for spec in ("toy", "toy:0", 0, "cpu")]
        try:
            hasten.device("toy:3")
        except hasten.DeviceUnavailable as error:
            found["absent"] = str(error)
        batch = {"x": torch.ones(2, 2), "y": [torch.zeros(3)]}
        moved = hasten.move(batch, "toy")
        found["moved"] = [str(moved["x"].device), str(moved["y"][0].device)]
        found["stays"] = hasten.move(moved, TOY) is moved
        found["back"] = hasten.move(moved, "cpu")["x"].tolist()
        found["same"] = str(hasten.same_device(moved))
        try:
            hasten.same_device(moved, batch)
        except hasten.DeviceMismatch as error:
            found["mismatch"] = str(error)
        found["described"] = [info.device for info in devices.describe()]
        rates = devices.measure(TOY, budget_s=1.0)
        found["measured"] = [bool(rates.matmul), bool(rates.transfers), rates.device]
    runtime.synchronize(TOY)
    runtime.reset_peak(TOY)
    runtime.empty_cache(TOY)
    runtime.manual_seed(TOY, 3)
    runtime.set_rng_state(TOY, runtime.rng_state(TOY))
    found["runtime"] = {
        "accelerator": str(runtime.accelerator()),
        "memory": runtime.memory(TOY),
        "peak": runtime.peak_bytes(TOY),
        "pins": runtime.can_pin(TOY),
        "autocast": list(runtime.autocast_dtypes(TOY)),
        "stream": runtime.stream(TOY) is not None,
        "name": runtime.name(TOY),
    }
    found["environment"] = describing.environment().build
    print(json.dumps(found))


main()
