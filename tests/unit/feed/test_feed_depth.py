"""Batches that workers make ahead of the loop are bounded in bytes, as the plan says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from hasten.feed import Loader, background, threads
from hasten.feed.jobs import Bound
from hasten.feed.plan import Plan
from hasten.feed.pool import Pool
from hasten.feed.serving import Resized

MIB = 1 << 20
WORKERS, EACH = 4, 3


class Large(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((MIB,), index % 256, dtype=torch.uint8)


class LargeStream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        assert worker is not None
        for index in range(worker.id, 40, worker.num_workers):
            yield torch.full((MIB,), index, dtype=torch.uint8)


class _Watch:
    """Jobs that workers have, and have not answered; `most`: at once, after the first answer."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        send, receive = Pool.send, Pool.receive
        self.now = self.most = self.at_first = 0
        answered = False

        def sending(pool: Pool, number: int, job: Any) -> None:
            if not isinstance(job, Resized):
                self.now += 1
                if answered:
                    self.most = max(self.most, self.now)
                else:
                    self.at_first = self.now
            send(pool, number, job)

        def receiving(pool: Pool, *arguments: Any) -> Any:
            nonlocal answered
            reply = receive(pool, *arguments)
            answered, self.now = True, self.now - 1
            return reply

        patch.setattr(Pool, "send", sending)
        patch.setattr(Pool, "receive", receiving)


def _bounded(loader: Loader, **changes: Any) -> Loader:
    """With another plan of the same kind than it has chosen."""
    feed = loader._feeds._feed(None)  # type: ignore[union-attr]
    plan = replace(feed.executor.plan, prefetch_batches=WORKERS * EACH, **changes)
    feed.executor = type(feed.executor)(feed.parts, plan, None)
    return loader


@pytest.mark.parametrize(
    ("bytes_", "at_first", "most"),
    [
        (5 * MIB + MIB // 2, WORKERS, 5),  # a message is a little more than its tensors
        (MIB // 2, WORKERS, 1),  # less than one, of which there must be one
        (1 << 30, WORKERS, WORKERS * EACH),
        (0, WORKERS * EACH, WORKERS * EACH),
    ],
)
@pytest.mark.parametrize("data", [Large, LargeStream])
def test_no_more_is_under_way_than_the_plan_says(
    data: Any, bytes_: int, at_first: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = _Watch(monkeypatch)
    with _bounded(Loader(data(), 1, num_workers=WORKERS), prefetch_bytes=bytes_) as loader:
        batches = torch.cat(list(loader))[:, 0]
    assert torch.equal(batches, torch.arange(40, dtype=torch.uint8))
    if data is LargeStream and most > WORKERS:
        most -= most % WORKERS  # as many of each reader, whose turns come round
    assert (watch.at_first, watch.most) == (at_first, most)


class LargeByKey(Large):
    def fetch(self, index: int, key: int) -> torch.Tensor:
        return self[index]


def _named(samples: list[torch.Tensor]) -> Any:
    return SimpleNamespace(samples=torch.stack(samples))


@pytest.mark.parametrize(
    ("changes", "at_first", "most"),
    [
        ({"prefetch_bytes": 5 * MIB}, None, 6),
        ({"prefetch_bytes": MIB // 2}, None, 2),  # the one asked for, and one that is made
        ({"prefetch_bytes": 1 << 30}, None, WORKERS * EACH + 1),
        ({"prefetch_bytes": 5 * MIB, "batch_bytes": 2 * MIB}, 3, 3),
    ],
)
@pytest.mark.parametrize("collate", [None, _named])
@pytest.mark.parametrize("data", [LargeByKey, Large])
def test_threads_keep_to_it_too(
    data: Any,
    collate: Any,
    changes: dict[str, int],
    at_first: int | None,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind: Any = threads._Pool if data is LargeByKey else background._Thread
    workers = 2 if data is LargeByKey else 1
    add, wait, added, seen = kind.add, kind.wait, [0], []

    def adding(pool: Any, job: Any) -> None:
        added[0] += 1
        add(pool, job)

    def waiting(pool: Any, job: Any, timeout_s: float) -> bool:
        seen.append(added[0] - len(seen))
        return bool(wait(pool, job, timeout_s))

    monkeypatch.setattr(kind, "add", adding)
    monkeypatch.setattr(kind, "wait", waiting)
    loader = Loader(data(), 1, plan="threads", num_workers=workers, collate_fn=collate)
    with _bounded(loader, **changes):
        assert len(list(loader)) == 40
    assert (seen[0], max(seen[1:])) == (at_first or workers + 1, most)


def test_where_the_size_of_a_batch_was_measured_it_bounds_the_first_ones_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = _Watch(monkeypatch)
    with _bounded(
        Loader(Large(), 1, num_workers=WORKERS), prefetch_bytes=5 * MIB, batch_bytes=2 * MIB
    ) as loader:
        next(iter(loader))
    assert watch.at_first == 2


def test_a_dataloader_s_samples_made_ahead_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bound, "most", lambda self, pool, each: self.most_bytes >> 29)
    watch = _Watch(monkeypatch)
    with Loader.from_dataloader(DataLoader(Large(), 1), plan="processes") as loader:
        assert len(list(loader)) == 40
    assert watch.most == 2


def test_what_somebody_insists_on_is_bounded_in_batches_alone_and_said_so() -> None:
    def told(loader: Loader) -> str:
        return next(line for line in loader.explain().splitlines() if "ahead of the loop" in line)

    given = Loader(Large(), 1, num_workers=2, prefetch_factor=3)
    assert told(given) == "  up to 6 batches are made ahead of the loop"
    taken = Loader.from_dataloader(DataLoader(Large(), 1, num_workers=2))
    assert told(taken) == "  up to 4 batches are made ahead of the loop"
    auto = Loader(Large(), 1, num_workers=2)
    assert told(auto) == "  up to 4 batches, or 1024 MiB, are made ahead of the loop"


def test_the_plan_that_was_measured_knows_the_size_of_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hasten.feed import sizing as sizing_module
    from hasten.feed.measure import Measured

    cost = Measured(samples=9, seconds=0.01, cpu_seconds=0.01, bytes=MIB)
    monkeypatch.setattr(sizing_module, "measure_apart", lambda *_, **__: cost)
    plan: Plan = Loader(Large(), 2).plan
    assert (plan.name, plan.batch_bytes) == ("processes", 2 * MIB)
