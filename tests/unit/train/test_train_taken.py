"""A plain DataLoader is taken over unasked: a training sees and comes to the same, bit for bit."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import taken_cases
import torch
from taken_cases import (
    COUNT,
    EPOCHS,
    MAKERS,
    WORKERS,
    Arrays,
    AsGiven,
    Seen,
    Stream,
    Transformed,
    train,
)
from test_train_resume import assert_same_nest
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, Subset, TensorDataset
from train_helpers import INTERRUPT, QUIET, mlp, points, saved, sgd, trainer

import hasten
import warm
from hasten.errors import DataError, Interrupted

CALLS = 5 + 3  # of the loss in an epoch: 40 points by 8, and 20 to validate on


def assert_the_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"]
    assert found["end"] == expected["end"]
    assert len(found["seen"]) == len(expected["seen"])
    for place, (ours, theirs) in enumerate(zip(found["seen"], expected["seen"], strict=True)):
        same = all(torch.equal(a, b) for a, b in zip(ours[:2], theirs[:2], strict=True))
        assert same and ours[2] == theirs[2], f"at call {place} of the loss"
    assert_same_nest(found["state"], expected["state"])


def check(
    make: Callable[[], Any],
    act: Callable[[Any, int], None] = lambda given, call: None,
    **options: Any,
) -> str:
    """Compare with iterating it as it is; how it was fed."""
    given = make()
    expected = as_given(given, act=lambda call: act(given, call), **options)
    taken = make()
    found = train(taken, lambda call: act(taken, call), **options)
    assert_the_same(found, expected)
    assert expected["feed"] == "AsGiven, as given"
    return str(found["feed"])


def as_given(given: Any, val: Any = None, **options: Any) -> dict[str, Any]:
    """What iterating DataLoaders as they are comes to; their lasting workers are ended."""
    try:
        return train(AsGiven(given), val=None if val is None else AsGiven(val), **options)
    finally:
        for one in (given, val):
            if one is not None and one._iterator is not None:
                one._iterator._shutdown_workers()
                one._iterator = None


@pytest.mark.parametrize("workers", ["0", "2", "2, persistent"])  # "1": see below
@pytest.mark.parametrize("name", MAKERS)
def test_a_training_is_what_it_was(name: str, workers: str) -> None:
    feed = check(lambda: MAKERS[name](**WORKERS[workers]))
    whole = name in ("shuffled", "own generator", "arrays", "parts", "weighted", "batches")
    plan = "processes" if workers != "0" else "gather" if whole else "inline"
    assert feed.split()[0].rstrip(",") == plan


@pytest.mark.parametrize("workers", ["1", "2", "2, persistent"])
def test_a_stream_of_workers(workers: str) -> None:
    assert "process" in check(lambda: DataLoader(Stream(), 8, **WORKERS[workers]))


@pytest.mark.parametrize("workers", WORKERS)
def test_a_data_set_that_changes_when_it_is_asked(workers: str) -> None:
    check(lambda: DataLoader(Seen(), 8, shuffle=True, **WORKERS[workers]))


# --- what the loop does to the data -----------------------------------------------------------

SETTINGS = types.ModuleType("settings_of_a_script")


class BySettings(Dataset[Any]):
    """Its samples follow from a variable of a module."""

    def __init__(self) -> None:
        self.x, self.y = points()[:]
        SETTINGS.scale = 1.0  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self.x[index] * SETTINGS.scale, self.y[index]


class Scaled(Arrays):
    """Computes with an attribute."""

    scale = 1.0

    def __getitem__(self, index: int) -> Any:
        return self.x[index] * self.scale, self.y[index]


class ByMethod(Arrays):
    """Has one of its methods in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.row = self.plain

    def plain(self, index: int) -> Any:
        return self.x[index]

    def doubled(self, index: int) -> Any:
        return self.x[index] * 2

    def __getitem__(self, index: int) -> Any:
        return self.row(index), self.y[index]


def of_array() -> TensorDataset:
    """Tensors over the memory of NumPy arrays."""
    x, y = points()[:]
    return TensorDataset(torch.from_numpy(x.numpy().copy()), y.clone())


def write_array(data: Any, call: int) -> None:
    data.x[call % COUNT :] *= 1.1


def write_below(data: Any, call: int) -> None:
    data.tensors[0].numpy()[call % COUNT :] *= 1.1


def write_tensor(data: Any, call: int) -> None:
    data.tensors[0][call % COUNT :] *= 1.1


def write_data(data: Any, call: int) -> None:
    data.tensors[0].data[call % COUNT :] *= 1.1


def give_memory(data: Any, call: int) -> None:
    data.tensors[0].data = data.tensors[0].data * 1.1


def write_list(data: Any, call: int) -> None:
    data.y[call % COUNT] = (data.y[call % COUNT] + 1) % 3


def write_indices(data: Any, call: int) -> None:
    data.indices[call % len(data.indices)] = (7 * call) % COUNT


def write_inner_indices(data: Any, call: int) -> None:
    write_indices(data.dataset, call)


def set_scale(data: Any, call: int) -> None:
    data.scale = 1 + call / 10


def set_setting(data: Any, call: int) -> None:
    SETTINGS.scale = 1 + call / 10  # type: ignore[attr-defined]


def take_other_method(data: Any, call: int) -> None:
    data.row = data.doubled if call % 3 else data.plain


def turn_around(data: Any, call: int) -> None:
    if call > CALLS:
        data.tensors = tuple(t.flip(0) for t in data.tensors)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any, int], None]]] = {
    "an array": (Arrays, write_array),
    "the array below a tensor": (of_array, write_below),
    "a tensor": (points, write_tensor),
    "a tensor's data": (points, write_data),
    "a tensor's memory": (points, give_memory),
    "a list": (Arrays, write_list),
    "the indices of a subset": (lambda: Subset(points(), list(range(30))), write_indices),
    "those of a subset of a subset": (
        lambda: Subset(Subset(points(), list(range(30))), list(range(3, 25))),
        write_inner_indices,
    ),
    "an attribute": (Scaled, set_scale),
    "a module's variable": (BySettings, set_setting),
    "a method": (ByMethod, take_other_method),
    "all tensors": (points, turn_around),
}


@pytest.mark.parametrize("workers", ["0", "2", "2, persistent"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_the_loop_writes_comes_when_it_would(name: str, workers: str) -> None:
    make, act = CHANGES[name]
    feed = check(
        lambda: DataLoader(make(), 8, shuffle=True, **WORKERS[workers]),
        lambda given, call: act(given.dataset, call),
    )
    assert not feed.startswith(("resident", "gather") if workers != "0" else "resident")


@pytest.mark.parametrize("workers", ["0", "2"])
def test_another_collate_function_from_some_epoch_on(workers: str) -> None:
    def act(given: Any, call: int) -> None:
        if call == CALLS + 2:
            given.collate_fn = taken_cases.numbers

    check(lambda: DataLoader(Transformed(), 8, shuffle=True, **WORKERS[workers]), act)


def test_no_workers_from_some_epoch_on_in_place_of_lasting_ones() -> None:
    def act(given: Any, call: int) -> None:
        if call == CALLS + 2:
            given.num_workers, given.prefetch_factor = 0, None

    check(lambda: DataLoader(Transformed(), 8, shuffle=True, **WORKERS["2, persistent"]), act)


@pytest.mark.parametrize("workers", ["0", "2", "2, persistent"])
def test_validation_with_it_and_with_the_same(workers: str) -> None:
    def val() -> Any:
        return DataLoader(Transformed(), 8, shuffle=True, **WORKERS[workers])

    assert_the_same(train(val(), val=val()), as_given(val(), val=val()))
    if workers != "2, persistent":  # whose workers a DataLoader has but once
        both, given = val(), val()
        assert_the_same(train(both, val=both), as_given(given, val=given))


# --- gone on with -----------------------------------------------------------------------------


def go_on(folder: Path, given: Any, at: int, **options: Any) -> dict[str, Any]:
    """Stop at a call of the loss, then go on with what `given` makes, from other random states."""

    def stop(call: int) -> None:
        if call == at:
            INTERRUPT()

    with pytest.raises(Interrupted):
        train(given(), stop, folder=folder, **options)
    return train(given(), folder=folder, resume=True, **options)


def assert_ends_alike(found: dict[str, Any], whole: dict[str, Any]) -> None:
    assert found["losses"] == whole["losses"]
    assert found["end"] == whole["end"]
    assert_same_nest(found["state"], whole["state"])


@pytest.mark.parametrize("before", ["", "as given"])
@pytest.mark.parametrize(
    ("name", "workers", "at"),
    [
        ("shuffled", "0", 10),
        ("weighted", "0", 3),
        ("collated", "0", 11),
        ("transformed", "2", 9),
    ],
)
def test_another_process_goes_on(
    tmp_path: Path, name: str, workers: str, at: int, before: str
) -> None:
    """Also with what was saved before DataLoaders were taken over."""
    given = name, workers, tmp_path / "run", at, torch.get_num_threads(), before
    command = [sys.executable, taken_cases.__file__, *map(str, given)]
    warm.run(command, check=True, timeout=120)
    assert saved(tmp_path / "run").training["sources"][0]["batches"] == at % CALLS + 1
    assert bool(saved(tmp_path / "run").training["sources"][0]["loader"]) is not bool(before)
    make = MAKERS[name]
    found = train(make(**WORKERS[workers]), folder=tmp_path / "run", resume=True)
    assert_ends_alike(found, as_given(make(**WORKERS[workers])))


@pytest.mark.parametrize("at", [2, 4, 6, 7, 10, 13, 17])
@pytest.mark.parametrize("workers", ["0", "2"])
def test_it_is_gone_on_with_at_any_point(tmp_path: Path, workers: str, at: int) -> None:
    def make() -> Any:
        return DataLoader(Transformed(), 8, shuffle=True, **WORKERS[workers])

    assert_ends_alike(go_on(tmp_path, make, at), as_given(make()))


@pytest.mark.parametrize("at", [2, 7, 10])
def test_lasting_workers_are_gone_on_with(tmp_path: Path, at: int) -> None:
    def make() -> Any:
        return DataLoader(Transformed(), 8, shuffle=True, **WORKERS["2, persistent"])

    assert_ends_alike(go_on(tmp_path, make, at), train(make()))


@pytest.mark.parametrize(("workers", "at"), [("0", 2), ("2", 3), ("2", 10), ("2", 5)])
def test_what_changes_when_it_is_asked_is_read_again(tmp_path: Path, workers: str, at: int) -> None:
    """Without workers as far as the first epoch goes; workers begin anew with each."""

    def make() -> Any:
        return DataLoader(Seen(), 8, shuffle=True, **WORKERS[workers])

    assert_ends_alike(go_on(tmp_path, make, at), as_given(make()))


@pytest.mark.parametrize("at", [7, 10])
def test_an_epoch_of_lasting_workers_is_read_again_in_its_order(
    tmp_path: Path, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """From an epoch's end and from within: no seed is drawn for workers that would have gone on."""

    def make() -> Any:
        return DataLoader(Counting(), 8, shuffle=True, **WORKERS["2, persistent"])

    found = go_on(tmp_path, make, at)
    assert sum("in a worker its data set changes" in message for message in caplog.messages) == 1
    assert_ends_alike(found, as_given(make()))


@pytest.mark.parametrize(("before", "after"), [("2", "0"), ("0", "2"), ("1", "2")])
def test_another_number_of_workers_goes_on(tmp_path: Path, before: str, after: str) -> None:
    made = iter([before, after])
    found = go_on(tmp_path, lambda: MAKERS["shuffled"](**WORKERS[next(made)]), 10)
    assert_ends_alike(found, as_given(MAKERS["shuffled"](**WORKERS[before])))


@pytest.mark.parametrize("at", [7, 10])
def test_a_loader_with_a_generator_of_its_own(tmp_path: Path, at: int) -> None:
    def make() -> Any:
        generator = taken_cases.generator()
        return hasten.Loader(points(), 8, True, generator=generator, num_workers=0)

    assert_ends_alike(go_on(tmp_path, make, at), train(make()))


class Counting(Transformed):
    """Changes when it is asked; its samples do not follow from that."""

    count = 0

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return super().__getitem__(index)


class Moving(Sampler[int]):
    """Its order follows from the epoch, and from what it gave before: it has a state of its own."""

    def __init__(self) -> None:
        self.epoch, self.given = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.given = state["epoch"], state["given"]

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        self.given += 3
        order = torch.Generator().manual_seed(100 * self.epoch + self.given)
        yield from torch.randperm(COUNT, generator=order).tolist()


@pytest.mark.parametrize("at", [2, 7, 10, 17])
@pytest.mark.parametrize("kind", ["taken", "asked", "loader"])
def test_samplers_with_a_state_of_their_own(tmp_path: Path, kind: str, at: int) -> None:
    def make() -> Any:
        if kind == "loader":
            return hasten.Loader(points(), 8, sampler=Moving(), num_workers=0)
        given = DataLoader(points(), 8, sampler=Moving())
        return given if kind == "taken" else hasten.Loader.from_dataloader(given)

    whole = train(make())
    assert_ends_alike(go_on(tmp_path, make, at), whole)
    if kind != "loader":
        assert_the_same(whole, as_given(DataLoader(points(), 8, sampler=Moving())))


# --- the rest of what a run does ---------------------------------------------------------------


class Broken(Transformed):
    def __getitem__(self, index: int) -> Any:
        if index == 21:
            raise ValueError("no such picture")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_sample_that_raises_is_named(workers: str) -> None:
    told = r"sample 21 of Broken raised ValueError.*no such picture"
    with pytest.raises(DataError, match=told) as info:
        trainer().fit(DataLoader(Broken(), 8, **WORKERS[workers]), epochs=1)
    cause = info.value.__cause__
    assert type(cause) is ValueError and str(cause) == "no such picture"


class OwnWay(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


def test_what_it_does_not_know_is_left_as_it_is() -> None:
    def feed(given: Any) -> str:
        return str(train(given, epochs=1)["feed"])

    assert feed(OwnWay(points(), 8)) == "OwnWay, as given"
    assert feed(DataLoader(Stream(), 8)) == "DataLoader, as given"
    begun = DataLoader(points(), 8, **WORKERS["2, persistent"])
    first = next(iter(begun))
    assert feed(begun) == "DataLoader, as given" and len(first[0]) == 8
    begun._iterator._shutdown_workers()  # type: ignore[union-attr]
    assert feed(DataLoader(points(), 8)).startswith("gather, 1 thread - 40 samples in memory")


def test_its_workers_last_as_long_as_the_run_and_no_longer() -> None:
    """The fixture sees to it that none is left; here, that there are some on the way."""
    import multiprocessing

    def ids() -> set[int | None]:
        return {process.pid for process in multiprocessing.active_children()}

    seen: list[set[int | None]] = []
    loaders = [
        DataLoader(Transformed(), 8, **WORKERS["2, persistent"]),
        DataLoader(points(20, 5), 8, **WORKERS["2, persistent"]),
    ]
    train(loaders[0], lambda call: seen.append(ids()), val=loaders[1])
    seen = seen[: EPOCHS * CALLS]  # of the steps; some more are timed when the run is over
    assert [len(s) for s in seen] == [2] * 5 + [4] * (EPOCHS * CALLS - 5)
    assert seen[5] == seen[-1]
    assert not ids()
    with pytest.raises(DataError):
        trainer().fit(DataLoader(Broken(), 8, **WORKERS["2, persistent"]), epochs=1)
    assert not ids()
    training = trainer()
    training.fit(points_loader := DataLoader(points(), 8), epochs=1)
    training.evaluate(loaders[1])
    training.evaluate(points_loader)
    assert not ids()


def test_a_loop_of_ones_own() -> None:
    def once(given: Any) -> Any:
        torch.manual_seed(3)
        model = mlp(dropout=0.5)
        run = hasten.Run(**QUIET)
        model, optimizer = run.prepare(model, sgd(model.parameters()))
        for _ in run.epochs(2):
            for number, (x, y) in enumerate(run.batches(given)):
                run.backward(nn_loss(model(x), y))
                run.step(optimizer)
                if number == 3:
                    break
            with torch.no_grad():
                run.log(val_loss=sum(float(nn_loss(model(x), y)) for x, y in run.batches(given)))
        return model.state_dict(), [(r.loss, r.val_loss) for r in run.history], torch.rand(1)

    nn_loss = torch.nn.functional.cross_entropy
    for workers in ("0", "2"):
        given = [DataLoader(Transformed(), 8, shuffle=True, **WORKERS[workers]) for _ in range(2)]
        assert_same_nest(once(given[0]), once(AsGiven(given[1])))


def test_a_plain_loop_that_validates_learns_the_same() -> None:
    """Without a seed nothing is put back: a DataLoader draws a number when it is iterated."""

    def once(surrounded: bool) -> Any:
        torch.manual_seed(3)
        model = mlp(dropout=0.5)
        optimizer = sgd(model.parameters())
        train, val = DataLoader(points(), 8, shuffle=True), DataLoader(points(), 8)
        run = hasten.Run(seed=None, **QUIET) if surrounded else None
        if run is not None:
            model, optimizer = run.prepare(model, optimizer)
        for _ in range(2) if run is None else run.epochs(2):
            for x, y in train if run is None else run.batches(train):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                if run is None:
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                else:
                    run.backward(loss)
                    run.step(optimizer)
            with torch.no_grad():
                for x, _y in val if run is None else run.batches(val):
                    model(x)
        return model.state_dict(), torch.rand(1)

    assert_same_nest(once(True), once(False))


@pytest.mark.parametrize("first", [0, 10])
@pytest.mark.parametrize("take", [lambda given: given, hasten.Loader.from_dataloader])
def test_a_sampler_is_told_the_epoch_by_the_loop_or_else_by_the_run(first: int, take: Any) -> None:
    def order(run: bool, tell: bool) -> list[Any]:
        sampler: Any = DistributedSampler(range(24), 2, 1, seed=1)
        given = take(DataLoader(TensorDataset(torch.arange(24)), 4, sampler=sampler))
        surrounding = hasten.Run(**QUIET)
        seen = []
        for epoch in surrounding.epochs(3) if run else range(3):
            if tell:
                sampler.set_epoch(first + epoch)
            seen += [x.tolist() for (x,) in (surrounding.batches(given) if run else given)]
        return seen

    assert order(run=True, tell=True) == order(run=False, tell=True)
    if not first:
        assert order(run=True, tell=False) == order(run=False, tell=True)
