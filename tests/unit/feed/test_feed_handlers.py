"""Signal handlers of the program's that raise while the loop waits: their error comes as it is."""

from __future__ import annotations

import functools
import multiprocessing
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import feed_datasets as kinds
import pytest
import torch
from torch.utils.data import DataLoader

from hasten.errors import DataError
from hasten.feed import Loader
from hasten.feed.channel import Channel, UnusableError
from hasten.feed.handlers import by_a_handler
from hasten.feed.pool import Pool

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs setitimer")

KINDS = [TimeoutError, OSError, ValueError, EOFError, ConnectionError, BlockingIOError, IndexError]


class Slow(kinds.Plain):
    """Half a second for a batch of one."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.5)
        return torch.zeros(3)


class Many(Slow):
    """All of a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def slowly(samples: list[Any]) -> Any:
    """A collate_fn."""
    time.sleep(0.5)
    return len(samples)


class SlowStream(kinds.Stream):
    """The same."""

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            time.sleep(0.5)
            yield each


LOADERS: dict[str, Callable[[], Any]] = {
    "own": lambda: Loader(Slow(4), 1, num_workers=2),
    "kept": lambda: Loader(Slow(4), 1, num_workers=1, persistent_workers=True, timeout=30),
    "stream": lambda: Loader(SlowStream(4), 1, num_workers=1),
    "inline": lambda: Loader(Slow(4), 1, num_workers=0, on_error="skip"),
    "together": lambda: Loader(Many(4), 2, num_workers=0, plan="inline", on_error="skip"),
    "taken inline": lambda: Loader.from_dataloader(DataLoader(Many(4), 1), plan="inline"),
    "stream inline": lambda: Loader(SlowStream(4), 1, num_workers=0),
    "taken stream": lambda: Loader.from_dataloader(DataLoader(SlowStream(4), 1)),
    "collated": lambda: Loader(kinds.Plain(4), 1, num_workers=0, plan="inline", collate_fn=slowly),
    "stream collated": lambda: Loader(kinds.Stream(4), 1, num_workers=0, collate_fn=slowly),
    "taken": lambda: Loader.from_dataloader(DataLoader(Slow(4), 1, num_workers=2)),
}


@pytest.fixture
def handled() -> Iterator[Callable[[Any], None]]:
    before = signal.getsignal(signal.SIGALRM)
    yield lambda handler: signal.signal(signal.SIGALRM, handler) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("kind", "raised"),
    [(kind, raised) for kind in LOADERS for raised in (KINDS if kind == "own" else KINDS[:4:3])],
)
def test_what_a_handler_raises_in_a_wait_comes_as_it_is(
    raised: type[Exception], kind: str, handled: Callable[[Any], None]
) -> None:
    def handler(number: int, frame: Any) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # as one for a single time does
        raise raised("mine")

    handled(handler)
    loader = LOADERS[kind]()
    batches = iter(loader)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(raised, match=r"^mine$"):
        list(batches)
    loader.close()
    assert not multiprocessing.active_children()


def test_nor_is_it_that_of_a_pool_that_the_handler_has_closed(
    handled: Callable[[Any], None],
) -> None:
    def handler(number: int, frame: Any) -> None:
        pool.close()
        raise ValueError("mine")

    pool = Pool(1, Answering(), context=None, jobs_each=1)
    handled(handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(ValueError, match=r"^mine$"):
        pool.receive(0)
    with pytest.raises(DataError, match="were ended"):
        pool.receive(0)


class Answering:
    """Work that is done at once."""

    def start(self, worker: int) -> None: ...

    def run(self, job: Any) -> Any:
        return Opened() if job == "signal" else job

    def failed(self, job: Any, error: Exception) -> Any: ...

    def left(self, job: Any, error: BaseException) -> Any: ...


class Opened:
    """A signal comes as it is opened."""

    def __reduce__(self) -> Any:
        return signal.raise_signal, (signal.SIGALRM,)


def test_one_that_raises_while_a_batch_is_opened(handled: Callable[[Any], None]) -> None:
    def handler(number: int, frame: Any) -> None:
        raise pickle.UnpicklingError("mine")

    handled(handler)
    pool = Pool(1, Answering(), context=None, jobs_each=1)
    pool.send(0, "signal")
    with pytest.raises(pickle.UnpicklingError, match=r"^mine$"):
        pool.receive(0)
    pool.close()


@pytest.mark.parametrize("raised", [BlockingIOError, ConnectionError, OSError])
def test_one_that_raises_in_a_call_of_the_socket(
    raised: type[Exception], handled: Callable[[Any], None]
) -> None:
    def handler(number: int, frame: Any) -> None:
        raise raised("mine")

    handled(handler)
    theirs, mine = Channel.pair()
    real = mine._end

    class End:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        @staticmethod
        def recvmsg(*arguments: Any) -> Any:
            signal.raise_signal(signal.SIGALRM)

    mine._end = End()  # type: ignore[assignment]
    with pytest.raises(raised, match=r"^mine$"):
        mine.receive(lambda: None)
    theirs.close()
    mine.close()
    mine._end = real
    with pytest.raises(UnusableError, match="Bad file descriptor"):
        mine.receive(lambda: None)


class Guard:
    def __call__(self, number: int, frame: Any) -> None:
        _raise(number, frame)

    def method(self, *given: Any) -> None:
        _raise(*given)


def _raise(number: Any, frame: Any) -> None:
    raise RuntimeError("mine")


@pytest.mark.parametrize(
    "handler",
    [_raise, Guard(), Guard().method, functools.partial(_raise), lambda *_, more=1: more // 0],
    ids=["function", "object", "method", "partial", "star"],
)
def test_handlers_of_every_kind_are_known(handler: Any, handled: Callable[[Any], None]) -> None:
    handled(handler)
    with pytest.raises((RuntimeError, ZeroDivisionError)) as caught:
        signal.raise_signal(signal.SIGALRM)
    assert by_a_handler(caught.value)
    with pytest.raises((RuntimeError, ZeroDivisionError)) as called:
        handler(signal.SIGALRM, None)
    assert not by_a_handler(called.value), "nobody was interrupted"
    with pytest.raises(FileNotFoundError) as other:
        Path("none of that name").stat()
    assert not by_a_handler(other.value)
