"""What is said when samples, workers or options are wrong."""

from __future__ import annotations

import inspect
import io
import multiprocessing
import os
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import feed_datasets as kinds
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset, Subset, TensorDataset

from hasten.errors import DataError, UsageError
from hasten.feed import Loader

PLANS = ["inline", "threads", "processes"]


class Broken(kinds.Fetching):
    """Samples 5 and 12 cannot be had; of a file that may be skipped where `skip`."""

    def __init__(self, *, skip: bool = False, all_of_it: bool = False) -> None:
        super().__init__()
        self.skip = skip
        self.bad = range(4, 8) if all_of_it else (5, 12)

    def fetch(self, index: int, key: int) -> Any:
        if index in self.bad:
            error = DataError("broken JPEG") if self.skip else OSError("no such file")
            error.skip = self.skip  # type: ignore[union-attr]
            raise error
        return super().fetch(index, key)


@pytest.mark.parametrize("plan", PLANS)
def test_a_sample_that_raises_is_named(plan: str) -> None:
    with (
        Loader(Broken(), 4, plan=plan) as loader,
        pytest.raises(DataError, match=r"sample 5 \(folder/file5\.jpg\).*OSError: no such") as info,
    ):
        list(loader)
    cause = info.value.__cause__
    assert isinstance(cause, OSError)
    assert "in fetch" in "".join(traceback.format_exception(cause)), "the original traceback"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("signalled", [False, True])
def test_skipping_leaves_the_others_as_they_were(plan: str, signalled: bool) -> None:
    options: Any = {} if signalled else {"on_error": "skip"}
    good = list(Loader(kinds.Fetching(), 4, plan="inline"))
    with Loader(Broken(skip=signalled), 4, plan=plan, **options) as loader:
        found = list(loader)
    assert [len(labels) for _, labels, _ in found] == [4, 3, 4, 3, 4, 3]
    assert torch.equal(found[1][0], good[1][0][[0, 2, 3]])
    assert found[1][2] == tuple(good[1][2][place] for place in (0, 2, 3))
    assert [index for index, _ in loader.skipped] == [5, 12]
    assert "folder/file12.jpg" in loader.skipped[1][1]
    assert loader.skipped_count == 2


@pytest.mark.parametrize("plan", PLANS)
def test_a_batch_of_which_nothing_is_left_is_not_given(plan: str) -> None:
    with Loader(Broken(all_of_it=True), 4, plan=plan, on_error="skip") as loader:
        states = [(labels[0].item(), loader.state_dict()["batch"]) for _, labels, _ in loader]
    assert states == [(0, 1), (8, 3), (12, 4), (16, 5), (20, 6)]


@pytest.mark.parametrize("plan", PLANS)
def test_an_epoch_of_which_nothing_is_left_is_told_of(
    plan: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone(kinds.Plain):
        def __getitem__(self, index: int) -> Any:
            raise OSError(f"photo {index} is gone")

    with Loader(Gone(), 4, plan=plan, on_error="skip") as loader:
        assert list(loader) == []
    told = [record.getMessage() for record in caplog.records if "every sample" in record.msg]
    assert len(told) == 1
    assert told[0].count("sample ") == 2, "every sample, and one by its name"
    assert "is gone" in told[0]


@pytest.mark.parametrize("plan", ["inline", "threads", "processes"])
def test_samples_that_were_left_out_are_told_of_at_the_epoch_s_end(
    plan: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Some(kinds.Plain):
        def __getitem__(self, index: int) -> Any:
            if index in (3, 5):
                raise OSError(f"{index} is gone")
            return index

    with Loader(Some(), 4, plan=plan, on_error="skip", shuffle=True) as loader:
        for _ in range(3):
            list(loader)
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(told) == 1, "their number stays the same"
    assert told[0].startswith("feed: 2 samples were left out, for one: sample 3 of Some")


def test_skipped_samples_keep_the_draws_of_the_others() -> None:
    def add(batch: Any, rng: Any) -> Any:
        return batch[1] + rng.uniform(1)[:, 0]

    options: Any = {"device_transform": add, "plan": "inline"}
    good = torch.cat(list(Loader(kinds.Fetching(), 4, **options).to("cpu")))
    found = torch.cat(list(Loader(Broken(), 4, on_error="skip", **options).to("cpu")))
    kept = [place for place in range(23) if place not in (5, 12)]
    assert torch.equal(found, good[kept])


@pytest.mark.parametrize("plan", ["inline", "threads", "processes"])
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (ZeroDivisionError("no width"), "device_transform flip raised ZeroDivisionError: no width"),
        (StopIteration(), "device_transform flip raised StopIteration"),
        (None, "device_transform flip gave None for batch 1 (samples 4, 5, 6, 7): it must return"),
    ],
)
def test_a_device_transform_that_raises_or_gives_nothing_is_named(
    broken: Exception | None, message: str, plan: str
) -> None:
    given = 0

    def flip(batch: Any, rng: Any) -> Any:
        nonlocal given
        given += 1
        if given == 1:
            return batch
        if broken is not None:
            raise broken
        return None

    with Loader(kinds.Plain(), 4, plan=plan, device_transform=flip) as loader:
        batches = iter(loader.to("cpu"))
        next(batches)
        with pytest.raises(DataError) as info:
            next(batches)
    assert message in str(info.value)
    if broken is not None:
        assert " on batch 1 (samples 4, 5, 6, 7) (at " in str(info.value)
        assert info.value.__cause__ is broken
        assert "in flip" in "".join(traceback.format_exception(broken))


def test_memory_that_runs_out_in_a_device_transform_is_told_as_that() -> None:
    def grow(batch: Any, rng: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        list(Loader(kinds.Plain(), 4, plan="inline", device_transform=grow).to("cpu"))


def test_it_is_said_that_a_device_transform_runs_on_the_batches_of_a_device() -> None:
    def flip(batch: Any, rng: Any) -> Any:
        return batch

    loader = Loader(kinds.Plain(), 4, plan="inline", device_transform=flip)
    assert "device_transform flip is for batches on a device" in loader.explain()
    assert "the batch, by device_transform" in loader.explain("cpu")
    assert "is for batches on a device" not in loader.explain("cpu")
    assert "device_transform" not in Loader(kinds.Plain(), 4, plan="inline").explain()


class Opening(kinds.Plain):
    def __getitem__(self, index: int) -> Any:
        return Image.open(io.BytesIO(b"no picture"))


def test_the_place_of_an_error_is_where_the_users_code_called_what_raised() -> None:
    with pytest.raises(DataError, match="cannot identify image file") as info:
        list(Loader(Opening(), 4, plan="inline"))
    line = inspect.getsourcelines(Opening.__getitem__)[1] + 1
    assert f"(at {__file__}:{line})" in str(info.value)


def test_what_is_installed_for_one_person_is_a_library_too(tmp_path: Path) -> None:
    folder = tmp_path / "lib" / "site-packages"
    folder.mkdir(parents=True)
    file = folder / "reader.py"
    file.write_text("def read():\n    raise ValueError('no header')\n")
    found: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), found)

    class Reading(kinds.Plain):
        def __getitem__(self, index: int) -> Any:
            return found["read"]()

    with pytest.raises(DataError, match="no header") as info:
        list(Loader(Reading(), 4, plan="inline"))
    assert f"(at {__file__}:" in str(info.value)


class Odd(kinds.Plain):
    def __init__(self, give: Any) -> None:
        super().__init__()
        self.give = give

    def __getitem__(self, index: int) -> Any:
        return self.give(index)

    def __getstate__(self) -> Any:
        raise TypeError("cannot pickle this")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda index: None, "gave None for sample 0"),
        (lambda index: (torch.zeros(2 + index), 1), r"sample 1 is \(float32 \[3\], int\)"),
        (lambda index: [1][index], "len says 23, so it should have a sample 1"),
    ],
)
def test_unusable_samples(give: Any, message: str, workers: int) -> None:
    with pytest.raises(DataError, match=message):
        list(Loader(Odd(give), 4, num_workers=workers))


def test_a_collate_function_that_raises_is_named() -> None:
    def squash(samples: list[Any]) -> Any:
        raise ValueError("too long")

    with pytest.raises(DataError, match=r"collate_fn squash raised ValueError: too long"):
        list(Loader(kinds.Plain(), 4, collate_fn=squash))


def test_none_is_for_a_collate_function_to_judge() -> None:
    def count(samples: list[Any]) -> int:
        return len([sample for sample in samples if sample is not None])

    assert next(iter(Loader(Odd(lambda i: i if i % 2 else None), 4, collate_fn=count))) == 2


class Killed(kinds.Plain):
    def __getitem__(self, index: int) -> int:
        if index == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class Late(kinds.Plain):
    def __getitem__(self, index: int) -> int:
        time.sleep(20)
        return index


def _fails(worker: int) -> None:
    raise OSError(f"no database for {worker}")


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (Killed(), {}, r"worker process \d+ was killed by SIGKILL. Likely .* out of memory"),
        (Late(), {"timeout": 0.5}, r"within timeout=0.5 s"),
        (kinds.Plain(), {"worker_init_fn": _fails}, r"_fails raised OSError in worker 0: no data"),
        (kinds.Stream(), {"worker_init_fn": _fails}, r"no database for 0"),
    ],
)
def test_worker_trouble(
    dataset: Any, options: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    with pytest.raises(DataError, match=message):
        list(Loader(dataset, 4, num_workers=1, **options))


def test_a_worker_that_dies_is_told_of_by_next_and_not_in_the_middle_of_a_step() -> None:
    batches = iter(Loader(Killed(), 4, num_workers=1, prefetch_factor=1))
    next(batches)
    next(batches)  # the third batch is on its way, and kills its worker
    ended = time.monotonic() + 30
    while multiprocessing.active_children() and time.monotonic() < ended:
        time.sleep(0.01)  # a step during which SIGCHLD comes
    with pytest.raises(DataError, match="SIGKILL"):
        next(batches)


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_what_cannot_be_pickled_is_said_with_a_way_out() -> None:
    with pytest.raises(UsageError, match=r"Odd cannot be sent to worker processes.*fork"):
        list(Loader(Odd(int), 4, num_workers=1, multiprocessing_context="spawn"))


class Meta(kinds.Plain):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(2, device="meta")


def test_device_tensors_made_in_workers() -> None:
    with pytest.raises(DataError, match=r"tensor on meta.*leave samples on the host"):
        list(Loader(Meta(), 4, num_workers=1))


class BadStream(IterableDataset):
    def __iter__(self) -> Any:
        yield from range(5)
        raise OSError("connection lost")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_raises(workers: int) -> None:
    found = []
    with pytest.raises(DataError, match="connection lost"):
        for batch in Loader(BadStream(), 2, num_workers=workers):
            found.append(batch.tolist())
    assert found == [[0, 1], [2, 3]]


DATA = TensorDataset(torch.zeros(6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": -3}, "batch_size is -3"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"batch_size": True}, "batch_size is True"),
        ({"batch_sampler": [[1]], "shuffle": True}, "batch_sampler makes the batches itself"),
        ({"batch_sampler": [[1]], "batch_size": 2}, "batch_sampler makes the batches itself"),
        ({"sampler": [1], "shuffle": True}, "sampler sets the order"),
        ({"batch_size": None, "drop_last": True}, "drop_last has no meaning"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"num_workers": "two"}, "num_workers is 'two'"),
        ({"num_workers": 0, "prefetch_factor": 2}, "prefetch_factor is for worker processes"),
        ({"num_workers": 0, "persistent_workers": True}, "persistent_workers is for worker"),
        ({"num_workers": 0, "multiprocessing_context": "fork"}, "multiprocessing_context is for"),
        ({"num_workers": 0, "plan": "processes"}, "it needs workers"),
        ({"num_workers": 2, "plan": "gather"}, "it has none"),
        ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor is 0"),
        ({"timeout": -1}, "timeout is -1"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"seed": "a"}, "seed is 'a'"),
        ({"on_error": "ignore"}, "on_error is 'ignore'"),
        ({"pin_memory": "yes"}, "pin_memory is 'yes'"),
        ({"plan": "magic"}, "no plan 'magic'; there are auto, resident"),
        ({"dataset": kinds.Stream(), "shuffle": True}, "leave out shuffle"),
        ({"dataset": kinds.Stream(), "sampler": [1]}, "leave out sampler"),
        ({"dataset": 5}, "int is no data set"),
        ({"dataset": (i for i in range(3))}, "generator is no data set"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Loader(**{"dataset": DATA, **options})


@pytest.mark.parametrize("dataset", [[], TensorDataset(torch.zeros(0)), Subset(DATA, [])])
def test_an_empty_data_set(dataset: Any) -> None:
    with pytest.raises(DataError, match="empty"):
        Loader(dataset, 4)


def test_plans_that_the_data_set_does_not_allow() -> None:
    with pytest.raises(UsageError, match=r'plan="threads" with several threads needs a data set'):
        list(Loader(kinds.Plain(), plan="threads", num_workers=2))
    with pytest.raises(UsageError, match="Plain is not recognised"):
        list(Loader(kinds.Plain(), plan="gather"))


@pytest.mark.parametrize("plan", ["gather", "inline", "threads", "processes"])
def test_a_batch_without_indices(plan: str) -> None:
    dataset: Any = DATA if plan == "gather" else kinds.Plain(6)
    batches = [[1], [], [2]]
    with (
        Loader(dataset, batch_sampler=batches, plan=plan) as loader,
        pytest.raises(DataError, match="the sampler gave a batch without indices"),
    ):
        list(loader)
    if plan != "gather":  # one's own function may make something of it
        with Loader(dataset, batch_sampler=batches, plan=plan, collate_fn=len) as loader:
            assert list(loader) == [1, 0, 1]


@pytest.mark.parametrize("sampler", [[5, 6], [-7]])
def test_indices_beyond_the_data_set(sampler: list[int]) -> None:
    with pytest.raises(DataError, match="beyond the 6 samples"):
        list(Loader(DATA, 2, sampler=sampler))
