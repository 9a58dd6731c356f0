"""One thread beside the loop's: what it gives, and what it notices."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import feed_datasets as kinds
import numpy as np
import pytest
import torch

from hasten.errors import DataError
from hasten.feed import Loader, background, randomness
from hasten.feed.background import NoDraws
from hasten.feed.compare import identical
from hasten.feed.order import GivenOrder
from hasten.feed.plan import Plan
from hasten.feed.samples import Maker


def loaders(kind: Any, **options: Any) -> tuple[Loader, Loader]:
    common: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 5, **options}
    return Loader(kind(), plan="threads", **common), Loader(kind(), plan="inline", **common)


class InThread(kinds.Plain):
    def __getitem__(self, index: int) -> Any:
        self.asked.append(threading.get_ident())
        return torch.full((3,), float(index)), {"index": index}


@pytest.mark.parametrize("options", [{}, {"batch_size": None}, {"drop_last": True}])
def test_batches_are_those_of_the_loop_s_thread(options: dict[str, Any]) -> None:
    if options.get("batch_size", 0) is None:
        options = {**options, "shuffle": False}
    ours, plain = loaders(InThread, **options)
    for _ in range(2):
        assert all(identical(a, b) for a, b in zip(ours, plain, strict=True))
    assert threading.get_ident() not in ours.dataset.asked
    assert len(set(ours.dataset.asked)) <= 2, "one thread an epoch"
    assert ours.plan.name == "threads"


def test_few_batches_are_ahead() -> None:
    loader = Loader(InThread(), 1, plan="threads", num_workers=1)
    batches = iter(loader)
    next(batches)
    ahead = loader.plan.prefetch_batches
    assert len(loader.dataset.asked) <= ahead + 2
    batches.close()


class Late(kinds.Plain):
    """Draws for one sample only, which no trial has seen."""

    how = staticmethod(lambda: torch.rand(1).item())

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), self.how() if index == 17 else 0.0])


class LatePython(Late):
    how = random.random


class LateNumpy(Late):
    how = np.random.rand


class LateDropout(Late):
    how = staticmethod(lambda: torch.nn.functional.dropout(torch.ones(9)).sum().item())


@pytest.mark.parametrize("kind", [Late, LatePython, LateNumpy, LateDropout])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_draw_is_noticed_and_changes_nothing(kind: Any, shuffle: bool) -> None:
    ours, plain = loaders(kind, shuffle=shuffle)
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    expected = torch.rand(2), random.random(), np.random.rand()
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    found = list(ours)
    assert identical((torch.rand(2), random.random(), np.random.rand()), expected)
    assert identical(found, list(plain))
    assert ours.plan.name != "threads"
    assert "draw" in str(ours.plan)
    assert all(identical(a, b) for a, b in zip(ours, plain, strict=True)), "the next epoch too"


class Bound(kinds.Plain):
    """May be used by the thread that made it only, as a SQLite connection."""

    def __init__(self) -> None:
        super().__init__()
        self.home = threading.get_ident()

    def __getitem__(self, index: int) -> Any:
        if threading.get_ident() != self.home:
            raise RuntimeError("made in another thread")
        return super().__getitem__(index)


def test_a_data_set_bound_to_its_thread_goes_back_there() -> None:
    ours, plain = loaders(Bound)
    assert identical(list(ours), list(plain))
    assert "made in another thread" in str(ours.plan)


class Broken(kinds.Plain):
    def __getitem__(self, index: int) -> Any:
        if index == 9:
            raise ValueError("torn")
        return super().__getitem__(index)


def test_a_sample_that_raises_is_told_as_ever() -> None:
    ours, plain = loaders(Broken)
    with pytest.raises(DataError, match="sample 9 of Broken raised ValueError: torn"):
        list(ours)
    ours, plain = loaders(Broken, on_error="skip")
    assert identical(list(ours), list(plain))
    assert ours.skipped == plain.skipped and ours.skipped_count == 1


def test_leaving_early_ends_the_thread_after_the_sample_it_is_at() -> None:
    waiting, go = threading.Event(), threading.Event()

    class Held(kinds.Plain):
        def __getitem__(self, index: int) -> Any:
            if index >= 4:
                waiting.set()
                go.wait(5)
            self.asked.append(index)
            return index

    loader = Loader(Held(), 4, plan="threads")
    batches = iter(loader)
    next(batches)
    waiting.wait(5)
    threading.Timer(0.05, go.set).start()
    batches.close()
    assert loader.dataset.asked == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randn(2),
        lambda: torch.randperm(3),
        lambda: torch.randint(0, 9, (2,)),
        lambda: torch.rand_like(torch.ones(2)),
        lambda: torch.empty(2).uniform_(),
        lambda: torch.empty(2).normal_(),
        lambda: torch.empty(2).random_(),
        lambda: torch.empty(2).exponential_(),
        lambda: torch.normal(torch.zeros(2), 1.0),
        lambda: torch.bernoulli(torch.ones(2) / 2),
        lambda: torch.multinomial(torch.ones(3), 1),
        lambda: torch.poisson(torch.ones(2)),
        lambda: torch.distributions.Normal(0.0, 1.0).sample(),
        lambda: torch.distributions.Beta(1.0, 1.0).sample(),
        lambda: torch.nn.init.xavier_uniform_(torch.empty(2, 2)),
        lambda: torch.nn.Dropout()(torch.ones(2)),
        lambda: torch.nn.functional.gumbel_softmax(torch.ones(2)),
        lambda: torch.nn.functional.feature_alpha_dropout(torch.ones(2, 2), 0.5, True),
    ],
)
def test_each_way_of_drawing_is_stopped_before_it_happens(draw: Any) -> None:
    before = torch.default_generator.get_state()
    with NoDraws(), pytest.raises(RuntimeError, match="draws from torch's global generator"):
        draw()
    assert torch.equal(before, torch.default_generator.get_state())
    with NoDraws():
        torch.rand(2, generator=torch.Generator()), torch.ones(2) * 2, torch.randperm
    draw()
    assert not torch.equal(before, torch.default_generator.get_state())


class SeedsItself(kinds.Plain):
    """Seeds one of the global generators for each sample, by its index or by one number."""

    def __init__(self, name: str, fixed: bool, start: int) -> None:
        super().__init__(40)
        self.name, self.fixed, self.start = name, fixed, start

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)
        if index < self.start:
            return index, 0.0
        number = 5 if self.fixed else index
        if self.name == "random":
            random.seed(number)
            return index, random.random()
        if self.name == "numpy":
            np.random.seed(number)
            return index, float(np.random.rand())
        if self.name == "torch":
            torch.manual_seed(number)
        return index, 0.0


def states_after(loader: Any) -> Any:
    for _ in loader:
        pass
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("name", ["random", "numpy", "torch"])
def test_samples_that_seed_leave_the_generators_as_they_were(name: str, fixed: bool) -> None:
    before = randomness.save()
    try:
        found = []
        for plan in ("inline", "threads"):
            torch.manual_seed(5)
            torch.rand(1)  # samples that seed with 5 too would leave what was before this
            random.seed(1)
            np.random.seed(2)
            with Loader(SeedsItself(name, fixed, 0), 4, plan=plan, num_workers="auto") as loader:
                found.append(states_after(loader))
        assert found[0] == found[1]
    finally:
        randomness.restore(before)


@pytest.mark.parametrize("name", ["random", "numpy"])
def test_those_that_begin_to_do_so_later_too(name: str) -> None:
    before = randomness.save()
    try:
        random.seed(1)
        np.random.seed(2)
        start = random.getstate(), np.random.get_state()[1].tolist()
        with Loader(SeedsItself(name, False, 12), 4, plan="threads") as loader:
            assert states_after(loader)[:2] == start
    finally:
        randomness.restore(before)


@pytest.mark.parametrize("seeded", [True, False])
def test_what_the_loop_draws_itself_stays_drawn(seeded: bool) -> None:
    """Where it is one of the two that moved a generator, that of the samples is undone alone."""
    before = randomness.save()
    try:
        maker = Maker(
            SeedsItself("random" if seeded else "none", True, 0), None, seed=0,
            skip_errors=False, batched=True,
        )  # fmt: skip
        job = background._Job(0, 3, [1, 2])
        random.seed(1)
        start, states = random.getstate(), background._States()
        random.seed(5)
        random.random()  # as the samples leave it, or the loop
        now = random.getstate()
        plan = Plan(name="threads", reason="", workers=1, prefetch_batches=1)
        thread = background.Background(maker, plan, GivenOrder([], 0, None), print)
        thread._again(job, states)
        assert random.getstate() == (start if seeded else now)
    finally:
        randomness.restore(before)


class DrawsNumpy(kinds.Plain):
    def __getitem__(self, index: int) -> Any:
        return np.random.rand()


class DrawsUnseen(kinds.Plain):
    how: Any = None

    def __getitem__(self, index: int) -> Any:
        return getattr(self, "how")()  # noqa: B009 - its source tells nothing


def test_that_threads_share_a_generator_with_the_loop_is_said_of_those_that_were_named() -> None:
    says = "what the loop draws from it meanwhile may differ"
    assert says in Loader(DrawsNumpy(), 4, plan="threads").explain()
    for options in ({}, {"plan": "inline"}, {"plan": "processes"}):
        assert says not in Loader(DrawsNumpy(), 4, **options).explain()
    assert says not in Loader(InThread(), 4, plan="threads").explain()
    late = DrawsUnseen()
    late.how = random.random
    with Loader(late, 4, plan="threads") as loader:
        assert says not in loader.explain(), "nothing was seen"
        list(loader)
        assert says in loader.explain()


def test_what_draws_from_torch_is_named_without_a_class_of_hasten_s() -> None:
    class Draws(kinds.Plain):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(1)

    with Loader(Draws(), 4, plan="threads") as loader:
        assert "may differ" not in loader.explain()
        list(loader)
        assert "not threads: rand draws from torch's global generator" in loader.explain()
