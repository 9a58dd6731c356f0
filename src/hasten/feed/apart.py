"""Samples tried out before a plan is chosen, so that nothing of it stays."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from hasten.feed import randomness
from hasten.feed.awaited import Awaited
from hasten.feed.ending import close_at_end
from hasten.feed.forking import unwarned
from hasten.feed.harmless import calls_harmless, harmless
from hasten.feed.measure import Clock, Measured, measure
from hasten.feed.openfiles import OpenFiles
from hasten.feed.samples import Maker

Trial = Callable[[Callable[[Measured], None]], Measured | None]
"""Given whom to tell what is known of the samples, before any are collated."""

_PATIENCE_S = 0.9  # a trial that has not ended by then is not waited for


def measure_apart(
    maker: Maker, count: int, batch: int, *, clock: Clock, cheap_s: float = 0.0
) -> Measured | None:
    """What `measure` gives, so that nothing of the trial stays here; None if it ended itself.

    Samples may count, cache, or open files, which worker processes that are forked later would
    share. So they are made in a forked process, with open files of its own, which copies a page of
    memory for each that it writes to, if only by counting references (5 to 10 MB for a tenth of a
    second). Where the code is seen to leave nothing behind, a thread of this process does. A trial
    that takes too long is not waited for: the process is ended, the thread ends itself after the
    sample it is at.
    """

    by_thread = _leaves_nothing(maker)

    def trial(tell: Callable[[Measured], None]) -> Measured | None:
        drawing = not by_thread
        return measure(
            maker, count, batch, clock=clock, cheap_s=cheap_s, tell=tell, drawing=drawing
        )

    if by_thread:
        return _by_thread(trial)
    if not sys.platform.startswith("linux"):
        return _among(OpenFiles(), trial(lambda found: None))
    return _by_process(trial)


def _leaves_nothing(maker: Maker) -> bool:
    read = maker.fetch is None and harmless(maker.dataset)
    return read and calls_harmless(maker.collate_fn)


class _Trial(Awaited):
    def close(self) -> None:
        """As the program ends: what computes would be stopped amid it, but may take for ever."""
        if self.ident is not None:
            self.join(_PATIENCE_S)


def _by_thread(trial: Trial) -> Measured | None:
    answers: list[tuple[float, Measured | None]] = []

    def tell(found: Measured | None) -> None:
        answers.append((time.monotonic(), found))

    def run() -> None:
        with contextlib.suppress(BaseException):  # raised again, and told, where it is iterated
            tell(trial(tell))

    thread = _Trial(run, name="hasten-feed-trial")
    before, began = randomness.save(), time.monotonic()
    close_at_end(thread)
    try:
        thread.start()
        thread.join(_PATIENCE_S)
    except RuntimeError:  # there can be no more threads
        run()
    finally:
        moved = randomness.touched(before)
        randomness.restore(before, moved)
    found = _told(answers.copy(), began, late=thread.is_alive())
    return found and replace(found, draws=found.draws | moved)


def _by_process(trial: Trial) -> Measured | None:
    ends: tuple[int, ...] = ()
    files = OpenFiles()
    try:
        reading, writing = ends = os.pipe()
        with unwarned():
            child = os.fork()
    except OSError:  # no more processes or open files, or no memory for one
        for end in ends:
            os.close(end)
        return _among(files, trial(lambda found: None))
    if child == 0:
        _child(trial, writing, files)
    os.close(writing)
    began = time.monotonic()
    answers: list[tuple[float, Measured | None]] = []
    late = True
    moved = False
    try:
        while (left := began + _PATIENCE_S - time.monotonic()) > 0:
            if not select.select([reading], [], [], left)[0]:
                break
            part = os.read(reading, select.PIPE_BUF)
            if not part:
                late = False
                break
            answers.append((time.monotonic(), pickle.loads(part)))
        moved = late and files.moved_in(child)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    found = _told(answers, began, late=late)
    return replace(found, shares=True) if found is not None and moved else found


def _among(files: OpenFiles, found: Measured | None) -> Measured | None:
    """With what became of those files meanwhile."""
    return found and replace(found, shares=files.moved())


def _told(
    answers: list[tuple[float, Measured | None]], began: float, *, late: bool
) -> Measured | None:
    """What a trial's answers, each with the time it came at, come to."""
    if len(answers) == 2 or [found for _, found in answers] == [None]:
        return answers[-1][1]
    if not late:
        return None  # it died; so would a worker
    for told, found in answers:
        if found is not None:  # collating takes longer than it was given
            return replace(found, collate_seconds=began + _PATIENCE_S - told)
    return Measured(samples=1, seconds=_PATIENCE_S, cpu_seconds=0.0, cut=True)


def _child(trial: Trial, writing: int, files: OpenFiles) -> None:
    """In the child: answer, and leave without any of the parent's cleaning up."""

    def tell(found: Measured | None) -> None:
        os.write(writing, pickle.dumps(_among(files, found)).ljust(select.PIPE_BUF, b"\0"))

    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        gc.disable()  # it would write to the pages of all objects, and so copy them
        torch.set_num_threads(1)  # the parent's pool of threads is not here
        files.own(writable=True)
        try:
            tell(trial(tell))
        finally:
            files.put_back()
        status = 0
    finally:
        os._exit(status)
