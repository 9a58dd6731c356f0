"""What a person is told of a sample, a data set or a worker that fails, under each plan."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import feed_datasets as kinds
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    default_collate,
)

import hasten
from hasten.errors import DataError, UsageError
from hasten.feed import Loader

WAYS: dict[str, Callable[..., Loader]] = {
    "inline": lambda data, size, **o: Loader(data, size, plan="inline", **o),
    "threads": lambda data, size, **o: Loader(data, size, plan="threads", **o),
    "processes": lambda data, size, **o: Loader(data, size, num_workers=2, **o),
    "taken": lambda data, size, **o: Loader.from_dataloader(DataLoader(data, size), **o),
    "taken, made ahead": lambda data, size, **o: Loader.from_dataloader(
        DataLoader(data, size), plan="processes", **o
    ),
    "taken, workers": lambda data, size, **o: Loader.from_dataloader(
        DataLoader(data, size, num_workers=2), **o
    ),
    "taken, played": lambda data, size, **o: Loader.from_dataloader(
        DataLoader(data, size, num_workers=2), plan="inline", **o
    ),
}
every_way = pytest.mark.parametrize("way", WAYS)


def failure(way: str, dataset: Any, size: int = 4, **options: Any) -> DataError:
    with WAYS[way](dataset, size, **options) as loader, pytest.raises(DataError) as info:
        list(loader)
    return info.value


class Squash:
    def __call__(self, value: int) -> int:
        if value == 5:
            raise ValueError("cannot be squashed")
        return value


class Blur(nn.Module):
    def forward(self, value: int) -> int:
        if value == 6:
            raise ZeroDivisionError("no width")
        return value


def halve(value: int) -> int:
    if value == 7:
        raise KeyError("half")
    return value


class Chain:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = transforms

    def __call__(self, value: int) -> int:
        for transform in self.transforms:
            value = transform(value)
        return value


class Photos(Dataset):
    """As torchvision's folders are: (path, class) pairs, and a transform."""

    def __init__(self, transform: Any) -> None:
        self.samples = [(f"cats/{number}.jpg", 0) for number in range(9)]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if index == 8:
            open("/nowhere/at/all.jpg")  # noqa: SIM115, PTH123
        return self.transform(index)


@every_way
@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (Chain(halve, Squash()), "sample 5 (cats/5.jpg) of Photos raised ValueError in its "
         "transform Squash: cannot be squashed"),
        (nn.Sequential(Blur()), "sample 6 (cats/6.jpg) of Photos raised ZeroDivisionError in its "
         "transform Blur: no width"),
        (halve, "sample 7 (cats/7.jpg) of Photos raised KeyError in its transform halve: 'half'"),
        (Chain(), "sample 8 (cats/8.jpg) of Photos raised FileNotFoundError: [Errno 2]"),
    ],
)  # fmt: skip
def test_index_file_transform_and_traceback(way: str, transform: Any, words: str) -> None:
    error = failure(way, Photos(transform))
    assert words in str(error)
    assert f"(at {__file__}:" in str(error)
    assert error.__cause__ is not None
    assert "in __getitem__" in "".join(traceback.format_exception(error.__cause__))


class Unlisted(Photos):
    def __init__(self) -> None:
        super().__init__(halve)
        self.samples = self.samples[:4]

    def __len__(self) -> int:
        return 9


def test_the_file_of_an_error_where_the_data_set_tells_none() -> None:
    class Reads(kinds.Plain):
        def __getitem__(self, index: int) -> Any:
            return Path(f"/nowhere/{index}").read_text()

    assert "sample 0 (/nowhere/0) of Reads" in str(failure("inline", Reads()))
    assert "sample 7 of Unlisted raised KeyError in its" in str(failure("inline", Unlisted()))


def test_the_file_in_parts_of_data_sets() -> None:
    both: Any = ConcatDataset([Photos(Chain()), Photos(Squash())])
    assert "sample 8 (cats/8.jpg)" in str(failure("inline", both))
    part: Any = Subset(both, [14])
    assert "sample 0 (cats/5.jpg) of Subset raised ValueError" in str(failure("inline", part))
    part = Subset(Photos(Squash()), [5])
    assert "of Subset raised ValueError in its transform Squash" in str(failure("inline", part))


@every_way
def test_skipping(way: str) -> None:
    with WAYS[way](Photos(Chain(halve, Squash())), 3, on_error="skip") as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4], [6]]
    assert [index for index, _ in loader.skipped] == [5, 7, 8]
    assert "(cats/5.jpg)" in loader.skipped[0][1]
    assert loader.skipped_count == 3


@every_way
def test_a_batch_of_which_nothing_is_left(way: str) -> None:
    def refuse(value: int) -> int:
        if value in (3, 4, 5, 8):
            raise ValueError("no")
        return value

    with WAYS[way](Photos(refuse), 3, on_error="skip") as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 2], [6, 7]]


class Gives(kinds.Plain):
    def __init__(self, give: Callable[[int], Any]) -> None:
        super().__init__(9)
        self.give = give

    def __getitem__(self, index: int) -> Any:
        return self.give(index)


@every_way
@pytest.mark.parametrize(
    ("give", "words"),
    [
        (lambda i: None if i == 6 else i, "gave None for sample 6; return a sample, or raise"),
        (
            lambda i: torch.zeros(2 + (i == 6)),
            "sample 4 is float32 [2], sample 6 is float32 [3]; bring them to one shape, or give a "
            "collate_fn that pads them",
        ),
        (
            lambda i: np.zeros(2) if i == 6 else i,
            "sample 4 is int, sample 6 is float64 [2]",
        ),
        (lambda i: range(6)[i], "its len says 9, so it should have a sample 6"),
    ],
    ids=["none", "ragged", "kinds", "len"],
)
def test_unusable_samples(way: str, give: Any, words: str) -> None:
    assert words in str(failure(way, Gives(give)))


@every_way
def test_a_collate_function_that_raises(way: str) -> None:
    def squash(samples: list[Any]) -> Any:
        raise ValueError("too long")

    data = Gives(int)
    if way.startswith("taken"):
        options: Any = {"num_workers": 2} if way in ("taken, workers", "taken, played") else {}
        plan = {"taken, made ahead": "processes", "taken, played": "inline"}.get(way, "auto")
        original = DataLoader(data, 4, collate_fn=squash, **options)
        loader = Loader.from_dataloader(original, plan=plan)
    else:
        loader = WAYS[way](data, 4, collate_fn=squash)
    with loader, pytest.raises(DataError, match=r"collate_fn squash raised ValueError: too long"):
        list(loader)


class StreamOf(IterableDataset[Any]):
    """Gives what its transform makes of the numbers up to 8."""

    def __init__(self, transform: Callable[[int], Any]) -> None:
        self.transform = transform

    def __iter__(self) -> Iterator[Any]:
        for number in range(9):
            yield self.transform(number)


class Reading(StreamOf):
    """An iterator of a class of its own."""

    def __iter__(self) -> Iterator[Any]:
        return map(self.transform, range(9))


def unreadable(number: int) -> Any:
    return Path(f"/nowhere/{number}").read_text() if number == 6 else number


def unusable(number: int) -> int:
    if number == 6:
        raise DataError("broken record")
    return number


def stream_of(transform: Callable[[int], Any], workers: int, *, taken: bool, **more: Any) -> Loader:
    kind = Reading if transform is unreadable else StreamOf
    options: Any = {"batch_size": 4, "num_workers": workers, **more}
    if taken:
        return Loader.from_dataloader(DataLoader(kind(transform), **options))
    return Loader(kind(transform), **options)


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (Squash(), "sample 5 of {} raised ValueError in its transform Squash: cannot be squashed"),
        (
            unreadable,
            "sample 6 (/nowhere/6) of {} raised FileNotFoundError in its transform unread",
        ),
        (unusable, "sample 6 of {}: broken record"),
        (lambda i: None if i == 6 else i, "{} gave None for sample 6; leave out what is none"),
        (
            lambda i: torch.zeros(2 + (i == 6)),
            "the samples of a batch of {} differ: sample 4 is float32 [2], sample 6 is float32 "
            "[3]; bring them to one shape, or give a collate_fn that pads them",
        ),
        (lambda i: (i, object()), "sample 0 of {} has a object at [1], of which PyTorch's"),
    ],
    ids=["transform", "file", "DataError", "none", "ragged", "unknown"],
)
def test_samples_of_a_stream(
    transform: Callable[[int], Any], words: str, workers: int, taken: bool
) -> None:
    """They have no index: the place in the stream, or in what one worker reads of it, is told."""
    with (
        stream_of(transform, workers, taken=taken) as loader,
        pytest.raises(DataError) as info,
    ):
        list(loader)
    name = f"the stream {type(loader.dataset).__name__}"
    assert words.format(f"worker 0's part of {name}" if workers else name) in str(info.value)
    cause = info.value.__cause__
    assert cause is not None
    if "raised" in words:
        name = "__call__" if isinstance(transform, Squash) else "unreadable"
        assert f"in {name}\n" in "".join(traceback.format_exception(cause))
        assert "(at /" in str(info.value)


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("size", [4, None])
def test_a_collate_function_of_a_stream_that_raises(
    size: int | None, workers: int, taken: bool
) -> None:
    def squash(samples: Any) -> Any:
        if 5 in (samples if size else [samples]):
            raise ValueError("too long")
        return samples

    with (
        stream_of(int, workers, taken=taken, batch_size=size, collate_fn=squash) as loader,
        pytest.raises(DataError, match="collate_fn squash raised ValueError: too long") as info,
    ):
        list(loader)
    assert f"on the samples {'4, 5, 6, 7' if size else '5'} of " in str(info.value)


@pytest.mark.parametrize("taken", [False, True])
def test_a_stream_that_cannot_be_read_one_by_one(taken: bool) -> None:
    with (
        stream_of(Squash(), 0, taken=taken, batch_size=None) as loader,
        pytest.raises(DataError, match="sample 5 of the stream StreamOf raised ValueError"),
    ):
        list(loader)


class OwnWay(DataLoader):
    def __iter__(self) -> Any:
        return super().__iter__()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_has_no_samples_to_skip(workers: int) -> None:
    stream = StreamOf(Squash())
    for make in (
        lambda: Loader(stream, 4, num_workers=workers, on_error="skip"),
        lambda: Loader.from_dataloader(DataLoader(stream, 4, num_workers=workers), on_error="skip"),
        lambda: Loader.from_dataloader(OwnWay(Photos(halve), 4), on_error="skip"),
    ):
        with pytest.raises(UsageError, match=r'leave out on_error="skip", and pass over what'):
            make()


def _fails(worker: int) -> None:
    raise OSError(f"no database for {worker}")


@pytest.mark.parametrize("plan", ["processes", "inline"])
@pytest.mark.parametrize("dataset", [kinds.Plain(), kinds.Stream()])
def test_a_worker_init_function_that_raises(plan: str, dataset: Any) -> None:
    if plan == "inline" and isinstance(dataset, IterableDataset):
        pytest.skip("a stream is shared out by processes alone")
    original = DataLoader(dataset, 4, num_workers=2, worker_init_fn=_fails)
    words = "worker_init_fn _fails raised OSError in worker 0: no database for 0"
    for loader in (
        Loader.from_dataloader(original, plan=plan),
        Loader(dataset, 4, num_workers=1, worker_init_fn=_fails),
    ):
        with loader, pytest.raises(DataError, match=words):
            list(loader)


class UnsayableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Locked(kinds.Plain):
    """Raises what it is given, where it is pickled."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def __getstate__(self) -> Any:
        raise self.error


class LockedStream(IterableDataset):
    def __getstate__(self) -> Any:
        raise TypeError("cannot pickle a lock")

    def __iter__(self) -> Any:
        yield 1


LOCKED: Any = [
    (Locked(TypeError("cannot pickle a lock")), r"TypeError: cannot pickle a lock"),
    (Locked(TypeError("no default __reduce__ due to non-trivial __cinit__")), "non-trivial"),
    (Locked(RuntimeError("closed")), "RuntimeError: closed"),
    (Locked(UnsayableError()), r"UnsayableError: \(its __str__ raised"),
    (LockedStream(), "cannot pickle a lock"),
]


@pytest.mark.filterwarnings("ignore:Got pickle error")
@pytest.mark.parametrize("kind", ["spawn", "forkserver"])
@pytest.mark.parametrize(("dataset", "why"), LOCKED)
def test_what_cannot_be_pickled(dataset: Any, why: str, kind: str) -> None:
    options: Any = {"num_workers": 1, "multiprocessing_context": kind}
    name = type(dataset).__name__
    words = rf"the data set {name} cannot be sent to worker processes \(.*{why}.*\"fork\""
    for make in (
        lambda: Loader(dataset, 4, **options),
        lambda: Loader.from_dataloader(DataLoader(dataset, 4, **options)),
    ):
        with make() as loader, pytest.raises(UsageError, match=words) as info:
            list(loader)
        assert info.value.__cause__ is getattr(dataset, "error", info.value.__cause__)


@pytest.mark.parametrize("name", ["collate_fn", "worker_init_fn"])
def test_a_function_that_cannot_be_pickled(name: str) -> None:
    def inner(given: Any) -> Any:
        return given

    options: Any = {"num_workers": 1, "multiprocessing_context": "spawn", name: inner}
    for make in (
        lambda: Loader(kinds.Plain(), 4, **options),
        lambda: Loader.from_dataloader(DataLoader(kinds.Plain(), 4, **options)),
    ):
        words = f"{name} inner cannot be sent to worker processes"
        with make() as loader, pytest.raises(UsageError, match=words):
            list(loader)


def unopened() -> Any:
    raise ValueError("cannot be opened here")


class Unopened(kinds.Plain):
    def __reduce__(self) -> Any:
        return unopened, ()


@pytest.mark.parametrize("taken", [False, True])
def test_no_sample_is_blamed_for_a_worker_that_cannot_begin(
    taken: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    options: Any = {"num_workers": 1, "multiprocessing_context": "spawn"}
    if taken:
        loader = Loader.from_dataloader(DataLoader(Unopened(), 4, **options))
    else:
        loader = Loader(Unopened(), 4, **options)
    words = r"ended before its first batch.* is on stderr\. So did 2 before it$"
    with loader, pytest.raises(DataError, match=words) as info:
        list(loader)
    assert "sample" not in str(info.value)
    assert "ValueError: cannot be opened here" in capfd.readouterr().err


class Unsendable(kinds.Plain):
    def __getitem__(self, index: int) -> Any:
        return lambda: index


@pytest.mark.parametrize("way", ["processes", "taken, workers"])
def test_samples_that_cannot_travel(way: str) -> None:
    def as_it_is(samples: list[Any]) -> Any:
        return samples

    options: Any = {"num_workers": 2, "collate_fn": as_it_is}
    loader = Loader(Unsendable(), 4, **options)
    if way != "processes":
        loader = Loader.from_dataloader(DataLoader(Unsendable(), 4, **options))
    with loader, pytest.raises(DataError, match="cannot be sent from a worker process"):
        list(loader)


def test_what_cannot_travel_is_made_in_the_loop_s_thread_where_it_was() -> None:
    original: Any = DataLoader(Unsendable(), 4, collate_fn=list)
    with Loader.from_dataloader(original, plan="processes") as loader:
        assert [[give() for give in batch] for batch in loader][1] == [4, 5, 6, 7]


class OnDevice(kinds.Plain):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(2000, device=hasten.device())


class StreamOnDevice(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        yield from OnDevice()


@dataclass
class Held:
    values: torch.Tensor


def _placing(make: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda samples: make()


ON_DEVICE: dict[str, tuple[Any, Any]] = {
    "samples": (OnDevice(), None),
    "a stream's": (StreamOnDevice(), None),
    "samples as they are": (OnDevice(), lambda samples: samples),
    "in a dataclass": (OnDevice(), lambda samples: Held(default_collate(samples))),
    "the batch": (kinds.Plain(), _placing(lambda: torch.ones(3, device=hasten.device()))),
    "a parameter": (
        kinds.Plain(),
        _placing(lambda: torch.nn.Parameter(torch.ones(3, device=hasten.device()))),
    ),
    "sparse": (
        kinds.Plain(),
        _placing(lambda: torch.eye(3, device=hasten.device()).to_sparse()),
    ),
    "a storage": (
        kinds.Plain(),
        _placing(lambda: torch.ones(3, device=hasten.device()).untyped_storage()),
    ),
}


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("in_use", [False, True])
@pytest.mark.parametrize("what", ON_DEVICE)
def test_device_tensors_made_in_workers(what: str, in_use: bool, taken: bool) -> None:
    dataset, collate = ON_DEVICE[what]
    options: Any = {"num_workers": 1, "collate_fn": collate}
    with hasten.simulate():
        if in_use:  # then a forked process cannot use it at all
            torch.ones(1, device=hasten.device())
        loader = (
            Loader.from_dataloader(DataLoader(dataset, 4, **options))
            if taken
            else Loader(dataset, 4, **options)
        )
        with loader, pytest.raises(DataError) as caught:
            list(loader)
    words = (
        "Cannot re-initialize CUDA in forked subprocess" if in_use else "made a tensor on cuda:0"
    )
    assert words in str(caught.value)
    assert "Worker processes share no accelerator: leave samples on the host" in str(caught.value)


def as_arrays(samples: list[torch.Tensor]) -> Any:
    return torch.from_numpy(np.stack([sample.numpy() for sample in samples]))


@pytest.mark.parametrize("dataset", [OnDevice(), StreamOnDevice()])
def test_device_tensors_that_a_collate_function_in_a_worker_cannot_take(dataset: Any) -> None:
    with (
        hasten.simulate(),
        Loader(dataset, 4, num_workers=1, collate_fn=as_arrays) as loader,
        pytest.raises(DataError, match=r"made a tensor on cuda:0\. Worker processes share no"),
    ):
        list(loader)


class Lying(IterableDataset):
    def __init__(self, said: int) -> None:
        self.said = said

    def __len__(self) -> int:
        return self.said

    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("said", "batches"), [(40, 10), (12, 3)])
def test_a_len_that_lies(
    said: int, batches: int, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    for loader in (
        Loader(Lying(said), 4, num_workers=workers),
        Loader.from_dataloader(DataLoader(Lying(said), 4, num_workers=workers)),
    ):
        caplog.clear()
        assert len(list(loader)) == 5
        list(loader)
        (message,) = [text for text in caplog.messages if "the len of" in text]
        assert f"the len of Lying says {batches} batches, and it gave 5" in message
        loader.close()


class Parted(Lying):
    """Of which each worker reads its part."""

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        assert worker is not None
        return iter(range(worker.id, 20, worker.num_workers))


def test_each_worker_of_a_stream_may_have_a_last_batch_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Loader(Parted(20), 4, num_workers=2) as loader:
        assert (len(loader), len(list(loader))) == (5, 6)
    assert not [text for text in caplog.messages if "the len of" in text]
    with Loader(Parted(28), 4, num_workers=2) as loader:
        list(loader)
    assert not [text for text in caplog.messages if "the len of" in text], "nor may it be known"
    with Loader(Parted(32), 4, num_workers=2) as loader:
        list(loader)
    assert "the len of Parted says 8 batches, and it gave 6" in caplog.text


def test_a_len_of_a_sampler_that_lies(caplog: pytest.LogCaptureFixture) -> None:
    class Short(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(8))

        def __len__(self) -> int:
            return 20

    list(Loader(kinds.Plain(), 4, sampler=Short()))
    assert any("the len of Short says 5 batches, and it gave 2" in m for m in caplog.messages)


def test_a_true_len_is_no_matter(caplog: pytest.LogCaptureFixture) -> None:
    for way in WAYS:
        with WAYS[way](kinds.Plain(), 4) as loader:
            list(loader)
    list(Loader(kinds.Stream(), 4))
    with Loader(kinds.Stream(), 4, num_workers=2) as loader:
        list(loader)
    assert not [text for text in caplog.messages if "the len of" in text]


class Repeating(IterableDataset):
    def __init__(self, *, noisy: bool) -> None:
        self.noisy = noisy

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[float]:
        for number in range(12):
            yield number + (random.random() if self.noisy else 0)


@pytest.mark.parametrize(
    ("noisy", "seen"),
    [(False, "workers 0 and 1 began with the same batch"), (True, "each gave 12 samples")],
)
def test_a_stream_that_every_worker_repeats(noisy: bool, seen: str) -> None:
    words = f"Repeating gives the whole of its samples in each of the 2 workers .{seen}"
    with pytest.raises(DataError, match=words):
        list(Loader(Repeating(noisy=noisy), 4, num_workers=2))


def test_an_empty_data_set_that_was_taken_over_gives_what_it_gave() -> None:
    for options in ({}, {"num_workers": 1}):
        original: Any = DataLoader([], 4, **options)
        with Loader.from_dataloader(original) as loader:
            assert list(loader) == list(original) == []
    with pytest.raises(DataError, match=r"the data set \(list\) is empty"):
        Loader([], 4)


class Once(IterableDataset):
    """Gives the same iterator each time, which is used up after the first."""

    def __init__(self, count: int) -> None:
        self.numbers = iter(range(count))

    def __iter__(self) -> Iterator[int]:
        return self.numbers


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_gives_nothing_is_said(
    taken: bool, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    def loader(data: Any, **options: Any) -> Loader:
        if taken:
            return Loader.from_dataloader(DataLoader(data, 2, num_workers=workers, **options))
        return Loader(data, 2, num_workers=workers, **options)

    with loader(kinds.Stream(0)) as stream:
        assert list(stream) == list(stream) == []
    assert caplog.text.count("epoch 0 gave no batch: the stream Stream gave nothing") == 1
    assert "epoch 1" not in caplog.text, "it is said once"
    caplog.clear()
    with loader(Once(1), drop_last=True) as stream:
        assert list(stream) == []
    assert "or fewer samples than a batch has (2), which drop_last drops" in caplog.text


def test_a_stream_that_was_used_up_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with Loader(Once(3), 2) as stream:
        assert len(list(stream)) == 2
        assert caplog.text == ""
        assert list(stream) == []
    assert "epoch 1 gave no batch" in caplog.text
    assert "an iterator that is used up" in caplog.text


def test_a_position_at_the_end_of_a_stream_is_no_empty_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Loader(kinds.Counting(4), 2) as stream:
        batches = iter(stream)
        next(batches), next(batches)
        position = stream.state_dict()
        stream.load_state_dict(position)
        assert position["batch"] == 2
        assert list(stream) == []
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"batch_size": 30, "drop_last": True}, "drop_last=True leaves out what is less than a"),
        ({"sampler": []}, "the sampler list gave no index"),
        ({"batch_sampler": []}, "the sampler list gave no index"),
    ],
)
def test_an_epoch_without_a_batch_is_said(
    options: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    for kind in (kinds.Plain(), kinds.tables()["whole"]):
        caplog.clear()
        with Loader(kind, **options) as loader:
            assert list(loader) == []
        assert f"gave no batch: {why}" in caplog.text


class Unsayable(kinds.Plain):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise UnsayableError
        return super().__getitem__(index)


class UnsayableStream(kinds.Stream):
    def __iter__(self) -> Iterator[Any]:
        yield 1
        raise UnsayableError


def unsayable(_: Any) -> Any:
    raise UnsayableError


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Unsayable(), {"plan": "inline"}),
        (Unsayable(), {"plan": "threads"}),
        (Unsayable(), {"num_workers": 1}),
        (kinds.Plain(), {"collate_fn": unsayable}),
        (kinds.Plain(), {"num_workers": 1, "worker_init_fn": unsayable}),
        (UnsayableStream(), {}),
        (UnsayableStream(), {"num_workers": 1}),
        (kinds.Stream(), {"collate_fn": unsayable}),
    ],
)
def test_an_error_that_cannot_be_said_is_told_by_its_kind(
    dataset: Any, options: dict[str, Any]
) -> None:
    said = r"UnsayableError.*\(its __str__ raised RuntimeError\)"
    with Loader(dataset, 4, **options) as loader, pytest.raises(DataError, match=said):
        list(loader)


class Named:
    """A transform whose author calls itself otherwise."""

    def __call__(this, sample: Any) -> Any:
        raise ValueError("cannot")


def test_a_transform_is_named_whatever_it_calls_itself() -> None:
    class Transformed(kinds.Plain):
        transform = None

        def __getitem__(self, index: int) -> Any:
            return self.transform(index)

    dataset = Transformed()
    dataset.transform = Named()
    with pytest.raises(DataError, match="in its transform Named: cannot"):
        list(Loader(dataset, 4, plan="inline"))


class Unbegun(IterableDataset[Any]):
    def __iter__(self) -> Any:
        raise OSError("no such disk")


class NoIterator(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return [1, 2]


@pytest.mark.parametrize(
    ("kind", "words"), [(Unbegun, "OSError: no such disk"), (NoIterator, "TypeError: iter()")]
)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("taken", [False, True])
def test_a_stream_that_cannot_be_begun_is_told_in_one_way(
    kind: Any, words: str, workers: int, taken: bool
) -> None:
    if taken:
        loader = Loader.from_dataloader(DataLoader(kind(), 2, num_workers=workers))
    else:
        loader = Loader(kind(), 2, num_workers=workers)
    with loader, pytest.raises(DataError) as info:
        list(loader)
    assert words in str(info.value)
    assert "hasten/feed" not in str(info.value)
    assert (f"(at {__file__}:" in str(info.value)) == (kind is Unbegun)


def test_threads_of_a_stream_are_refused_in_words_of_their_own() -> None:
    with pytest.raises(UsageError, match="is not for the stream Unbegun"):
        Loader(Unbegun(), 2, plan="threads").explain()
