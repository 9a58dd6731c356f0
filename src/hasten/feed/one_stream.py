"""A stream as one process reads it: samples in turn, counted so as to name one that fails."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from hasten.errors import DataError
from hasten.feed.blame import misfit, of_stream
from hasten.feed.handlers import by_a_handler


class OneStream:
    """The samples of a stream, from its first on."""

    def __init__(self, dataset: Any, whose: str) -> None:
        """Begins to read.

        Args:
            dataset: the stream.
            whose: what messages call what is read.

        Raises:
            DataError: its ``__iter__`` raised.
        """
        self._dataset = dataset
        self._whose = whose
        self._count = 0
        try:
            self._samples = iter(dataset)
        except Exception as error:
            raise self._failed(error, []) from error

    def next(self, count: int) -> list[Any]:
        """So many samples; fewer at the end.

        Raises:
            DataError: it raised; the message has the place of the sample that was to come.
        """
        samples: list[Any] = []
        try:
            samples.extend(islice(self._samples, count))  # keeps what came before an error
        except Exception as error:
            raise self._failed(error, samples) from error
        self._count += len(samples)
        return samples

    def _failed(self, error: Exception, before: list[Any]) -> Exception:
        if by_a_handler(error):
            raise error
        return DataError(of_stream(self._count + len(before), self._dataset, self._whose, error))

    def collated(self, function: Callable[[Any], Any], samples: list[Any], *, alone: bool) -> Any:
        """The batch of the samples that came last.

        Args:
            function: that makes it.
            samples: one or more.
            alone: it is given the only sample, and no list.

        Raises:
            DataError: it raised; the message has the sample that does not fit.
        """
        try:
            return function(samples[0] if alone else samples)
        except Exception as error:
            if by_a_handler(error):
                raise
            places = range(self._count - len(samples), self._count)
            raise DataError(misfit(samples, places, function, error, self._whose)) from error
