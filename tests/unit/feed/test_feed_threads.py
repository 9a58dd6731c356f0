from __future__ import annotations

import threading
from typing import Any

import feed_datasets as kinds
import numpy as np
import pytest
import torch
from feed_datasets import same
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

from hasten.errors import DataError
from hasten.feed import Loader, Plan
from hasten.feed.buffers import Ring, array, tensor_of
from hasten.feed.order import OwnOrder
from hasten.feed.samples import Maker
from hasten.feed.threads import Threads


class Gated(kinds.Fetching):
    """Samples wait for a gate; what was started is written down."""

    def __init__(self, count: int, open_from: int) -> None:
        super().__init__(count)
        self.gate = threading.Event()
        self.open_from = open_from
        self.started: list[int] = []
        self.names: set[str] = set()

    def fetch(self, index: int, key: int) -> Any:
        self.started.append(index)
        self.names.add(threading.current_thread().name)
        if index < self.open_from:
            assert self.gate.wait(30)
        return super().fetch(index, key)


def test_order_is_kept_when_the_first_sample_is_the_last_to_be_ready() -> None:
    dataset = Gated(40, open_from=1)
    threading.Timer(0.2, dataset.gate.set).start()
    with Loader(dataset, 4, plan="threads", num_workers=2) as loader:
        labels = torch.cat([batch[1] for batch in loader])
    assert labels.tolist() == list(range(40))
    assert dataset.started.index(5) < 20, "others went on meanwhile"
    assert dataset.names == {"hasten-feed-0", "hasten-feed-1"}


def _source(dataset: Any, *, batch: int = 4, **plan: Any) -> Threads:
    maker = Maker(dataset, None, seed=0, skip_errors=False, batched=True)
    order = OwnOrder(dataset, batch, shuffle=False, drop_last=False, seed=0)
    settings = {"name": "threads", "reason": "", "workers": 2, "prefetch_batches": 3, **plan}
    return Threads(maker, Plan(**settings), order, lambda index, message: None)


def _settled(dataset: Gated, count: int) -> int:
    """How many samples are started once no more are."""
    deadline = threading.Event()
    for _ in range(200):
        if len(dataset.started) > count:
            break
        deadline.wait(0.001)
    return len(dataset.started)


def test_no_more_is_made_ahead_than_the_plan_says() -> None:
    dataset = Gated(100, open_from=0)
    batches = _source(dataset).batches(0, 0)
    next(batches)
    assert _settled(dataset, 16) == 16, "the one given, and three ahead"
    next(batches)
    assert _settled(dataset, 20) == 20
    batches.close()


def test_bytes_bound_it_too() -> None:
    dataset = Gated(100, open_from=0)
    batches = _source(dataset, prefetch_batches=8, prefetch_bytes=2 * 4 * (60 + 8)).batches(0, 0)
    next(batches)  # at first the size of a batch is unknown
    for _ in range(12):
        next(batches)
    assert _settled(dataset, 15 * 4) == 15 * 4
    batches.close()


class Given(Dataset):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def fetch(self, index: int, key: int) -> Any:
        return self.samples[index]


@pytest.mark.parametrize(
    "samples",
    [
        [torch.tensor(float(i)) for i in range(5)],
        [(torch.ones(3, 2).T * i,) for i in range(5)],
        [[np.full(2, i), i, "a"] for i in range(5)],
        [(np.float32(i), np.array(i)) for i in range(5)],
        [{"x": torch.ones(2), "y": i} for i in range(5)],
        [(torch.ones(2, dtype=torch.bfloat16), (i, torch.ones(1))) for i in range(5)],
        [(torch.ones(2, dtype=torch.float32 if i else torch.float64), i) for i in range(5)],
        [(torch.ones(0, 2), torch.ones(1, dtype=torch.complex64).conj()) for i in range(5)],
        [kinds.Pair(torch.ones(2), {"i": i}) for i in range(5)],
        list(range(5)),
        ["a"] * 5,
        [(torch.ones(2), None if i < 0 else 1.5) for i in range(5)],
    ],
)
def test_samples_of_any_kind_are_collated_as_ever(samples: list[Any]) -> None:
    expected = [default_collate(samples[:3]), default_collate(samples[3:])]
    assert same(list(Loader(Given(samples), 3, plan="threads")), expected)


def test_shapes_may_differ_from_batch_to_batch() -> None:
    samples = [torch.full((2 + i // 3,), float(i)) for i in range(9)]
    expected = [default_collate(samples[i : i + 3]) for i in (0, 3, 6)]
    assert same(list(Loader(Given(samples), 3, plan="threads")), expected)


def test_ragged_samples_are_named() -> None:
    samples = [(torch.zeros(3 if i == 4 else 2), i) for i in range(6)]
    with pytest.raises(DataError, match=r"sample 4 is \(float32 \[3\], int\)"):
        list(Loader(Given(samples), 3, plan="threads"))


def test_memory_is_used_again_once_nobody_holds_it() -> None:
    class Arrays(Dataset):
        def __len__(self) -> int:
            return 400

        def fetch(self, index: int, key: int) -> Any:
            return torch.full((50,), float(index))

    places, kept = set(), []
    for number, batch in enumerate(Loader(Arrays(), 4, plan="threads", num_workers=2)):
        places.add(batch.data_ptr())
        if number % 10 == 0:
            kept.append(batch[1:3])
    assert len(places) < 30, "of 100 batches"
    assert all(part[0, 0] == 40 * number + 1 for number, part in enumerate(kept))


def test_a_ring_gives_nothing_that_is_held() -> None:
    ring = Ring(most=2)
    first = ring.empty((3,), torch.float32)
    place = first.data_ptr()
    view = first[1:]
    del first
    assert ring.empty((3,), torch.float32).data_ptr() != place, "a view holds it"
    as_array = view.numpy()
    del view
    assert ring.empty((3,), torch.float32).data_ptr() != place, "an array holds it"
    del as_array
    graph = ring.empty((3,), torch.float32)
    assert graph.data_ptr() == place
    leaf = torch.ones(3, requires_grad=True)
    product = (leaf * graph.fill_(2)).sum()
    del graph
    assert ring.empty((3,), torch.float32).data_ptr() != place, "autograd holds it"
    product.backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2, 2, 2]


def test_a_ring_is_for_any_type_and_bounded() -> None:
    ring = Ring(most=2)
    held = [ring.empty((2, 2), dtype) for dtype in (torch.bfloat16, torch.bool, torch.int64)]
    assert [t.dtype for t in held] == [torch.bfloat16, torch.bool, torch.int64]
    assert len(ring._arrays) == 2
    places = [t.data_ptr() for t in held]
    del held
    assert ring.empty((2, 2), torch.bfloat16).data_ptr() == places[0]
    assert ring.empty((7,), torch.float32).shape == (7,), "takes the place of one that is free"
    assert len(ring._arrays) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64])
def test_tensors_as_arrays_keep_their_bits(dtype: torch.dtype) -> None:
    tensor = torch.arange(8, dtype=torch.uint8).view(dtype)
    again = tensor_of(array(tensor).copy(), dtype)
    assert again.dtype == dtype
    assert torch.equal(again.view(torch.uint8), tensor.view(torch.uint8))


def test_a_shorter_batch_takes_the_beginning_of_a_longer_ones_memory() -> None:
    ring = Ring(most=2)
    whole = ring.empty((8, 3), torch.float32)
    place = whole.data_ptr()
    del whole
    part = ring.empty((5, 3), torch.float32)
    assert part.shape == (5, 3)
    assert part.data_ptr() == place
    assert ring.empty((8, 3), torch.float32).data_ptr() != place, "the part holds the whole"
    del part
    small = ring.empty((2, 3), torch.float32)
    assert small.untyped_storage().nbytes() == 2 * 3 * 4, "kept, it must not hold a large one"


class Numbered(Dataset):
    """Samples large enough that their memory is worth using again, each of its own number."""

    def __len__(self) -> int:
        return 120

    def fetch(self, index: int, key: int) -> Any:
        return torch.full((3, 40, 40), float(index)), index


@pytest.mark.parametrize(
    "keep",
    [
        lambda batch: batch,
        lambda batch: [batch[0].numpy()],
        lambda batch: [batch[0].numpy()[:, 1]],
        lambda batch: list(batch[0].unbind()),
        lambda batch: [batch[0].view(-1, 1600)],
        lambda batch: [torch.from_dlpack(batch[0])],
        lambda batch: [memoryview(batch[0].numpy())],
        lambda batch: [batch[0].untyped_storage()],
        lambda batch: [batch[0].t() if batch[0].dim() < 3 else batch[0].mT],
        lambda batch: list(batch[0].chunk(2)),  # as nn.DataParallel scatters
    ],
)
def test_what_is_kept_of_a_batch_in_any_form_is_never_overwritten(keep: Any) -> None:
    loader = Loader(Numbered(), 8, plan="threads", num_workers=2)
    for _ in range(2):
        kept, want, numbers = [], [], []
        for batch in loader:
            parts = keep(batch)
            kept.append(parts)
            want.append([_bytes_of(part) for part in parts])
            numbers += batch[1].tolist()
            del batch
        assert numbers == list(range(120))
        assert [[_bytes_of(part) for part in parts] for parts in kept] == want


def _bytes_of(part: Any) -> bytes:
    if isinstance(part, torch.UntypedStorage):
        return torch.empty(0, dtype=torch.uint8).set_(part).numpy().tobytes()
    return part.tobytes() if isinstance(part, memoryview | np.ndarray) else part.numpy().tobytes()


class Writing(Dataset):
    """Writes its samples where it is told to; tells how often."""

    def __init__(self, count: int = 40) -> None:
        self.count = count
        self.written = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.fetch(index, 0)

    def fetch(self, index: int, key: int, out: Any = None) -> Any:
        values = torch.arange(6, dtype=torch.uint8).view(2, 3) + index
        if index == 7:
            raise OSError("no such sample")
        if out is None or index % 10 == 9:  # what it does not like, it leaves alone
            return values, f"name {index}", values.float()
        self.written += 1
        return out[0].copy_(values), f"name {index}", out[1].copy_(values)


class Doubled(Writing):
    """Changes what `fetch` gives, and knows nothing of `out`."""

    def fetch(self, index: int, key: int) -> Any:
        image, name, other = super().fetch(index, key)
        return image * 2, name, other


def _batches(dataset: Any, plan: str) -> list[Any]:
    return list(Loader(dataset, 8, plan=plan, num_workers=2 if plan == "threads" else 0,
                       on_error="skip", shuffle=True))  # fmt: skip


@pytest.mark.parametrize("around", [lambda d: d, lambda d: Subset(d, range(3, 33)),
                                    lambda d: ConcatDataset([d, Subset(d, range(9))])])  # fmt: skip
def test_a_data_set_may_write_its_samples_into_the_batch(around: Any) -> None:
    dataset = Writing()
    assert same(_batches(around(dataset), "threads"), _batches(around(Writing()), "inline"))
    assert dataset.written > 15


def test_a_fetch_without_out_is_called_as_ever() -> None:
    dataset = Doubled()
    mixed = ConcatDataset([Writing(), dataset])
    assert same(_batches(dataset, "threads"), _batches(Doubled(), "inline"))
    assert same(_batches(mixed, "threads"), _batches(mixed, "inline"))
    assert dataset.written == 0


def test_samples_that_were_written_are_kept_when_others_do_not_fit() -> None:
    class Odd(Writing):
        def fetch(self, index: int, key: int, out: Any = None) -> Any:
            image = torch.full((2, 3), index, dtype=torch.uint8)
            return image if out is None else out[0].copy_(image), torch.tensor(
                index, dtype=torch.int32 if index == 13 else torch.int64
            )

    assert same(_batches(Odd(16), "threads"), _batches(Odd(16), "inline"))
