"""Signals: the first is noted, the second acts, and all is as it was afterwards."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
from train_helpers import INTERRUPT, TERMINATE

import warm
from hasten.train.signals import _LAUNCHERS as LAUNCHERS
from hasten.train.signals import SAME_S, StopSignals


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in watched}
    yield
    for number, handler in before.items():
        if number == signal.SIGINT and not any(name in os.environ for name in LAUNCHERS):
            assert signal.getsignal(number) == handler
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("act", "number"), [(INTERRUPT, signal.SIGINT), (TERMINATE, signal.SIGTERM)]
)
def test_the_first_is_noted(act: Any, number: int):
    with StopSignals() as signals:
        assert signals.received is None
        act()
        assert signals.received == number
    assert signals.received is None


def test_the_second_acts_at_once():
    with pytest.raises(KeyboardInterrupt), StopSignals() as signals:
        INTERRUPT()
        assert signals.received == signal.SIGINT
        INTERRUPT()
        raise AssertionError("the second Ctrl-C did not act")


def test_the_second_terminate_ends_the_process():
    script = (
        "import itertools, os, signal, time\n"
        "from hasten.train.signals import SAME_S, StopSignals\n"
        "with StopSignals(itertools.count(0.0, SAME_S).__next__):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('noted', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
    )
    done = warm.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGTERM and done.stdout == "noted\n"


def test_the_users_own_handler_comes_back():
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with StopSignals():
            INTERRUPT()
            assert calls == []
            INTERRUPT()
            assert calls == [signal.SIGINT]
        INTERRUPT()
        assert calls == [signal.SIGINT] * 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            INTERRUPT()
            assert signals.received is None
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_python_did_not_set_is_left(monkeypatch: pytest.MonkeyPatch):
    installed: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(signal, "getsignal", lambda number: None)
        patch.setattr(signal, "signal", lambda number, handler: installed.append(number))
        with StopSignals():
            assert installed == []
    assert installed == []


def test_in_another_thread_nothing_is_watched():
    seen: list[Any] = []

    def work() -> None:
        with StopSignals() as signals:
            seen.append((signals.received, signal.getsignal(signal.SIGINT)))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, before)]


def test_it_can_be_entered_again():
    signals = StopSignals()
    for _ in range(2):
        with signals:
            assert signals.received is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.received == signal.SIGTERM


@pytest.mark.parametrize("name", ["TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"])
def test_what_a_launcher_passes_on_is_the_same_signal(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, "1")
    now = [10.0]
    with pytest.raises(KeyboardInterrupt), StopSignals(lambda: now[0]) as signals:
        for _ in range(3):
            INTERRUPT()
            TERMINATE()
            assert signals.received == signal.SIGINT
        now[0] += SAME_S
        INTERRUPT()
        raise AssertionError("a later one did not act")


def test_slurm_s_notice_is_watched():
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.received == signal.SIGUSR1


def test_a_repetition_after_the_end_does_not_take_the_exit_status() -> None:
    """A launcher passes on what its processes were sent, when they have saved already."""
    now, calls = [10.0], []
    signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    with StopSignals(lambda: now[0]) as signals:
        TERMINATE()
        assert signals.received == signal.SIGTERM
    now[0] += SAME_S / 2
    TERMINATE()
    assert calls == []
    now[0] += SAME_S
    TERMINATE()
    assert calls == [signal.SIGTERM], "a later one does what it did before"
    TERMINATE()
    assert calls == [signal.SIGTERM] * 2


def test_what_another_process_was_told_counts_as_the_first() -> None:
    now = [10.0]
    with StopSignals(lambda: now[0]) as signals:
        signals.received = signal.SIGTERM  # agreed on, before the launcher tells this one too
        now[0] += SAME_S / 2
        TERMINATE()
        assert signals.received == signal.SIGTERM


def test_a_second_ctrl_c_shows_one_traceback() -> None:
    """Not those of what was being handled when it came."""
    with StopSignals():
        signal.raise_signal(signal.SIGINT)
        try:
            raise ValueError("closing down")
        except ValueError:
            with pytest.raises(KeyboardInterrupt) as info:
                signal.raise_signal(signal.SIGINT)
    shown = "".join(traceback.format_exception(info.value))
    assert shown.count("Traceback (most recent call last)") == 1
    assert "closing down" not in shown
