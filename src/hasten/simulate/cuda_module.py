"""What the functions of `torch.cuda` and `torch.accelerator` answer while a simulation runs."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from hasten.simulate import current, streams
from hasten.simulate.naming import backend_device, checked, index_of_name, is_simulated
from hasten.simulate.tensors import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator


def _index(device: Any) -> int:
    found = index_of_name(device)
    if found is None:
        if device is None:
            return current.thread.device
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return checked(found)


def _session() -> Any:
    return current.require()


def _lazy_init() -> None:
    _session().touch()


def _current_device() -> int:
    _lazy_init()
    return current.thread.device


def _set_device(device: Any) -> None:
    index = device if isinstance(device, int) else _index(device)
    if index >= 0:
        _session().touch()
        current.thread.device = checked(index)


class _Device:
    """Stands for the context manager ``torch.cuda.device``."""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device) if not isinstance(device, int) else device
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current.thread.device
        if self.idx >= 0:
            current.thread.device = checked(self.idx)

    def __exit__(self, *_: object) -> None:
        current.thread.device = self.prev_idx


class _DeviceOf(_Device):
    """Stands for ``torch.cuda.device_of``."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.get_device() if is_simulated(obj) else -1)


def _name(device: Any = None) -> str:
    _index(device)
    return str(_session().spec.name)


def _capability(device: Any = None) -> tuple[int, int]:
    _index(device)
    found: tuple[int, int] = _session().spec.capability
    return found


def _properties(device: Any = None) -> SimpleNamespace:
    index = _index(device)
    spec, memory = _session().spec, _session().memories[index]
    return SimpleNamespace(
        name=spec.name,
        major=spec.capability[0],
        minor=spec.capability[1],
        total_memory=memory.total_bytes,
        multi_processor_count=spec.processors,
        is_integrated=0,
        is_multi_gpu_board=0,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        warp_size=32,
        gcnArchName="",
        uuid=f"simulated-{index}",
        L2_cache_size=40 << 20,
    )


def _synchronize(device: Any = None) -> None:
    index = _index(device)
    session = _session()
    done = max([session.queues[index][0].done_s, session.queue(index).done_s])
    session.wait_for(done, "synchronize", index)


def _figure(name: str) -> Any:
    def figure(device: Any = None) -> int:
        return int(getattr(_session().figures(_index(device)), name))

    return figure


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    memory = _session().memories[_index(device)]
    return memory.total_bytes - memory.reserved, memory.total_bytes


def _memory_stats(device: Any = None) -> dict[str, int]:
    memory = _session().memories[_index(device)]
    return {
        "allocated_bytes.all.current": memory.allocated,
        "allocated_bytes.all.peak": memory.peak,
        "reserved_bytes.all.current": memory.reserved,
        "reserved_bytes.all.peak": memory.peak_reserved,
        "allocation.all.allocated": memory.allocations,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def _memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    return "\n".join(f"{name}: {value}" for name, value in _memory_stats(device).items())


def _empty_cache() -> None:
    for memory in _session().memories:
        memory.empty_cache()


def _reset_peak(device: Any = None) -> None:
    _session().memories[_index(device)].reset_peak()


def _fraction(fraction: float, device: Any = None) -> None:
    memory = _session().memories[_index(device)]
    memory.limit_bytes = int(memory.total_bytes * fraction)


def _manual_seed(seed: int) -> None:
    _session().random.generators[current.thread.device].manual_seed(int(seed))


def _seed() -> None:
    _session().random.generators[current.thread.device].seed()


def _seed_all() -> None:
    generators = _session().random.generators
    seed = generators[0].seed()
    _session().random.seed_all(seed)


def _initial_seed() -> int:
    return int(_session().random.generators[current.thread.device].initial_seed())


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    state: torch.Tensor = _session().random.generators[_index(device)].get_state()
    return state


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    _session().random.generators[_index(device)].set_state(new_state)


def _get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in _session().random.generators]


def _set_rng_state_all(new_states: Any) -> None:
    for generator, state in zip(_session().random.generators, new_states, strict=False):
        generator.set_state(state)


class _OldType(type):
    def __instancecheck__(cls, x: object) -> bool:
        return is_simulated(x) and x.dtype == cls.dtype  # type: ignore[attr-defined]


def _old_type(name: str, dtype: torch.dtype) -> Any:
    """Stands for ``torch.cuda.FloatTensor`` and its like."""

    def make(cls: Any, *args: Any, device: Any = None) -> torch.Tensor:
        target = backend_device("cuda" if device is None else device)
        if args and not isinstance(args[0], (int, torch.Size)):
            made = (
                torch.tensor(args[0], dtype=dtype)
                if not isinstance(args[0], torch.Tensor)
                else args[0].to(dtype)
            )
        else:
            made = torch.empty(*args or (0,), dtype=dtype)
        return made.to(target)

    return _OldType(
        name, (), {"__new__": make, "dtype": dtype, "is_cuda": True, "__module__": "torch.cuda"}
    )


def _nothing(*_: Any, **__: Any) -> None:
    return None


def cuda_functions() -> dict[str, Any]:
    """The attributes of `torch.cuda`."""
    count = _session().count
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: bool(_session().initialised),
        "init": _lazy_init,
        "_lazy_init": _lazy_init,
        "_is_in_bad_fork": lambda: bool(_session().bad_fork),
        "device_count": lambda: count,
        "current_device": _current_device,
        "set_device": _set_device,
        "device": _Device,
        "device_of": _DeviceOf,
        "get_device_name": _name,
        "get_device_capability": _capability,
        "get_device_properties": _properties,
        "can_device_access_peer": lambda a, b: True,
        "get_arch_list": lambda: ["sm_{}{}".format(*_session().spec.capability)],
        "is_bf16_supported": lambda including_emulation=True: (
            including_emulation or _session().spec.capability >= (8, 0)
        ),
        "is_tf32_supported": lambda: _session().spec.capability >= (8, 0),
        "synchronize": _synchronize,
        "Stream": streams.Stream,
        "ExternalStream": streams.Stream,
        "Event": streams.Event,
        "StreamContext": streams.StreamContext,
        "stream": streams.StreamContext,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "set_stream": streams.set_stream,
        "is_current_stream_capturing": lambda: False,
        "ipc_collect": _nothing,
        "empty_cache": _empty_cache,
        "memory_allocated": _figure("allocated_bytes"),
        "max_memory_allocated": _figure("peak_bytes"),
        "memory_reserved": _figure("reserved_bytes"),
        "max_memory_reserved": _figure("peak_reserved_bytes"),
        "memory_cached": _figure("reserved_bytes"),
        "max_memory_cached": _figure("peak_reserved_bytes"),
        "reset_peak_memory_stats": _reset_peak,
        "reset_max_memory_allocated": _reset_peak,
        "reset_max_memory_cached": _reset_peak,
        "reset_accumulated_memory_stats": _nothing,
        "mem_get_info": _mem_get_info,
        "memory_stats": _memory_stats,
        "memory_summary": _memory_summary,
        "set_per_process_memory_fraction": _fraction,
        "manual_seed": _manual_seed,
        "manual_seed_all": lambda seed: _session().random.seed_all(int(seed)),
        "seed": _seed,
        "seed_all": _seed_all,
        "initial_seed": _initial_seed,
        "get_rng_state": _get_rng_state,
        "get_rng_state_all": _get_rng_state_all,
        "set_rng_state": _set_rng_state,
        "set_rng_state_all": _set_rng_state_all,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": _nothing,
        "utilization": lambda device=None: 0,
        "default_generators": tuple(_session().random.generators),
    }
    for name, dtype in DTYPES.items():
        functions[name] = _old_type(name, dtype)
    return functions


def accelerator_functions() -> dict[str, Any]:
    """The attributes of `torch.accelerator`."""
    count = _session().count
    return {
        "is_available": lambda: True,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "device_count": lambda: count,
        "current_device_index": lambda: current.thread.device,
        "current_device_idx": lambda: current.thread.device,
        "set_device_index": _set_device,
        "set_device_idx": _set_device,
        "device_index": _Device,
        "current_stream": streams.current_stream,
        "set_stream": streams.set_stream,
        "synchronize": _synchronize,
        "empty_cache": _empty_cache,
        "memory_allocated": _figure("allocated_bytes"),
        "max_memory_allocated": _figure("peak_bytes"),
        "memory_reserved": _figure("reserved_bytes"),
        "max_memory_reserved": _figure("peak_reserved_bytes"),
        "memory_stats": _memory_stats,
        "reset_peak_memory_stats": _reset_peak,
        "reset_accumulated_memory_stats": _nothing,
        "get_memory_info": _mem_get_info,
    }


@contextmanager
def _range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def nvtx_functions() -> dict[str, Any]:
    """The attributes of `torch.cuda.nvtx`: marks that nobody reads."""
    return {
        "range_push": lambda msg: 0,
        "range_pop": lambda: 0,
        "range_start": lambda msg: 0,
        "range_end": _nothing,
        "mark": _nothing,
        "range": _range,
    }


def random_functions() -> dict[str, Any]:
    """The attributes of `torch.cuda.random`."""
    functions = cuda_functions()
    return {name: functions[name] for name in vars(torch.cuda.random) if name in functions}


__all__ = ["accelerator_functions", "cuda_functions", "nvtx_functions", "random_functions"]
