"""A message on its way: pickled, its tensors and arrays in memory that both processes know.

PyTorch's own pickling leaves a tensor's memory with the process that made it, which has to answer
when the message is opened: a worker that is stopped, or dead, loses what it had sent. Here what
has been sent asks nothing more of its sender.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from pickle import PickleBuffer
from typing import Any

import numpy as np
import torch
from torch.multiprocessing import reductions

from hasten.feed.buffers import Array
from hasten.feed.channel import MOST_FILES
from hasten.feed.segments import Arena, Borrowed, Segment

SMALL_BYTES = 1 << 12
"""Memory of at most so many bytes travels with the message."""

_ALIGNED = 64
_TABLE = struct.Struct("!II")  # bytes of the table of memories, and of what is pickled
_TOGETHER = 1 << 16  # bytes; smaller ones go to one segment
_PART = 4  # a tensor that is a smaller part of its memory than this travels without the rest


class OnDeviceError(RuntimeError):
    """A tensor that is not on the host: its argument is the device."""


class Parcel:
    """What is sent, packed; a `Letter`."""

    def __init__(self, content: Any, arena: Arena | None) -> None:
        """Afterwards the content may change.

        Args:
            content: what can be pickled.
            arena: where its memory may lie; None to have all of it travel with the message.

        Raises:
            Exception: it cannot be pickled.
            OnDeviceError: it holds a tensor on a device.
        """
        self._arena = arena
        self._segments: dict[int, Segment] = {}
        self._forgotten: list[int] = []
        file, memories = io.BytesIO(), _Memories()
        pickler = ForkingPickler(file, 5, True, memories.add)
        pickler.dispatch_table.update(memories.reducers())  # its own copy
        pickler.dump(content)
        self._pickled = file.getvalue()
        self._places = [self._placed(*each) for each in memories.found]
        self._place_together([memory for memory, _ in memories.found])

    def _placed(self, memory: memoryview, address: int) -> bytes | tuple[int, int, int] | None:
        """The bytes, or (segment, offset, size); None where it goes to one with others."""
        size = memory.nbytes
        if self._arena is None or size <= SMALL_BYTES:
            return bytes(memory)
        segment = self._arena.at(address)
        if segment is not None:
            if segment.number not in self._segments:
                self._arena.hold(segment)
        elif size < _TOGETHER:
            return None
        else:
            segment = self._arena.taken(size)
            if segment is None:
                return bytes(memory)
            segment.write(0, memory)
        self._segments[segment.number] = segment
        return segment.number, 0, size

    def _place_together(self, memories: list[memoryview]) -> None:
        """Not those that are large: who keeps one of them would hold the memory of all."""
        left = [index for index, place in enumerate(self._places) if place is None]
        total = sum(_padded(memories[index].nbytes) for index in left)
        segment = self._arena.taken(total) if left and self._arena is not None else None
        if segment is not None:
            self._segments[segment.number] = segment
        offset = 0
        for index in left:
            memory = memories[index]
            if segment is None:
                self._places[index] = bytes(memory)
                continue
            segment.write(offset, memory)
            self._places[index] = segment.number, offset, memory.nbytes
            offset += _padded(memory.nbytes)

    def written(self) -> tuple[bytes, list[int]]:
        """See `Letter`."""
        fresh = [segment for segment in self._segments.values() if not segment.known]
        if len(fresh) > MOST_FILES:
            self._take_along(fresh[MOST_FILES:])
            del fresh[MOST_FILES:]
        if self._arena is not None:
            self._forgotten += self._arena.forgotten()
        places = [len(place) if isinstance(place, bytes) else place for place in self._places]
        known = [(segment.number, segment.size) for segment in fresh]
        table = pickle.dumps((places, known, self._forgotten))
        pieces = [_TABLE.pack(len(table), len(self._pickled)), table, self._pickled]
        count = sum(map(len, pieces))
        for place in self._places:
            if isinstance(place, bytes):
                pieces += [bytes(_padded(count) - count), place]
                count = _padded(count) + len(place)
        return b"".join(pieces), [segment.descriptor for segment in fresh]

    def without_files(self) -> None:
        """See `Letter`."""
        self._take_along([s for s in self._segments.values() if not s.known])

    def _take_along(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            for index, place in enumerate(self._places):
                if isinstance(place, tuple) and place[0] == segment.number:
                    self._places[index] = segment.read(place[1], place[2])
            del self._segments[segment.number]
            assert self._arena is not None
            self._arena.released(segment.number)

    def gone(self) -> None:
        """See `Letter`."""
        for segment in self._segments.values():
            segment.known = True


def opened(message: memoryview, descriptors: Sequence[int], borrowed: Borrowed | None) -> Any:
    """What a parcel holds.

    Args:
        message: as it was received.
        descriptors: that came with it; closed here.
        borrowed: the sender's segments; None where it has none.

    Raises:
        Exception: it cannot be unpickled, or mapped.
    """
    table_bytes, pickled_bytes = _TABLE.unpack_from(message)
    at = _TABLE.size + table_bytes
    places, fresh, forgotten = pickle.loads(message[_TABLE.size : at])
    if borrowed is not None:
        borrowed.learn(fresh, descriptors)
        borrowed.forget(forgotten)
    pickled = message[at : at + pickled_bytes]
    at += pickled_bytes
    if borrowed is not None:
        sizes = (place if isinstance(place, int) else place[2] for place in places)
        borrowed.opened_bytes = pickled_bytes + sum(sizes)
    leases: dict[int, memoryview] = {}
    memories = []
    for place in places:
        if isinstance(place, int):
            at = _padded(at)
            memories.append(message[at : at + place])
            at += place
            continue
        number, offset, size = place
        if number not in leases:
            assert borrowed is not None
            leases[number] = memoryview(borrowed.buffer(number)).cast("B")
        memories.append(leases[number][offset : offset + size])
    return pickle.loads(pickled, buffers=memories)


class _Memory:
    """Stands for a storage, so that several tensors on it have one again."""

    def __init__(self, buffer: PickleBuffer) -> None:
        self._buffer = buffer

    def __reduce__(self) -> tuple[Any, ...]:
        return _storage_of, (self._buffer,)


class _Memories:
    """The memories of what is being pickled.

    Attributes:
        found: of each, its bytes, and its address if it is a tensor's (else 0).
    """

    def __init__(self) -> None:
        self.found: list[tuple[memoryview, int]] = []
        self._addresses: dict[int, int] = {}
        self._of_storages: dict[int, _Memory] = {}
        self._kept: list[Any] = []  # so that no other object gets its id

    def reducers(self) -> dict[type, Any]:
        """For the pickler, in place of PyTorch's."""
        kinds = (torch.Tensor, torch.nn.Parameter)
        tensors: dict[type, Any] = dict.fromkeys(kinds, self._tensor)
        return {**tensors, torch.UntypedStorage: self._storage, np.ndarray: _array}

    def add(self, buffer: PickleBuffer) -> None:
        """Called by the pickler; what it returns, nothing, asks for the buffer to be left out."""
        self.found.append((buffer.raw(), self._addresses.get(id(buffer), 0)))

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.device.type != "cpu":
            raise OnDeviceError(str(tensor.device))
        if tensor.is_quantized:  # multiprocessing would leave out what its numbers mean
            return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
        if (
            tensor.layout is not torch.strided
            or tensor.is_nested
            or tensor._backward_hooks
            or not tensor.is_leaf
        ):
            return reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
        kind, wants, attributes = type(tensor), tensor.requires_grad, vars(tensor)
        # PyTorch would send the numbers without what is still to be done to them.
        tensor = tensor.detach().resolve_conj().resolve_neg()
        storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
        last = sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
        size = (last + 1) * tensor.element_size() if tensor.numel() else 0
        if storage.nbytes() > _PART * size + SMALL_BYTES:
            memory = self._memory(storage, offset * tensor.element_size(), size)
            offset = 0
        else:
            memory = self._whole(storage)
        layout = (offset, tuple(tensor.shape), tensor.stride())
        made = _tensor_of, (kind, memory, tensor.dtype, *layout, wants)
        return (*made, attributes, None, None, _attributed) if attributes else made

    def _storage(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type == "meta":
            return reductions.reduce_storage(storage)  # type: ignore[no-untyped-call]
        if storage.device.type != "cpu":
            raise OnDeviceError(str(storage.device))
        return self._whole(storage).__reduce__()

    def _whole(self, storage: torch.UntypedStorage) -> _Memory:
        found = self._of_storages.get(storage._cdata)
        if found is None:
            found = self._memory(storage, 0, storage.nbytes())
            self._of_storages[storage._cdata] = found
        return found

    def _memory(self, storage: torch.UntypedStorage, start: int, size: int) -> _Memory:
        values = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, start, (size,), (1,))
        buffer = PickleBuffer(values.numpy())  # type: ignore[arg-type]
        self._addresses[id(buffer)] = storage.data_ptr() + start
        self._kept += [buffer, storage]
        return _Memory(buffer)


def _array(array: Array) -> Any:
    """One that must not be written to is sent as a copy: what DataLoader gives can be."""
    return (array if array.flags.writeable else array.copy("K")).__reduce_ex__(5)


def _storage_of(buffer: Any) -> torch.UntypedStorage:
    if not len(buffer):
        return _ordinary(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _tensor_of(
    kind: type,
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    wants: bool,
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, stride)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=wants)
    return tensor.requires_grad_() if wants else tensor


def _attributed(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    vars(tensor).update(attributes)


def _ordinary(size: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(size)  # type: ignore[no-untyped-call]


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def lend(arena: Arena) -> None:
    """Let PyTorch's default collate function write into the arena, in this (worker) process.

    In a worker it takes new shared memory for each batch, and writes into that.
    """
    original = torch.UntypedStorage._new_shared

    def new_shared(cls: Any, size: int, *, device: Any = "cpu") -> Any:
        if torch.device(device).type != "cpu":
            try:
                return original(size, device=device)  # type: ignore[no-untyped-call]
            except RuntimeError as error:  # a device of which PyTorch itself knows nothing
                raise OnDeviceError(str(device)) from error
        buffer = arena.lent(size) if size > SMALL_BYTES else None
        return _ordinary(size) if buffer is None else _storage_of(buffer)

    torch.UntypedStorage._new_shared = classmethod(new_shared)  # type: ignore[assignment,method-assign]
