"""The faults of chaos.py: what strikes a run, of one process or of two ranks."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import chaos_power
import psutil
from chaos_ranks import STOPPED, Launched
from chaos_trial import EPOCHS, Child, Lost, Trial, epochs_saved, newest_step, sound, until

_HANG_S = 3.0
_NOTHING: Callable[[], None] = lambda: None  # noqa: E731


def strike(trial: Trial, child: Child, number: int) -> None:
    """A signal to the run: to one of its ranks, as chance has it, where it has several."""
    trial.note()
    if not isinstance(child, Launched):
        return child.send(number)
    ranks = child.ranks()
    if ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            trial.chance.choice(ranks).send_signal(number)
    return None


def started_anew(child: Child) -> Child:
    """The launcher starts ranks anew, when one has failed; a run of one process is left."""
    if isinstance(child, Launched) and child.wait() != 0:
        raise Lost(f"the launcher started the ranks anew, and ended with {child.status}")
    return child


def kill(trial: Trial) -> Child:
    child = trial.begin()
    trial.moment(child)
    strike(trial, child, signal.SIGKILL)
    return started_anew(child)


def kill_while_saving(trial: Trial) -> Child:
    child = trial.begin()
    trial.moment(child)
    trial.note()
    until(child, lambda: is_saving(trial.folder / "checkpoints"))
    time.sleep(trial.chance.uniform(0.0, 0.004))
    if isinstance(child, Launched):
        strike(trial, child, signal.SIGKILL)
    else:
        child.send(signal.SIGKILL)  # without a look that would take longer than the save
    return started_anew(child)


def is_saving(checkpoints: Path) -> bool:
    """Whether a checkpoint is there without the file that is written last."""
    try:
        found = [path.name for path in checkpoints.iterdir() if "step-" in path.name]
    except FileNotFoundError:
        return False
    return any(not (checkpoints / name / "checkpoint.json").exists() for name in found)


def kill_while_validating(trial: Trial) -> Child:
    flag, at = trial.place.parent / "validating", trial.chance.randrange(EPOCHS + 1)

    def before() -> None:
        from hasten.train import trainer

        whole, calls = trainer.evaluate, [0]

        def watched(*args: object, **named: object) -> object:
            if calls[0] == at:
                flag.touch()
            calls[0] += 1
            return whole(*args, **named)  # type: ignore[arg-type]

        trainer.evaluate = watched  # type: ignore[assignment]

    child = trial.begin(before)
    until(child, flag.exists)
    time.sleep(trial.chance.uniform(0.0, 0.02))
    strike(trial, child, signal.SIGKILL)
    return started_anew(child)


def notice(number: int, times: int = 1) -> Callable[[Trial], Child]:
    def act(trial: Trial) -> Child:
        child = trial.begin()
        trial.moment(child)
        trial.note()
        for _ in range(times):
            child.send(number)
            time.sleep(trial.chance.uniform(0.0, 0.01))
        status = child.wait()
        # Before its first step and after its last a run heeds no signals: it just ends.
        outside = status == -number and epochs_saved(trial.folder) in (None, EPOCHS)
        if status not in (75, 0) and not outside:
            raise Lost(f"{signal.Signals(number).name} ended it with {status}, not 75")
        return child

    return act


def one_told(trial: Trial) -> Child:
    """SIGTERM or SIGUSR1 to one rank: all save and end, and the launcher starts them anew."""
    child = trial.begin()
    trial.moment(child)
    strike(trial, child, trial.chance.choice([signal.SIGTERM, signal.SIGUSR1]))
    return started_anew(child)


def launcher_told(trial: Trial) -> Child:
    """SIGTERM to the launcher, which hands it on."""
    child = trial.begin()
    trial.moment(child)
    trial.note()
    child.send(signal.SIGTERM)
    status = child.wait()
    if status not in (0, STOPPED, -signal.SIGTERM):
        raise Lost(f"SIGTERM ended the launcher with {status}")
    return child


def all_killed(trial: Trial) -> Child:
    """The ranks and their launcher; they are started anew by hand."""
    child = trial.begin()
    trial.moment(child)
    trial.note()
    child.send(signal.SIGKILL)
    return child


def full_disk(trial: Trial) -> Child:
    """Somebody else fills the disk, for a while or for good."""
    child = trial.begin()
    trial.moment(child)
    filler = trial.place / "filler"
    trial.note()
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(65536))
    if trial.chance.random() < 0.5:
        trial.moment(child)
        filler.unlink()
    status = child.wait()
    filler.unlink(missing_ok=True)
    if status not in (0, 1):
        raise Lost(f"a full disk ended it with {status}")
    return child


def no_large_files(trial: Trial) -> Child:
    """A limit on the size of files, as a quota gives."""
    child = trial.begin()
    trial.moment(child)
    trial.note()
    if not child.ended():
        soft = trial.chance.choice([0, 1000, 30_000])
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
        trial.moment(child)
    if not child.ended() and trial.chance.random() < 0.7:
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, unlimited)
    child.wait()
    return child


def read_only(trial: Trial) -> Child:
    child = trial.begin()
    trial.moment(child)
    trial.note()
    remount(trial.place, "ro")
    if trial.chance.random() < 0.5:
        trial.moment(child)
        remount(trial.place, "rw")
    child.wait()
    remount(trial.place, "rw")
    return child


def remount(place: Path, mode: str) -> None:
    # Files that are open for writing keep a disk from becoming read-only.
    command = ["mount", "-o", f"remount,{mode}", str(place)]
    until_s = time.monotonic() + 5
    while subprocess.run(command, capture_output=True, check=False).returncode != 0:
        if time.monotonic() > until_s:
            return
        time.sleep(0.001)


def removed(what: str) -> Callable[[Trial], Child]:
    def act(trial: Trial) -> Child:
        child = trial.begin()
        trial.moment(child)
        shutil.rmtree(trial.folder / what, ignore_errors=True)
        if child.wait() != 0:
            raise Lost(f"it ended with {child.status} when its folder was removed")
        if not (trial.folder / "config.json").exists():
            shutil.rmtree(trial.folder, ignore_errors=True)  # removed when it was over
        trial.forget()
        return child

    return act


def damaged(*names: str) -> Callable[[Trial], Child]:
    """Killed, and then a file of it is cut or altered."""

    def act(trial: Trial) -> Child:
        child = trial.begin()
        trial.moment(child)
        child.send(signal.SIGKILL)
        child.wait()
        whole = [path for path in (trial.folder / "checkpoints").glob("step-*") if sound(path)]
        files = sorted({path for name in names for path in trial.folder.rglob(name)})
        if not whole:  # the settings are in config.json alone, and nothing is saved
            files = [path for path in files if path.name != "config.json"]
        if len(whole) < 2:  # there is none before it to go on from
            files = [path for path in files if path.parent not in whole]
        elif trial.chance.random() < 0.8:
            files = [path for path in files if path.parent == max(whole)] or files
        if files:
            damage(trial.chance.choice(files), trial.chance)
        trial.forget()
        return child

    return act


def damage(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        at = chance.randrange(len(content))
        if chance.random() < 0.5:
            del content[at:]
        else:
            content[at] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def two_runs(trial: Trial) -> Child:
    """A second run in the folder, while the first one stands still and so is not over."""
    child = trial.begin()
    trial.moment(child)
    trial.note()
    child.send(signal.SIGSTOP)
    over = child.ended() or (trial.folder / "model.safetensors").exists()
    other = replace(trial, log_name="second.txt")  # what it says is of no run that begins
    second = other.start("--resume", str(trial.folder), "--progress", "off")
    status = second.wait()
    child.send(signal.SIGCONT)
    if not over and status != 2:
        raise Lost(f"the second run ended with {status}, not 2")
    if child.wait() != 0:
        raise Lost(f"a second run ended the first with {child.status}")
    return child


def clock_jumps(trial: Trial) -> Child:
    seed = trial.chance.random()

    def before() -> None:
        chance, real = random.Random(seed), time.time
        time.time = lambda: real() + chance.choice([0.0, 1e8, -1e8, 3600.0, -3600.0])

    child = trial.begin(before)
    trial.moment(child)
    strike(trial, child, signal.SIGKILL)
    return started_anew(child)


def power_cut(trial: Trial) -> Child:
    """All are killed, and what was not flushed is lost."""

    def before() -> None:
        chaos_power.note_in(trial.place)

    child = trial.begin(before)
    trial.moment(child)
    trial.note()
    child.send(signal.SIGKILL)
    child.wait()
    chaos_power.cut(trial.place, trial.chance)
    return child


def hang(trial: Trial) -> Child:
    """One process sleeps in a step, for good; it is named, and ends, to be started anew."""
    flag, at = trial.place.parent / "hangs", trial.chance.randrange(1, 50)
    rank = str(trial.chance.randrange(2)) if trial.setup.name != "one process" else "0"

    def before() -> None:
        from hasten.train import trainer

        whole, calls = trainer.call, [0]

        def asleep_for_good(model: Any, data: Any) -> Any:
            calls[0] += 1
            if os.environ.get("RANK", "0") == rank and calls[0] == at and not flag.exists():
                flag.touch()
                time.sleep(1000)
            return whole(model, data)

        trainer.call = asleep_for_good

    child = trial.begin(before, "--hang-after-s", str(_HANG_S), "--hang-exits")
    until(child, flag.exists)
    trial.note()
    child.wait()
    if flag.exists() and "in asleep_for_good" not in trial.heard():
        raise Lost("it hung, and was not told where")
    return started_anew(child)


def stopped(trial: Trial) -> Child:
    """A rank is stopped (SIGSTOP); the other names it, and both are started anew."""
    child = trial.begin(_NOTHING, "--hang-after-s", str(_HANG_S), "--hang-exits")
    trial.moment(child)
    assert isinstance(child, Launched)
    ranks = child.ranks()
    before = newest_step(trial.folder)
    strike(trial, child, signal.SIGSTOP)
    said = len(trial.heard())
    while not child.ended():
        time.sleep(0.05)
        if epochs_saved(trial.folder) == EPOCHS:  # it was over: nobody watches what comes then
            for rank in ranks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.send_signal(signal.SIGCONT)
            break
    started_anew(child)
    new = trial.heard()[said:]
    if ranks and before >= 0 and "hangs: " in new and "no sign of life any more" not in new:
        raise Lost("a rank was stopped, and was not named")
    return child


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way to strike a run."""

    name: str
    act: Callable[[Trial], Child]
    """Starts the run and strikes it; it may still be ending."""
    own_disk: bool = False
    """Needs a small disk of its own, which only root can make."""
    spares: bool = True
    """Whether what was saved before must still be whole after it."""
    keeps_log: bool = True
    """Whether the log must hold each epoch at the end."""
    keeps_best: bool = True
    """Whether the best must be the same: one that could not be written is not the best."""
    ranks: bool = False
    """Strikes a run of two ranks, ddp or fsdp as chance has it."""


_CHECKPOINT = ("model.pt", "training.pt", "checkpoint.json", "part-*.safetensors")
_OTHER = ("best.json", "config.json", "metrics.jsonl", "model.safetensors")

FAULTS = (
    Fault(name="kill -9", act=kill),
    Fault(name="ranks: kill -9 of one", act=kill, ranks=True),
    Fault(name="kill -9 while saving", act=kill_while_saving),
    Fault(name="ranks: kill -9 while saving", act=kill_while_saving, ranks=True),
    Fault(name="kill -9 in validation", act=kill_while_validating),
    Fault(name="ranks: kill -9 in validation", act=kill_while_validating, ranks=True),
    Fault(name="SIGTERM", act=notice(signal.SIGTERM)),
    Fault(name="SIGUSR1", act=notice(signal.SIGUSR1)),
    Fault(name="SIGTERM, twice", act=notice(signal.SIGTERM, 2)),
    Fault(name="ranks: SIGTERM or SIGUSR1 to one", act=one_told, ranks=True),
    Fault(name="ranks: SIGTERM to the launcher", act=launcher_told, ranks=True),
    Fault(name="full disk", act=full_disk, own_disk=True, keeps_best=False),
    Fault(name="ranks: full disk", act=full_disk, own_disk=True, keeps_best=False, ranks=True),
    Fault(name="limit on files", act=no_large_files, keeps_best=False),
    Fault(name="read-only disk", act=read_only, own_disk=True, keeps_best=False),
    Fault(name="run folder removed", act=removed(""), spares=False, keeps_log=False),
    Fault(name="checkpoints removed", act=removed("checkpoints"), spares=False),
    Fault(name="checkpoint cut or altered", act=damaged(*_CHECKPOINT), spares=False),
    Fault(
        name="ranks: checkpoint cut or altered",
        act=damaged(*_CHECKPOINT),
        spares=False,
        ranks=True,
    ),
    Fault(name="other file cut or altered", act=damaged(*_OTHER), keeps_log=False),
    Fault(name="two runs in a folder", act=two_runs),
    Fault(name="clock jumps", act=clock_jumps),
    Fault(name="power cut", act=power_cut, keeps_log=False),
    Fault(name="ranks: power cut", act=power_cut, keeps_log=False, ranks=True),
    Fault(name="a hang", act=hang),
    Fault(name="ranks: a hang of one", act=hang, ranks=True),
    Fault(name="ranks: one stopped", act=stopped, ranks=True),
    Fault(name="ranks: kill -9 of all", act=all_killed, ranks=True),
)
