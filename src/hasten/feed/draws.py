"""What a DataLoader draws in its own thread, in its order: a seed for its workers, and indices.

Played as `torch.utils.data.dataloader` does it, so that the generators that it draws from (the
global ones, its own, its samplers') are at each moment where iterating it would have left them.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, Sampler

from hasten.feed import randomness
from hasten.feed.foreseeable import KNOWN, foreseeable
from hasten.feed.order import Shard


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The parts of a DataLoader that draw.

    Attributes:
        sampler: gives the indices of each batch (of each sample, without batching).
        generator: of the DataLoader; None for the global one.
        dataset: not copied with a sampler that holds it.
        ahead: batches whose indices are drawn when an epoch begins, before the first is given.
        twice: the sampler is asked for an iterator twice, as with worker processes.
    """

    sampler: Any
    generator: torch.Generator | None
    dataset: Any
    ahead: int
    twice: bool

    @classmethod
    def of(cls, loader: Any) -> Drawn:
        """Of a DataLoader."""
        workers = loader.num_workers
        return cls(
            sampler=loader.sampler if loader.batch_sampler is None else loader.batch_sampler,
            generator=loader.generator,
            dataset=loader.dataset,
            ahead=loader.prefetch_factor * workers if workers else 0,
            twice=workers > 0,
        )

    @property
    def known(self) -> bool:
        """Whether the samplers are PyTorch's own, which follow from their generators."""
        sampler = self.sampler
        inner = sampler.sampler if type(sampler) is BatchSampler else sampler
        return type(inner) in KNOWN

    def generators(self) -> list[torch.Generator]:
        """All that are not global, each once."""
        inner = getattr(self.sampler, "sampler", None)
        found = [getattr(owner, "generator", None) for owner in (self, self.sampler, inner)]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def copied(self) -> Drawn | None:
        """The same, with a state of its own; None where asking a copy might leave something behind.

        See `foreseeable`.
        """
        if not foreseeable(self.sampler, self.dataset):
            return None
        copies = {id(generator): _copy(generator) for generator in self.generators()}
        memo: dict[int, Any] = {id(self.dataset): self.dataset, **copies}
        try:
            sampler = _sampler(self.sampler, memo)
        except Exception:  # noqa: BLE001 - whatever it holds: then nothing is made ahead of it
            return None
        generator = copies.get(id(self.generator))
        return replace(self, sampler=sampler, generator=generator)


class Draws:
    """The draws of one epoch.

    Attributes:
        base: what the seeds of the DataLoader's workers are counted from; None where it draws none.
        known: with workers, the indices of batches drawn and not yet taken.
    """

    def __init__(self, drawn: Drawn, *, again: bool = False) -> None:
        """Draws what `iter(loader)` draws.

        Args:
            drawn: by whom.
            again: the workers of an epoch before go on (persistent_workers).
        """
        self._indices: Iterator[Any] = iter(drawn.sampler)
        self.base: int | None = None
        self.known: deque[Any] = deque()
        if not again:
            draw = torch.empty((), dtype=torch.int64)
            self.base = int(draw.random_(generator=drawn.generator).item())
            if drawn.twice:
                self._indices = iter(drawn.sampler)
        for _ in range(drawn.ahead):
            self.given()

    def __next__(self) -> Any:
        """Without workers: the indices of the next batch."""
        return next(self._indices)

    def given(self) -> None:
        """With workers: draw those of one batch more, as is done before each batch is given."""
        try:
            self.known.append(next(self._indices))
        except StopIteration:
            return


class Foreseen:
    """What an epoch's draws will be if nobody else draws meanwhile; nothing is drawn for it.

    Run on copies of the samplers, with the global generators put back after each step. What it
    tells is compared with the draws themselves when their time has come. Where a sampler raises, no
    more is foreseen: it raises again when its time has come, after the batches before.
    """

    def __init__(self, drawn: Drawn) -> None:
        """To be made before the epoch's own `Draws`. `drawn` is a copy."""
        outside = randomness.save()
        try:
            self._draws: Draws | None = Draws(drawn)
            self._inside = randomness.save()
        except Exception:  # noqa: BLE001 - whatever a sampler raises: see above
            self._draws = None
        finally:
            randomness.restore(outside)
        self._lazy = not drawn.known
        self._begun = False

    def skip(self, first: int) -> None:
        """Pass over so many batches."""
        for _ in islice(self, first):
            continue

    def __iter__(self) -> Iterator[Any]:
        while self._draws is not None:
            if self._begun and not self._lazy:
                try:
                    indices = next(self._draws)
                except Exception:  # noqa: BLE001 - its end, or whatever a sampler raises
                    return
            else:
                outside = randomness.save()
                randomness.restore(self._inside)
                try:
                    indices = next(self._draws)
                except Exception:  # noqa: BLE001 - as above
                    return
                finally:
                    self._inside = randomness.save()
                    randomness.restore(outside)
                self._begun = True
            yield indices


class LateOrder:
    """An order that is known when it is drawn, and not before."""

    shard = Shard()
    """The whole: a DataLoader's own sampler is what shares samples out among processes."""

    def whole(self, number: int) -> int:
        """See `Order`."""
        raise TypeError("not known before it is drawn")

    def batches(self, epoch: int, first: int) -> Iterator[Any]:
        """See `Order`."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise TypeError("not known before it is drawn")

    def ended(self) -> None:
        """See `Order`."""

    def state(self, batch: int) -> dict[str, Any]:
        """See `Order`; the position is kept by `TakenOrder`."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """See `Order`."""


def _copy(generator: torch.Generator) -> torch.Generator:
    made = torch.Generator(generator.device)
    made.set_state(generator.get_state())
    return made


def _sampler(sampler: Any, memo: dict[int, Any]) -> Any:
    """A copy; of PyTorch's own without what they only read (weights, indices)."""
    if type(sampler) in (list, tuple, range):
        return sampler
    if type(sampler) is BatchSampler:
        made = copy.copy(sampler)
        made.sampler = _sampler(sampler.sampler, memo)
        return made
    if type(sampler) in KNOWN:
        made = copy.copy(sampler)
        own = getattr(sampler, "generator", None)
        if own is not None:
            made.generator = memo.setdefault(id(own), _copy(own))
        return made
    for held in vars(sampler).values():
        if isinstance(held, Sampler) and id(held) not in memo:
            memo[id(held)] = _sampler(held, memo)
    return copy.deepcopy(sampler, memo)
