"""The random generators of the simulated devices: one each, apart from the CPU's."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hasten.simulate.plan import Plan

_DEFAULT_SEED = 67280421310721  # PyTorch's


# By the address of PyTorch's object: kernels are handed another Python object for it.
_known: weakref.WeakValueDictionary[int, DeviceGenerator] = weakref.WeakValueDictionary()


class DeviceGenerator(torch._C.Generator):
    """A generator that says it is on ``cuda:index``; its numbers are the CPU algorithm's."""

    index: int = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The simulated device."""
        return torch.device("cuda", self.index)

    def __reduce__(self) -> Any:
        return (_rebuilt, (self.index, self.get_state()))


def _rebuilt(index: int, state: torch.Tensor) -> DeviceGenerator:
    generator = made(index)
    generator.set_state(state)
    return generator


def made(index: int) -> DeviceGenerator:
    """A generator of the given device, seeded as PyTorch seeds a new one."""
    generator = DeviceGenerator()
    generator.index = index
    address: Any = generator
    _known[address._cdata] = generator
    generator.manual_seed(_DEFAULT_SEED)
    return generator


class Randomness:
    """The default generator of each device, and how a random operator gets one."""

    def __init__(self, count: int) -> None:
        self.generators = [made(index) for index in range(count)]
        self._lock = threading.Lock()
        seed = torch.default_generator.initial_seed()
        self.seed_all(seed)

    def seed_all(self, seed: int) -> None:
        """Seed each device's generator."""
        for generator in self.generators:
            generator.manual_seed(seed)

    def run(self, plan: Plan, args: list[Any], kwargs: dict[str, Any], index: int) -> Any:
        """Run a random operator of the CPU with the device's generator.

        Raises:
            RuntimeError: the call gives a generator of the CPU or of another device.
        """
        if plan.generator:
            given = plan.value("generator", tuple(args), kwargs)
            if given is None:
                return plan.op(*args, **kwargs | {"generator": self.generators[index]})
            if given._cdata not in _known:
                raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
            return plan.op(*args, **kwargs)
        own, default = self.generators[index], torch.default_generator
        with self._lock:
            kept = default.get_state()
            default.set_state(own.get_state())
            try:
                return plan.op(*args, **kwargs)
            finally:
                own.set_state(default.get_state())
                default.set_state(kept)


def generator_class() -> Any:
    """What stands for `torch.Generator` while a simulation runs."""
    from hasten.simulate.naming import index_of_name

    class _Meta(type):
        def __instancecheck__(cls, x: object) -> bool:
            return isinstance(x, torch._C.Generator)

    class Generator(metaclass=_Meta):
        """`torch.Generator`, that also makes generators of the simulated devices."""

        def __new__(cls, device: Any = None) -> Any:
            index = index_of_name(device)
            if index is None:
                return torch._C.Generator() if device is None else torch._C.Generator(device)
            return made(index)

    return Generator
