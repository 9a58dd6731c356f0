"""One pass over an epoch's indices, from which one source after another takes batches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from hasten.feed.order import Order, OwnOrder, Shard


class Pass:
    """The batches of one epoch as indices, drawn once.

    Attributes:
        next_number: of the batch that nobody has taken yet.
        over: there are no more.
        failed: drawing them raised.
    """

    def __init__(self, indices: Iterator[Any], first: int) -> None:
        self.next_number = first
        self.over = False
        self.failed = False
        self._left = self._heeded(indices)
        self._view: object = None
        self._stopped = False

    def _heeded(self, indices: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from indices
        except Exception:
            self.failed = True
            raise

    def stop(self) -> None:
        """Let the source at work take no more."""
        self._view, self._stopped = None, True

    @property
    def passed_on(self) -> bool:
        """The source at work was stopped, and another one is to go on from there."""
        return self._stopped and not self.over

    def take(self, count: int) -> list[tuple[int, Any]]:
        """The next batches, (number, indices), for one who makes them itself."""
        found: list[tuple[int, Any]] = []
        while len(found) < count and not self.over:
            for indices in self._left:
                found.append((self.next_number, indices))
                self.next_number += 1
                break
            else:
                self.over = True
        return found

    def view(self) -> Iterator[Any]:
        """The indices that are left, for a source, until `stop` or another view."""
        view = self._view = object()
        self._stopped = False
        for indices in self._left:
            self.next_number += 1
            yield indices
            if self._view is not view:
                return
        self.over = True


class Relay:
    """An `Order` that sources share, so that one can follow another in the middle of an epoch.

    A sampler of the user's is drawn from once an epoch, whatever the sources do. A source that
    is stopped gives what it has taken, and no more; the next goes on from there.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.own = order if isinstance(order, OwnOrder) else None
        self._of_thread = threading.local()  # two threads may each iterate the Loader

    @property
    def current(self) -> Pass:
        """The pass that the next call of `batches`, in this thread, is about."""
        found: Pass = self._of_thread.current
        return found

    @current.setter
    def current(self, current: Pass) -> None:
        self._of_thread.current = current

    def begin(self, epoch: int, first: int) -> Pass:
        """Start an epoch at its batch number `first`."""
        self.current = Pass(iter(self.order.batches(epoch, first)), first)
        return self.current

    def batches(self, epoch: int, first: int) -> Iterator[Any]:
        """What is left, for a new source (see `Order`); `first` is the number that is next."""
        assert first == self.current.next_number
        return self.current.view()

    @property
    def shard(self) -> Shard:
        """See `Order`."""
        return self.order.shard

    @shard.setter
    def shard(self, shard: Shard) -> None:
        self.order.shard = shard

    def whole(self, number: int) -> int:
        """See `Order`."""
        return self.order.whole(number)

    def __len__(self) -> int:
        return len(self.order)

    def ended(self) -> None:
        """See `Order`."""
        self.order.ended()

    def state(self, batch: int) -> dict[str, Any]:
        """See `Order`."""
        return self.order.state(batch)

    def load_state(self, state: dict[str, Any]) -> None:
        """See `Order`."""
        self.order.load_state(state)
