"""Batches between processes: everything comes through, and nothing is asked of who sent it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import feed_datasets as kinds
import numpy as np
import pytest
import torch
from feed_datasets import same
from torch import nn
from torch.utils.data import default_collate

from hasten.errors import DataError
from hasten.feed import Loader
from hasten.feed import channel as channel_module
from hasten.feed import segments as segments_module
from hasten.feed import sizing as sizing_module
from hasten.feed.channel import MOST_FILES, Channel, ClosedError, Plain, hung_up, ready
from hasten.feed.parcel import OnDeviceError, Parcel, lend, opened
from hasten.feed.segments import MOST_SEGMENTS, Arena, Borrowed

LARGE = 100_000


class Pair:
    """A worker's end and the loop's, in one process."""

    def __init__(self, spare: int = 3) -> None:
        self.arena, self.borrowed = Arena(spare), Borrowed()
        self.theirs, self.mine = Channel.pair()

    def through(self, content: Any) -> Any:
        parcel = Parcel(content, self.arena)
        del content
        got: list[Any] = []
        reader = threading.Thread(target=lambda: got.append(self.receive()))
        reader.start()
        if not self.theirs.post(parcel):
            while not self.theirs.flush():
                ready((), [self.theirs])
        reader.join()
        return got.pop()

    def receive(self) -> Any:
        message, descriptors = self.mine.receive(lambda: ready([self.mine]) and None)
        return opened(message, descriptors, self.borrowed)

    def give_back(self) -> int:
        back = self.borrowed.given_back()
        for number, lost in back:
            self.arena.released(number, lost=lost)
        return len(back)

    def close(self) -> None:
        self.theirs.close()
        self.mine.close()
        del self.arena, self.borrowed  # pytest keeps the pair itself for a while


@pytest.fixture
def pair() -> Iterator[Pair]:
    found = Pair()
    yield found
    found.close()


def test_attributes_that_somebody_gave_a_tensor_come_through(pair: Pair) -> None:
    large: Any = torch.arange(LARGE)
    large.file, large.mask, large.itself = "a.png", torch.arange(LARGE) % 2, large
    weight: Any = nn.Parameter(torch.ones(3))
    weight.name_of = ["w"]
    got, got_weight = pair.through([large, weight])
    assert (got.file, got_weight.name_of) == ("a.png", ["w"])
    assert got.itself is got and torch.equal(got.mask, torch.arange(LARGE) % 2)
    assert torch.equal(got, large) and type(got_weight) is nn.Parameter


@dataclass
class Record:
    values: torch.Tensor
    name: str


Named = namedtuple("Named", ["first", "second"])


def _lazily(kind: str) -> torch.Tensor:
    values = torch.randn(3, LARGE // 10, dtype=torch.complex64)
    return values.conj() if kind == "conj" else values.conj().imag


CONTENTS: dict[str, Any] = {
    "nothing": None,
    "no tensor": {"text": "abc", "numbers": [1, 2.5, 3 + 4j], "bytes": b"x" * 300_000},
    "small": torch.arange(7),
    "empty": [torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int8)],
    "number": torch.tensor(2.5),
    "large": torch.randn(LARGE),
    "bfloat16": torch.randn(LARGE).bfloat16(),
    "bool": torch.randn(LARGE) > 0,
    "strided": torch.randn(40, 50, 60).permute(2, 0, 1)[::2, :, 3:],
    "channels last": torch.randn(2, 3, 80, 90).to(memory_format=torch.channels_last),
    "expanded": torch.randn(LARGE).expand(3, LARGE),
    "part of much": torch.randn(1_000_000)[500_000:500_010],
    "conj": _lazily("conj").resolve_conj(),
    "nested": Named([torch.randn(LARGE)], {"a": (torch.arange(3), "b", None)}),
    "many small": [torch.full((2,), n) for n in range(2_000)],
    "many medium": [torch.full((3_000,), float(n)) for n in range(300)],
    "many large": [torch.full((20_000,), float(n)) for n in range(3 * MOST_SEGMENTS)],
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_it_comes_as_it_went(pair: Pair, kind: str) -> None:
    content = CONTENTS[kind]
    for _ in range(3):
        assert same(pair.through(content), content)
        pair.give_back()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("with_arena", [False, True])
def test_other_things(pair: Pair, with_arena: bool) -> None:
    leaf = torch.randn(LARGE, requires_grad=True)
    sparse = torch.eye(300).to_sparse()
    quantised = torch.quantize_per_tensor(torch.randn(LARGE), 0.1, 3, torch.qint8)
    record = Record(torch.randn(LARGE), "a")
    content = [leaf, nn.Parameter(torch.randn(5)), sparse, sparse.to_sparse_csr(), quantised]
    content += [record, torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])]
    if not with_arena:
        pair.arena = None  # type: ignore[assignment]
    found = pair.through(content)
    assert found[0].requires_grad and found[0].is_leaf and torch.equal(found[0], leaf)
    assert type(found[1]) is nn.Parameter and torch.equal(found[1], content[1])
    assert torch.equal(found[2].to_dense(), torch.eye(300))
    assert torch.equal(found[3].to_dense(), torch.eye(300))
    assert torch.equal(found[4].dequantize(), quantised.dequantize())
    assert found[5].name == "a" and torch.equal(found[5].values, record.values)
    assert same(list(found[6].unbind()), [torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize("kind", ["conj", "neg"])
def test_what_is_still_to_be_done_to_numbers_is_done(pair: Pair, kind: str) -> None:
    values = _lazily(kind)
    assert values.is_conj() or values.is_neg()
    assert torch.equal(pair.through(values), values)


def test_tensors_on_one_memory_are_on_one_again(pair: Pair) -> None:
    whole = torch.zeros(LARGE)
    first, second, again = pair.through((whole, whole[10:], whole))
    first[10] = 1
    assert second[0] == 1
    assert again is first


ARRAYS: dict[str, Any] = {
    "small": np.arange(5),
    "large": np.random.default_rng(0).random((300, 400)),
    "fortran": np.asfortranarray(np.arange(60_000.0).reshape(200, 300)),
    "part": np.arange(600_000)[::3],
    "records": np.zeros(9_000, dtype=[("a", "f4"), ("b", "i8")]),
    "text": np.array(["a", "bc"]),
    "objects": np.array([{}, None, "x"], dtype=object),
    "none of it": np.empty((0, 4)),
    "number": np.float32(2.5),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays(pair: Pair, kind: str) -> None:
    array = ARRAYS[kind]
    found = pair.through([array])[0]
    assert type(found) is type(array) and found.dtype == array.dtype
    assert np.array_equal(found, array)
    expected = pickle.loads(pickle.dumps(array, 4))
    for flag in ("C_CONTIGUOUS", "F_CONTIGUOUS", "WRITEABLE", "ALIGNED"):
        assert found.flags[flag] == expected.flags[flag]


def test_arrays_that_could_not_be_written_to_can_be_as_with_dataloader(pair: Pair) -> None:
    for count in (3, LARGE):
        array = np.arange(count)
        array.flags.writeable = False
        assert pair.through(array).flags.writeable


def test_what_is_sent_may_change_afterwards(pair: Pair) -> None:
    values = torch.zeros(LARGE)
    parcel = Parcel(values, pair.arena)
    values.fill_(1)
    pair.theirs.post(parcel)
    assert not pair.receive().any()


def test_memory_is_used_again_once_nobody_holds_it_and_not_before(pair: Pair) -> None:
    kept = pair.through(torch.full((LARGE,), 1.0))
    view, array = kept[5:], kept.numpy()[::2]
    del kept
    for number in range(2, 6):
        assert pair.through(torch.full((LARGE,), float(number))).eq(number).all()
        pair.give_back()
    assert len(pair.arena._segments) == 2, "one is held, and one is used again and again"
    assert (view == 1).all() and (array == 1).all()
    del view
    assert not pair.give_back(), "the array is left"
    del array
    assert pair.give_back() == 1


def test_a_graph_holds_it(pair: Pair) -> None:
    weight = torch.ones(LARGE, requires_grad=True)
    loss = (pair.through(torch.full((LARGE,), 3.0)) * weight).sum()
    pair.give_back()
    for _ in range(3):
        pair.through(torch.zeros(LARGE))
        pair.give_back()
    loss.backward()
    assert weight.grad is not None and (weight.grad == 3).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_a_forked_process_may_still_look_at_is_never_used_again(pair: Pair) -> None:
    batch = pair.through(torch.full((LARGE,), 1.0))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reading, 1)  # (PyTorch's threads are not in a fork)
        os._exit(0 if np.all(batch.numpy() == 1) else 3)
    del batch
    for _ in range(3):
        pair.give_back()
        pair.through(torch.zeros(LARGE))
    os.write(writing, b"x")
    _, status = os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    assert os.waitstatus_to_exitcode(status) == 0


def test_what_the_collate_function_writes_into_the_arena_is_not_copied(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = torch.utils.data._utils.worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", info)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", torch.UntypedStorage._new_shared)
    lend(pair.arena)
    batch = default_collate([torch.full((9_000,), float(n)) for n in range(4)])
    assert len(pair.arena._segments) == 1
    expected = batch.clone()
    found = pair.through(batch)
    assert len(pair.arena._segments) == 1
    assert same(found, expected)
    del found
    pair.give_back()
    assert [s.holders for s in pair.arena._segments.values()] == [1], "this test's own"
    del batch
    assert [s.holders for s in pair.arena._segments.values()] == [0]


def test_segments_are_few_and_go_when_they_are_not_wanted(pair: Pair) -> None:
    held = [pair.through(torch.zeros(LARGE)) for _ in range(MOST_SEGMENTS + 5)]
    assert len(pair.arena._segments) == MOST_SEGMENTS, "what there is no segment for comes too"
    held.clear()
    pair.give_back()
    assert len(pair.arena._segments) == 3
    pair.through(1)
    assert len(pair.borrowed._maps) == 3, "the reader has been told"


def test_batches_of_other_sizes_do_not_fill_the_memory(pair: Pair) -> None:
    for count in (300_000, 20_000, 250_000, 1_000_000, 30_000, 2_000, 900_000):
        assert same(pair.through(torch.arange(count)), torch.arange(count))
        pair.give_back()
    assert len(pair.arena._segments) <= 4


@pytest.mark.parametrize("trouble", ["no memory", "no files", "no travelling"])
def test_without_segments_it_all_travels_with_the_message(
    pair: Pair, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> Any:
        raise OSError(24, "no")

    if trouble == "no memory":
        monkeypatch.setattr(segments_module.mmap, "mmap", fails)
    elif trouble == "no files":
        monkeypatch.setattr(segments_module, "_nameless", fails)
    else:
        real = pair.theirs._end

        class End:
            sendmsg = staticmethod(fails)

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        pair.theirs._end = End()  # type: ignore[assignment]
    files = _files()
    for _ in range(3):
        content = [torch.randn(LARGE), "a", np.arange(LARGE), torch.arange(5_000)]
        found = pair.through(content)
        assert same(found[:2], content[:2]) and same(found[3], content[3])
        assert np.array_equal(found[2], content[2])
    if trouble != "no travelling":
        assert _files() == files


def _files() -> int:
    """Open in this process, as far as that can be seen."""
    return len(list(Path("/proc/self/fd").glob("*")))


def test_on_systems_without_memfd_it_is_shared_memory_whose_name_is_gone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("_posixshmem")
    monkeypatch.delattr(os, "memfd_create", raising=False)
    content = torch.randn(LARGE)
    assert same(pair.through(content), content)
    assert len(pair.arena._segments) == 1
    if Path("/dev/shm").is_dir():
        assert not list(Path("/dev/shm").glob("hasten-feed-*"))


def test_shared_memory_that_is_full_is_told_before_it_is_written_to(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("_posixshmem")

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(os, "posix_fallocate", full)
    files, content = _files(), torch.randn(LARGE)
    assert same(pair.through(content), content)
    assert not pair.arena._segments and _files() == files


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory without a name")
def test_the_size_of_dev_shm_bounds_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sizing_module.shared_memory_free() is None
    monkeypatch.setattr(sizing_module, "NAMELESS", False)
    if Path("/dev/shm").is_dir():
        assert sizing_module.shared_memory_free() is not None


def test_a_segment_that_is_dropped_keeps_no_file_open() -> None:
    arena = Arena(3)
    found = arena.taken(LARGE)
    assert found is not None
    descriptor = found.descriptor
    os.fstat(descriptor)
    del found, arena
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_more_new_segments_than_files_may_go_with_a_message(pair: Pair) -> None:
    content = [torch.full((20_000,), float(n)) for n in range(MOST_FILES + 4)]
    assert same(pair.through(content), content)


def test_device_tensors_are_told_wherever_they_are(pair: Pair) -> None:
    there = torch.ones(2, device="meta")
    for content in (Record(there, "a"), [{"a": nn.Parameter(there)}]):
        with pytest.raises(OnDeviceError, match="meta"):
            Parcel(content, pair.arena)


def test_what_cannot_be_pickled_leaves_nothing_held(pair: Pair) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        Parcel([torch.randn(LARGE), lambda: 1], pair.arena)
    assert not pair.arena._segments


def test_messages_come_whole_and_in_order_through_a_full_channel() -> None:
    theirs, mine = Channel.pair()
    messages = [bytes([n]) * (n * 40_000) for n in range(12)]
    whole = [theirs.post(Plain(message)) for message in messages]
    assert not all(whole), "there is no room for all"
    found = []

    def wait() -> None:
        theirs.flush()
        ready([mine])

    for _ in messages:
        message, files = mine.receive(wait)
        found.append(bytes(message))
        assert files == []
    assert found == messages
    assert theirs.flush()
    theirs.close()
    with pytest.raises(ClosedError):
        mine.receive(wait)
    mine.close()


def test_a_closed_end_is_seen_before_what_came_from_it_is_read() -> None:
    theirs, mine = Channel.pair()
    assert not hung_up(mine, 0)
    theirs.post(Plain(b"x"))
    assert not hung_up(mine, 0)
    theirs.close()
    assert hung_up(mine, 10)
    message, _ = mine.receive(lambda: None)
    assert bytes(message) == b"x"
    mine.close()


def test_giving_up_in_the_middle_of_a_message_loses_nothing() -> None:
    theirs, mine = Channel.pair()
    theirs.post(Plain(b"x" * 1_000_000))

    def give_up() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        mine.receive(give_up)
    message, _ = mine.receive(lambda: theirs.flush() and None)
    assert bytes(message) == b"x" * 1_000_000
    theirs.close()
    mine.close()


def test_files_that_the_reader_has_no_number_for_are_told() -> None:
    import resource

    pair = Pair()
    pair.theirs.post(Parcel(torch.randn(LARGE), pair.arena))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(taken), hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            pair.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)
    pair.close()


class Heavy(kinds.Plain):
    """Batches of 200 KB."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((25_000,), float(index)), np.full(25_000, index), index


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_frozen_worker_is_no_hang(moment: str) -> None:
    loader = Loader(Heavy(40), 2, num_workers=1, timeout=0.5)
    batches = iter(loader)
    next(batches)
    (child,) = multiprocessing.active_children()
    assert child.pid is not None
    if moment == "after":
        time.sleep(0.5)  # it has sent two more, and waits
    os.kill(child.pid, signal.SIGSTOP)
    found = []
    with pytest.raises(DataError, match=r"no batch came .* within timeout=0.5 s"):
        for batch in batches:
            found.append(batch)
    assert moment == "before" or len(found) == 2, "what it had sent is given"


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_nor_one_that_is_frozen_in_the_middle_of_a_message() -> None:
    theirs, mine = Channel.pair()
    child = os.fork()
    if child == 0:
        while True:
            theirs.post(Plain(b"x" * 10_000_000))
            ready((), [theirs])
    theirs.close()
    ready([mine])
    os.kill(child, signal.SIGSTOP)
    limit = time.monotonic() + 0.3

    def wait() -> None:
        if not ready([mine], timeout_s=max(0.0, limit - time.monotonic())):
            raise TimeoutError

    with pytest.raises(TimeoutError):
        mine.receive(wait)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    mine.close()


def test_nor_is_one_whose_jobs_do_not_fit_into_its_channel() -> None:
    order = [list(range(60_000)) for _ in range(9)]
    with Loader(Indexed(), batch_sampler=order, num_workers=1, timeout=0.5) as loader:
        batches = iter(loader)
        assert len(next(batches)) == 60_000
        (child,) = multiprocessing.active_children()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(DataError, match="within timeout"):
            list(batches)


class Indexed(kinds.Plain):
    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices

    def __len__(self) -> int:
        return 60_000


def test_a_worker_that_has_ended_loses_nothing_that_it_had_sent() -> None:
    dataset = Heavy(12)
    expected = list(Loader(dataset, 2, plan="inline", collate_fn=as_they_are))
    batches = iter(Loader(dataset, 2, num_workers=1, prefetch_factor=6, collate_fn=as_they_are))
    found = [next(batches)]
    (child,) = multiprocessing.active_children()
    assert child.pid is not None
    time.sleep(0.5)
    os.kill(child.pid, signal.SIGKILL)
    child.join(10)
    found += list(batches)
    assert len(found) == len(expected) == 6
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a[0], b[0]) and np.array_equal(a[1], b[1]) and a[2] == b[2]


def as_they_are(samples: list[Any]) -> list[Any]:
    return samples


def test_the_limit_on_files_is_that_of_one_control_message() -> None:
    assert channel_module._ROOM >= MOST_FILES * 4
