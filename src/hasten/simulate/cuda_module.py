"""What the functions of `torch.cuda` and `torch.accelerator` answer while a simulation runs."""

from __future__ import annotations

from typing import Any

import torch

from hasten.simulate import allocator, current, parts, streams
from hasten.simulate.backend import BACKEND
from hasten.simulate.naming import backend_device, checked, index_of_name, is_simulated
from hasten.simulate.properties import DeviceProperties
from hasten.simulate.tensors import DTYPES


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
    return _properties(device).name


def _capability(device: Any = None) -> tuple[int, int]:
    found = _properties(device)
    return found.major, found.minor


def _properties(device: Any = None) -> DeviceProperties:
    index = device if isinstance(device, int) else current.thread.device
    if isinstance(device, (str, torch.device)):
        named = torch.device(device)
        if named.type not in ("cuda", BACKEND):
            raise ValueError(f"Expected a cuda device, but got: {device}")
        index = current.thread.device if named.index is None else named.index
    session = _session()
    session.touch()
    if not 0 <= index < session.count:
        raise AssertionError("Invalid device id")
    spec = session.spec
    return DeviceProperties(
        name=spec.name,
        major=spec.capability[0],
        minor=spec.capability[1],
        total_memory=session.memories[index].total_bytes,
        multi_processor_count=spec.processors,
        uuid=f"00000000-0000-0000-0000-{index:012d}",
        pci_bus_id=index + 1,
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


def _memory_stats(device: Any = None) -> dict[str, Any]:
    found: dict[str, Any] = torch.cuda.memory.memory_stats(_index(device))
    return found


def _reset_peak(device: Any = None) -> None:
    allocator.reset_peak(_index(device))


def _reset_accumulated(device: Any = None) -> None:
    allocator.reset_accumulated(_index(device))


def _set_sync_debug_mode(debug_mode: int | str) -> None:
    modes = {"default": 0, "warn": 1, "error": 2}
    if isinstance(debug_mode, str) and debug_mode not in modes:
        raise RuntimeError(
            "invalid value of debug_mode, expected one of `default`, `warn`, `error`"
        )
    _session().sync_debug_mode = modes[debug_mode] if isinstance(debug_mode, str) else debug_mode


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


def _accelerator_capability(device: Any = None) -> dict[str, Any]:
    _index(device)
    kinds = {x for x in vars(torch).values() if isinstance(x, torch.dtype)}
    return {"supported_dtypes": {x for x in kinds if not str(x).startswith("torch.q")}}


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
        "get_stream_from_external": streams.external,
        "Event": streams.Event,
        "StreamContext": streams.StreamContext,
        "stream": streams.StreamContext,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "set_stream": streams.set_stream,
        "is_current_stream_capturing": lambda: False,
        "ipc_collect": _nothing,
        "empty_cache": allocator.empty_cache,
        "memory_allocated": _figure("allocated_bytes"),
        "max_memory_allocated": _figure("peak_bytes"),
        "memory_reserved": _figure("reserved_bytes"),
        "max_memory_reserved": _figure("peak_reserved_bytes"),
        "memory_cached": _figure("reserved_bytes"),
        "max_memory_cached": _figure("peak_reserved_bytes"),
        "reset_peak_memory_stats": _reset_peak,
        "mem_get_info": _mem_get_info,
        "manual_seed": _manual_seed,
        "manual_seed_all": lambda seed: _session().random.seed_all(int(seed)),
        "seed": _seed,
        "seed_all": _seed_all,
        "initial_seed": _initial_seed,
        "get_rng_state": _get_rng_state,
        "get_rng_state_all": _get_rng_state_all,
        "set_rng_state": _set_rng_state,
        "set_rng_state_all": _set_rng_state_all,
        "get_sync_debug_mode": lambda: int(_session().sync_debug_mode),
        "set_sync_debug_mode": _set_sync_debug_mode,
        **parts.idle_figures(),
        **parts.graph_functions(),
        "MemPool": parts.refused("MemPool", "memory pools"),
        "_cudart": parts.RUNTIME,
        "_initialized": True,
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
        "empty_cache": allocator.empty_cache,
        "memory_allocated": _figure("allocated_bytes"),
        "max_memory_allocated": _figure("peak_bytes"),
        "memory_reserved": _figure("reserved_bytes"),
        "max_memory_reserved": _figure("peak_reserved_bytes"),
        "memory_stats": _memory_stats,
        "reset_peak_memory_stats": _reset_peak,
        "reset_accumulated_memory_stats": _reset_accumulated,
        "get_memory_info": _mem_get_info,
        "empty_host_cache": _nothing,
        "get_device_capability": _accelerator_capability,
        "Graph": parts.refused("Graph", "CUDA graphs"),
    }


def _shared(module: Any, functions: dict[str, Any]) -> dict[str, Any]:
    return {name: functions[name] for name in vars(module) if name in functions}


def module_functions() -> dict[Any, dict[str, Any]]:
    """The modules that hold some of the same functions again, and those of each."""
    functions, accelerator = cuda_functions(), accelerator_functions()
    found = {
        module: _shared(module, functions)
        for module in (
            torch.cuda.random,
            torch.cuda.memory,
            torch.cuda.streams,
            torch.cuda.graphs,
        )
    }
    # PyTorch's own, over `allocator`.
    for name in ("memory_stats", "reset_peak_memory_stats"):
        found[torch.cuda.memory].pop(name, None)
    found[torch.accelerator.memory] = _shared(torch.accelerator.memory, accelerator)
    return found


__all__ = ["accelerator_functions", "cuda_functions", "module_functions"]
