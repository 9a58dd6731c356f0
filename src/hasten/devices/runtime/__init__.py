"""The one place that asks PyTorch about devices; everything else of hasten asks this package.

It evens out what differs between builds and backends: on a CPU build ``torch.accelerator`` has
no device and its calls raise; on a CUDA build without a GPU it names the compiled-for device
unless told to look; out-of-tree devices lack most functions; Apple's lacks indices. Here an
absent facility is None (or does nothing), never an error.

::

    backend    how each backend is asked
    builds     what this PyTorch is made for
    presence   which devices are here, whether they work, what they are called
    memory     how much there is and is used; errors that say it ran out
    queues     waiting, streams, events, pinned memory
    numbers    random states, formats that a device multiplies
"""

from __future__ import annotations

from hasten.devices.host import cores
from hasten.devices.runtime.backend import is_host
from hasten.devices.runtime.builds import architectures, build, failure
from hasten.devices.runtime.memory import (
    Memory,
    allocated_bytes,
    empty_cache,
    is_out_of_memory,
    memory,
    peak_bytes,
    reset_peak,
)
from hasten.devices.runtime.numbers import (
    autocast_dtypes,
    autocasts,
    dtype_support,
    fast_dtypes,
    float8_product,
    float32_products,
    has_float8,
    has_tf32,
    manual_seed,
    rng_state,
    set_rng_state,
)
from hasten.devices.runtime.presence import (
    accelerator,
    capability,
    compiled_for,
    count,
    devices,
    multiprocessors,
    name,
    properties,
    trial,
    with_index,
)
from hasten.devices.runtime.queues import (
    can_overlap,
    can_pin,
    collectives,
    copy_engines,
    current_stream,
    event,
    make_current,
    on_stream,
    stream,
    synchronize,
)

__all__ = [
    "Memory",
    "accelerator",
    "allocated_bytes",
    "architectures",
    "autocast_dtypes",
    "autocasts",
    "build",
    "can_overlap",
    "can_pin",
    "capability",
    "collectives",
    "compiled_for",
    "copy_engines",
    "cores",
    "count",
    "current_stream",
    "devices",
    "dtype_support",
    "empty_cache",
    "event",
    "failure",
    "fast_dtypes",
    "float8_product",
    "float32_products",
    "has_float8",
    "has_tf32",
    "is_host",
    "is_out_of_memory",
    "make_current",
    "manual_seed",
    "memory",
    "multiprocessors",
    "name",
    "on_stream",
    "peak_bytes",
    "properties",
    "reset_peak",
    "rng_state",
    "set_rng_state",
    "stream",
    "synchronize",
    "trial",
    "with_index",
]
