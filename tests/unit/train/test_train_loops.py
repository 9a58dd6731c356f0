"""Which loop of a resumed epoch goes on with which: by its place, whoever made its loader."""

from __future__ import annotations

import gc
import itertools
import shutil
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset
from train_helpers import INTERRUPT, QUIET

import hasten
from hasten.errors import CheckpointError, Interrupted, UsageError

EPOCHS = 4
COUNT = 40
Loops = Callable[[int], Iterable[Iterable[Any]]]
"""The loaders of an epoch's loops."""


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Noisy(Numbers):
    """Draws from the generators of all."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + torch.rand(1)


class Own(Numbers):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + float(self.rng.random())


class Bar:
    """What tqdm is, but for the bar."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self.iterable = iterable

    def __len__(self) -> int:
        return len(self.iterable)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        yield from self.iterable


class Growing(Sampler[int]):
    """More samples in each epoch, which it is told."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 16 + 8 * self.epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(self)).tolist())


class Counting(Sampler[int]):
    """More samples in each epoch, which it counts."""

    def __init__(self) -> None:
        self.epoch = -1

    def __len__(self) -> int:
        return 16 + 8 * max(self.epoch, 0)

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(len(self)).tolist())


class Kept(Counting):
    """And keeps."""

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


def shuffled(data: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(data or Numbers(), 8, shuffle=True, **options)


def always(loader: Any) -> Loops:
    return lambda epoch: [loader]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def wrapping(wrap: Callable[[Any], Any]) -> Callable[[int], list[Any]]:
    loader = shuffled(Noisy())
    return lambda epoch: [wrap(loader)]


def alternating() -> Loops:
    one, other = shuffled(generator=seeded(5)), hasten.Loader(Numbers(), 8, shuffle=True)
    return lambda epoch: [other, one] if epoch % 2 else [other]


def twice() -> Loops:
    loader = shuffled(Noisy(), generator=seeded(5))
    return lambda epoch: [loader, loader]


CASES: dict[str, Callable[[], Loops]] = {
    "kept": lambda: always(shuffled(Noisy())),
    "kept, a generator": lambda: always(shuffled(generator=seeded(5))),
    "DataLoader": lambda: lambda epoch: [shuffled(Noisy())],
    "DataLoader, workers": lambda: lambda epoch: [shuffled(Noisy(), num_workers=1)],
    "DataLoader, a generator": lambda: lambda epoch: [shuffled(generator=seeded(epoch))],
    "Loader": lambda: lambda epoch: [hasten.Loader(Numbers(), 8, shuffle=True)],
    "Subset": lambda: lambda epoch: [shuffled(Subset(Noisy(), range(16 + 8 * epoch)))],
    "bar": lambda: wrapping(Bar),
    "generator": lambda: wrapping(lambda loader: (batch for batch in loader)),
    "islice": lambda: wrapping(lambda loader: itertools.islice(loader, 4)),
    "list": lambda: lambda epoch: [list(shuffled(generator=seeded(epoch)))],
    "two": lambda: lambda epoch: [shuffled(Noisy()), hasten.Loader(Numbers(), 8, shuffle=True)],
    "one twice": twice,
    "now and then": alternating,
    "set_epoch": lambda: always(DataLoader(Noisy(), 8, sampler=Growing())),
    "set_epoch, Loader": lambda: always(hasten.Loader(Numbers(), 8, sampler=Growing())),
    "set_epoch, bar": lambda: lambda epoch: [DataLoader(Noisy(), 8, sampler=Growing())],
    "state_dict": lambda: always(DataLoader(Noisy(), 8, sampler=Kept())),
    "state_dict, Loader": lambda: always(hasten.Loader(Numbers(), 8, sampler=Kept())),
}


def train(
    folder: Path,
    loops: Loops,
    *,
    stop: float = -1,
    resume: bool = False,
    most: int | None = None,
) -> list[Any]:
    """All that a run's loops see, and what they draw, to its end or until that many batches were
    seen (and a half: at the epoch's end). The first loop of an epoch takes at most so many."""
    run = hasten.Run(**QUIET, folder=folder, resume=resume, seed=3, checkpoint_every="never")
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    run.prepare(model, optimizer)
    seen: list[Any] = []
    for epoch in run.epochs(EPOCHS):
        for place, loader in enumerate(loops(epoch)):
            for batch in itertools.islice(run.batches(loader), None if place else most):
                run.backward(model(batch).square().mean())
                run.step(optimizer)
                seen.append((epoch, batch.flatten().tolist(), torch.rand(1).item()))
                if len(seen) == stop:
                    INTERRUPT()
        if len(seen) == stop - 0.5:
            INTERRUPT()
    seen.append([p.tolist() for p in model.parameters()])
    return seen


def stopped(folder: Path, loops: Loops, stop: float, **options: Any) -> None:
    with pytest.raises(Interrupted):
        train(folder, loops, stop=stop, **options)
    torch.manual_seed(987 + int(stop))  # whatever the new process begins with


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_given_the_same(case: str, tmp_path: Path):
    make = CASES[case]
    whole = train(tmp_path / "whole", make())
    ends = list(itertools.accumulate(Counter(epoch for epoch, *_ in whole[:-1]).values()))
    one, two, last = ends[0], ends[1], ends[-1]
    for stop in (1, one, one + 0.5, one + 1, two, two + 0.5, two + 1, two + 3, last - 2):
        folder = tmp_path / f"{stop}"
        stopped(folder, make(), stop)
        assert train(folder, make(), resume=True) == whole[int(stop) :], f"after {stop}"


@pytest.mark.parametrize("loader", [lambda: shuffled(Noisy()), lambda: wrapping(Bar)(0)[0]])
def test_a_loop_that_was_left_before_the_stop_is_not_gone_on_with(loader: Any, tmp_path: Path):
    def make() -> Loops:
        one = loader()
        return lambda epoch: [one, one]

    whole = train(tmp_path / "whole", make(), most=2)
    for stop in (3, 6, 10, 14):  # of an epoch's 2 + 5 batches, the 3rd, 6th, 3rd and 7th
        folder = tmp_path / f"{stop}"
        stopped(folder, make(), stop, most=2)
        assert train(folder, make(), resume=True, most=2) == whole[stop:], f"after {stop}"


def test_what_was_drawn_before_the_loop_is_not_drawn_twice(tmp_path: Path):
    def make() -> Loops:
        loader = shuffled(Noisy())

        def loops(epoch: int) -> list[Any]:
            torch.rand(3)
            return [loader]

        return loops

    whole = train(tmp_path / "whole", make())
    stopped(tmp_path / "run", make(), 7)
    assert train(tmp_path / "run", make(), resume=True) == whole[7:]


def always_own() -> Loops:
    return always(shuffled(Own()))


def anew_own() -> Loops:
    data = Own()
    return lambda epoch: [shuffled(data)]


@pytest.mark.parametrize("make", [always_own, anew_own])
def test_a_data_set_that_had_changed_is_told_of(
    make: Callable[[], Loops], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    whole = train(tmp_path / "whole", make())
    for stop in (2, 5.5, 7):  # within the first epoch, at its end, within the next
        folder = tmp_path / f"{stop}"
        stopped(folder, make(), stop)
        caplog.clear()
        same = train(folder, make(), resume=True) == whole[int(stop) :]
        assert ("the data set had changed when samples were made" in caplog.text) is not same
        assert same is (stop == 2)  # it is read again from its beginning, as it was then


class Told(Numbers):
    """Is told the epoch, by the loop."""

    epoch = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + 100 * self.epoch


class SetEpoch(Told):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("kind", [Told, SetEpoch])
@pytest.mark.parametrize("persistent", [True, False])
def test_what_persistent_workers_did_not_have_is_told_of(
    kind: type[Told], persistent: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    def make() -> Loops:
        data = kind()
        loader = shuffled(data, num_workers=1, persistent_workers=persistent)

        def loops(epoch: int) -> list[Any]:
            data.epoch = epoch
            return [loader]

        return loops

    whole = train(tmp_path / "whole", make())
    for stop in (2, 5.5, 7) if kind is SetEpoch else (2, 7):
        folder = tmp_path / f"{stop}"
        stopped(folder, make(), stop)
        caplog.clear()
        same = train(folder, make(), resume=True) == whole[int(stop) :]
        assert ("persistent workers have the data set as it was" in caplog.text) is not same
        assert same is (stop == 2 or not persistent)


def test_a_loader_taken_for_the_one_of_before_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    def train_on(make: Callable[[], Loops], folder: Path, stop: float) -> str:
        stopped(folder, make(), stop)
        caplog.clear()
        train(folder, make(), resume=True)
        return caplog.text

    anew = CASES["DataLoader, a generator"]
    assert "seeded otherwise than the first epoch's" in train_on(anew, tmp_path / "1", 5.5)
    assert not train_on(anew, tmp_path / "2", 10.5), "two epochs have shown it"

    def alike() -> Loops:
        return lambda epoch: [shuffled(generator=seeded(1))]

    assert "makes a DataLoader anew in each epoch" in train_on(alike, tmp_path / "3", 5.5)
    assert not train_on(alike, tmp_path / "4", 10.5)
    kept = CASES["kept, a generator"]
    assert not train_on(kept, tmp_path / "5", 5.5)


def test_loaders_that_no_place_tells_apart_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    def make() -> Loops:
        one, other = shuffled(generator=seeded(1)), shuffled(generator=seeded(2))
        return lambda epoch: [other if epoch % 2 else one]

    stopped(tmp_path / "run", make(), 10.5)
    train(tmp_path / "run", make(), resume=True)
    assert "also trained on 1 loader" in caplog.text


def test_a_loop_that_does_not_come_again_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    stopped(tmp_path / "run", CASES["two"](), 7)
    train(tmp_path / "run", CASES["DataLoader"](), resume=True)
    assert "within loop 2 over run.batches of its epoch, and the resumed epoch had 1" in caplog.text


def test_a_sampler_that_cannot_be_brought_there_is_refused_and_told_of(tmp_path: Path):
    def make() -> Loops:
        return always(DataLoader(Noisy(), 8, sampler=Counting()))

    stopped(tmp_path / "run", make(), 3)
    with pytest.raises(CheckpointError, match=r"epoch of 3 batches.* gives 2: .*set_epoch"):
        train(tmp_path / "run", make(), resume=True)


# --- loaders that are made anew ---------------------------------------------------------------


class Large(Numbers):
    """What nobody wants to have twice."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)


MADE_ANEW: dict[str, Callable[[], Any]] = {
    "DataLoader": lambda: shuffled(Large()),
    "workers": lambda: shuffled(Large(), num_workers=1),
    "persistent workers": lambda: shuffled(Large(), num_workers=1, persistent_workers=True),
    "Loader": lambda: hasten.Loader(Large(), 8, shuffle=True, num_workers=1, plan="processes"),
    "bar": lambda: Bar(shuffled(Large())),
    "generator": lambda: (batch for batch in shuffled(Large())),
    "map": lambda: map(torch.neg, shuffled(Large())),  # which no weak reference can be had to
}


@pytest.mark.parametrize("kind", MADE_ANEW)
@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_kept_of_a_loader_that_nobody_has_any_more(kind: str, training: bool):
    run = hasten.Run(**QUIET)
    gc.collect()
    gc.disable()
    try:
        for _ in run.epochs(5):
            loader = MADE_ANEW[kind]()
            for _ in run.batches(loader, training=training):
                assert len(active_children()) <= 1
            del loader, _
            assert len(Large.alive) <= 1
    finally:
        gc.enable()


class Grudging(Sampler[int]):
    """As many in each epoch, in an order that it keeps to itself."""

    def __init__(self) -> None:
        self.first = 0

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        self.first += 7
        return iter([(self.first + n) % COUNT for n in range(COUNT)])


@pytest.mark.parametrize("kind", [DataLoader, hasten.Loader])
def test_how_an_epoch_is_begun_anew_is_said(kind: Any, tmp_path: Path):
    def make() -> Loops:
        return always(kind(Numbers(), 8, sampler=Grudging()))

    stopped(tmp_path / "run", make(), 7)
    with pytest.raises(
        UsageError, match="For epoch 2 anew, remove what is newer than step-00000005"
    ):
        train(tmp_path / "run", make(), resume=True)
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000007")
    assert train(tmp_path / "run", make(), resume=True)[0][0] == 1


KINDS: dict[str, Callable[[], Any]] = {
    "DataLoader": lambda: shuffled(),
    "taken": lambda: hasten.Loader.from_dataloader(shuffled()),
    "Loader": lambda: hasten.Loader(Numbers(), 8, shuffle=True),
    "in order": lambda: hasten.Loader(Numbers(), 8),
    "list": lambda: list(shuffled(generator=seeded(1))),
}


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("DataLoader", "Loader", "in an epoch of a DataLoader, and this loader is a Loader"),
        ("taken", "Loader", "in an epoch of a DataLoader, and this loader is a Loader"),
        ("Loader", "DataLoader", "in an epoch of a hasten.Loader, and this loader is a DataLoader"),
        ("Loader", "taken", "in an epoch of a hasten.Loader, and this loader is a DataLoader"),
        ("DataLoader", "list", "in an epoch of a DataLoader, and this loader is a list"),
        ("Loader", "in order", "shuffle=True, and this Loader has False"),
        ("in order", "Loader", "shuffle=False, and this Loader has True"),
        ("DataLoader", "taken", ""),
        ("Loader", "Loader", ""),
    ],
)
def test_an_epoch_is_not_gone_on_with_in_another_order(
    before: str, after: str, says: str, tmp_path: Path
):
    """40 of 200 samples were never seen, and as many twice."""
    stopped(tmp_path / "run", always(KINDS[before]()), 7)
    if not says:
        train(tmp_path / "run", always(KINDS[after]()), resume=True)
        return
    with pytest.raises((CheckpointError, UsageError)) as info:
        train(tmp_path / "run", always(KINDS[after]()), resume=True)
    assert says in str(info.value)
    assert "For epoch 2 anew, remove what is newer than" in str(info.value)


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0), (0, 0)])
def test_an_epoch_that_other_workers_go_on_with_is_told_of(
    before: int, after: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    stopped(tmp_path / "run", always(shuffled(num_workers=before)), 7)
    caplog.clear()
    train(tmp_path / "run", always(shuffled(num_workers=after)), resume=True)
    told = f"num_workers={before}, and the DataLoader has {after} now"
    assert (told in caplog.text) == (before != after)
