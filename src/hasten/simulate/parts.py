"""Parts of `torch.cuda` beside devices, memory and streams: the runtime, NVML, graphs, marks."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hasten.simulate import current
from hasten.simulate.naming import checked, index_of_name
from hasten.simulate.wording import missing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hasten.simulate.memory import Memory


def _memory(device: Any = None) -> Memory:
    index = index_of_name(device)
    index = current.thread.device if index is None else checked(index)
    found: Memory = current.require().memories[index]
    return found


def _memory_info(device: Any = None) -> tuple[int, int]:
    memory = _memory(device)
    return memory.total_bytes - memory.reserved, memory.total_bytes


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _figure(value: int) -> Any:
    def figure(device: Any = None) -> int:
        _memory(device)
        return value

    return figure


def _success(*_: Any) -> int:
    return 0


RUNTIME = SimpleNamespace(
    cudaError=SimpleNamespace(success=0),
    cudaGetErrorString=lambda error: "no error" if not error else "unknown error",
    cudaProfilerStart=_success,
    cudaProfilerStop=_success,
    cudaHostRegister=_success,
    cudaHostUnregister=_success,
    cudaStreamCreate=_success,
    cudaStreamDestroy=_success,
    cudaMemGetInfo=_memory_info,
)
"""What ``torch.cuda.cudart()`` returns."""


def idle_figures() -> dict[str, Any]:
    """What NVML says of a device that does nothing: no work and no heat are modelled."""
    return {
        "utilization": _figure(0),
        "memory_usage": _figure(0),
        "temperature": _figure(30),
        "power_draw": _figure(0),
        "clock_rate": _figure(0),
        "device_memory_used": lambda device=None: _memory(device).reserved,
        "list_gpu_processes": lambda device=None: (
            f"GPU:{_memory(device).index}\nno processes are running"
        ),
    }


def refused(name: str, what: str) -> Any:
    """A class of that name that says it is not modelled when somebody makes one."""

    def make(cls: Any, *_: Any, **__: Any) -> Any:
        raise missing(what)

    return type(name, (), {"__new__": make, "__module__": "torch.cuda"})


def graph_functions() -> dict[str, Any]:
    """The attributes of `torch.cuda.graphs`."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise missing("CUDA graphs")

    return {
        "CUDAGraph": refused("CUDAGraph", "CUDA graphs"),
        "graph": refused("graph", "CUDA graphs"),
        "graph_pool_handle": refuse,
        "make_graphed_callables": refuse,
        "is_current_stream_capturing": lambda: False,
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
