"""A DataLoader that is iterated as it is: its batches numbered, what it raises named."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from hasten.errors import DataError
from hasten.feed.blame import of_beginning, of_dataloader
from hasten.feed.executor import Items
from hasten.feed.handlers import by_a_handler
from hasten.feed.position import check_reached


def iterated(loader: Any) -> Iterator[Any]:
    """Its iterator.

    Raises:
        DataError: it raised.
    """
    try:
        return iter(loader)
    except Exception as error:
        if by_a_handler(error):
            raise
        raise DataError(of_beginning(error)) from error


def pass_over(batches: Iterator[Any], first: int, whose: Any) -> None:
    """Take so many batches.

    Raises:
        DataError: there are fewer of the data set `whose`.
    """
    check_reached(first, sum(1 for _ in islice(batches, first)), whose)


def numbered(loader: Any, batches: Iterator[Any], first: int) -> Items:
    """Its batches, from the first number on.

    Raises:
        DataError: it raised.
    """
    number = first
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:
            if by_a_handler(error):
                raise
            raise DataError(of_dataloader(loader, number, error)) from error
        yield number, batch, None
        del batch
        number += 1
