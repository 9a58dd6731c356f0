"""A hundred faults at random moments: is anything lost?

    python tests/chaos/chaos.py [--trials 100] [--seed 20261130] [--jobs 2] [--only NAME] [--keep]

Each trial trains a small classifier by the command line's own code, strikes it once or twice at a
moment that the seed decides, resumes what is left, and compares the final weights with those of a
run that nothing happened to: bit for bit. Before it resumes it also looks whether the newest
checkpoint that was whole at the stroke still is, or a newer one.

Runs are forked from a process that has imported everything, which saves each of them seconds of
starting Python; what strikes them are real signals, disks and files. A seed gives the same faults
at the same moments of a run's expected length; the machine decides which step that is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import chaos_ranks
from chaos_trial import EPOCHS, Child, Lost, Trial, until

SEED = 20261130
_DISK_BYTES = 24 * 2**20


# --- the faults --------------------------------------------------------------------------------


def kill(trial: Trial) -> Child:
    child = trial.begin()
    trial.moment(child)
    child.send(signal.SIGKILL)
    return child


def kill_while_saving(trial: Trial) -> Child:
    child = trial.begin()
    trial.moment(child)
    checkpoints = trial.folder / "checkpoints"
    until(child, lambda: any(checkpoints.glob(".step-*")))
    time.sleep(trial.chance.uniform(0.0, 0.004))
    child.send(signal.SIGKILL)
    return child


def kill_while_validating(trial: Trial) -> Child:
    flag, at = trial.place.parent / "validating", trial.chance.randrange(3)

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
    child.send(signal.SIGKILL)
    return child


def notice(number: int, times: int = 1) -> Callable[[Trial], Child]:
    def act(trial: Trial) -> Child:
        child = trial.begin()
        trial.moment(child)
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


def full_disk(trial: Trial) -> Child:
    """Somebody else fills the disk, for a while or for good."""
    child = trial.begin()
    trial.moment(child)
    filler = trial.place / "filler"
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
    remount(trial.place, "ro")
    if trial.chance.random() < 0.5:
        trial.moment(child)
        remount(trial.place, "rw")
    child.wait()
    remount(trial.place, "rw")
    return child


def removed(what: str) -> Callable[[Trial], Child]:
    def act(trial: Trial) -> Child:
        child = trial.begin()
        trial.moment(child)
        shutil.rmtree(trial.folder / what, ignore_errors=True)
        if child.wait() != 0:
            raise Lost(f"it ended with {child.status} when its folder was removed")
        if not (trial.folder / "config.json").exists():
            shutil.rmtree(trial.folder, ignore_errors=True)  # removed when it was over
        return child

    return act


def damaged(trial: Trial) -> Child:
    """Killed, and then a file of it is cut or altered."""
    child = kill(trial)
    child.wait()
    whole = [path for path in (trial.folder / "checkpoints").glob("step-*") if sound(path)]
    files = [path for path in trial.folder.rglob("*") if path.is_file()]
    if len(whole) < 2:  # there is none before it to go on from
        files = [path for path in files if path.parent not in whole]
    target = trial.chance.choice(sorted(files))
    content = bytearray(target.read_bytes())
    if content:
        at = trial.chance.randrange(len(content))
        if trial.chance.random() < 0.5:
            del content[at:]
        else:
            content[at] ^= 1 << trial.chance.randrange(8)
    target.write_bytes(content)
    return child


def two_runs(trial: Trial) -> Child:
    child = trial.begin()
    trial.moment(child)
    alive = not child.ended()
    second = trial.start("--resume", str(trial.folder), "--progress", "off")
    status = second.wait()
    if alive and status not in (2, 0):
        raise Lost(f"the second run ended with {status}, not 2")
    if alive and status == 0 and not child.ended():
        raise Lost("the second run was let in")
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
    child.send(signal.SIGKILL)
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
    ranks: bool = False
    """Strikes a run of two ranks."""


FAULTS = (
    Fault(name="kill -9", act=kill),
    Fault(name="kill -9 while saving", act=kill_while_saving),
    Fault(name="kill -9 in validation", act=kill_while_validating),
    Fault(name="SIGTERM", act=notice(signal.SIGTERM)),
    Fault(name="SIGUSR1", act=notice(signal.SIGUSR1)),
    Fault(name="SIGTERM, twice", act=notice(signal.SIGTERM, 2)),
    Fault(name="full disk", act=full_disk, own_disk=True),
    Fault(name="limit on files", act=no_large_files),
    Fault(name="read-only disk", act=read_only, own_disk=True),
    Fault(name="run folder removed", act=removed(""), spares=False),
    Fault(name="checkpoints removed", act=removed("checkpoints"), spares=False),
    Fault(name="file cut or altered", act=damaged, spares=False),
    Fault(name="two runs in a folder", act=two_runs),
    Fault(name="clock jumps", act=clock_jumps),
    Fault(name="ranks: kill -9 of one", act=chaos_ranks.struck(signal.SIGKILL), ranks=True),
    Fault(name="ranks: kill -9 while saving", act=chaos_ranks.killed_while_saving, ranks=True),
    Fault(name="ranks: kill -9 in validation", act=chaos_ranks.killed_while_validating, ranks=True),
    Fault(name="ranks: SIGTERM to one", act=chaos_ranks.struck(signal.SIGTERM), ranks=True),
    Fault(name="ranks: SIGTERM to the launcher", act=chaos_ranks.launcher_told, ranks=True),
    Fault(name="ranks: kill -9 of all", act=chaos_ranks.all_killed, ranks=True),
)


# --- the trials --------------------------------------------------------------------------------


def sound(path: Path) -> bool:
    from hasten.errors import CheckpointError
    from hasten.train import checkpoint

    try:
        checkpoint.load(path, map_location="cpu")
    except CheckpointError:
        return False
    return True


def newest_step(folder: Path) -> int:
    from hasten.train import checkpoint

    found, _ = checkpoint.newest(folder / checkpoint.FOLDER)
    return -1 if found is None else checkpoint.load(found, map_location="cpu").meta["step"]


def epochs_saved(folder: Path) -> int | None:
    """By the newest checkpoint; None where there is none."""
    from hasten.train import checkpoint

    found, _ = checkpoint.newest(folder / checkpoint.FOLDER)
    if found is None:
        return None
    return int(checkpoint.load(found, map_location="cpu").meta["epoch"])


def weights(folder: Path) -> bytes:
    from hasten.train import checkpoint

    newest, _ = checkpoint.newest(folder / checkpoint.FOLDER)
    if newest is None:
        raise Lost("there is no checkpoint at the end")
    state = checkpoint.load(newest, map_location="cpu").model
    return b"".join(state[key].numpy().tobytes() for key in sorted(state))


def remount(place: Path, mode: str) -> None:
    # Files that are open for writing keep a disk from becoming read-only.
    command = ["mount", "-o", f"remount,{mode}", str(place)]
    until_s = time.monotonic() + 5
    while subprocess.run(command, capture_output=True, check=False).returncode != 0:
        if time.monotonic() > until_s:
            return
        time.sleep(0.001)


@contextlib.contextmanager
def disk(place: Path, *, own: bool) -> Iterator[bool]:
    """A folder, on a small disk of its own if asked for and allowed; whether it is."""
    place.mkdir(parents=True)
    options = ["-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs"]
    made = own and shutil.which("mount") is not None
    if made:
        done = subprocess.run(["mount", *options, str(place)], capture_output=True, check=False)
        made = done.returncode == 0
    try:
        yield made
    finally:
        if made:
            subprocess.run(["umount", "-l", str(place)], check=True)


def one(number: int, seed: int, root: Path, whole: dict[bool, Whole], only: str) -> str:
    """A trial; gives the fault's name, or raises what was lost."""
    chance = random.Random(f"{seed} {number}")
    faults = [fault for fault in FAULTS if only in fault.name]
    fault = faults[number % len(faults)]
    undisturbed = whole[fault.ranks]
    top = root / f"trial-{number}"
    with disk(top / "runs", own=fault.own_disk) as own:
        if fault.own_disk and not own:
            return f"{fault.name}: left out, no disk can be made here"
        trial = Trial(
            number=number,
            chance=chance,
            place=top / "runs",
            folder=top / "runs" / "run",
            seconds=undisturbed.seconds,
            launcher=chaos_ranks.launch if fault.ranks else None,
        )
        child = fault.act(trial)
        child.wait()
        again = 0
        while not is_over(trial.folder):
            before = newest_step(trial.folder) if fault.spares or again else -1
            resumed = (
                trial.start("--resume", str(trial.folder), "--progress", "plain")
                if (trial.folder.exists())
                else trial.begin()
            )
            if again == 0 and chance.random() < 0.3:
                trial.moment(resumed)
                resumed.send(signal.SIGKILL)
                resumed.wait()
            elif resumed.wait() != 0:
                raise Lost(f"resuming ended with {resumed.status}")
            if newest_step(trial.folder) < before:
                raise Lost(f"the checkpoint of step {before} is gone")
            again += 1
        if weights(trial.folder) != undisturbed.weights:
            raise Lost("the final weights differ")
    return fault.name


def is_over(folder: Path) -> bool:
    """Whether the run came to its end, its weights written."""
    from hasten.errors import HastenError
    from hasten.train import weights as files

    try:
        files.read(folder / "model.safetensors")
    except HastenError:
        return False
    return epochs_saved(folder) == EPOCHS


@dataclass(frozen=True, kw_only=True)
class Whole:
    """The run that nothing happens to."""

    weights: bytes
    seconds: float


def warm() -> None:
    """Import all that a run needs."""
    import sklearn.datasets
    import torch
    import torch.distributed.fsdp
    import torch.distributed.run

    import hasten.cli.app
    import hasten.observe.report
    import hasten.vision.gallery
    import hasten.vision.recipe  # noqa: F401

    torch.set_num_threads(1)
    sklearn.datasets.load_digits()


def undisturbed(root: Path, *, ranks: bool) -> Whole:
    top = root / ("whole-ranks" if ranks else "whole")
    trial = Trial(
        number=-1,
        chance=random.Random(0),
        place=top / "runs",
        folder=top / "runs" / "run",
        seconds=0.0,
        launcher=chaos_ranks.launch if ranks else None,
    )
    trial.place.mkdir(parents=True)
    child = trial.begin()
    since = time.monotonic()
    if child.wait() != 0:
        raise SystemExit(f"the undisturbed run failed:\n{child.log.read_text()}")
    return Whole(weights=weights(trial.folder), seconds=time.monotonic() - since)


def run(
    trials: int,
    seed: int,
    *,
    jobs: int = 2,
    only: str = "",
    seconds: float | None = None,
    root: Path,
) -> tuple[Counter[str], list[str]]:
    """Do the trials; gives how often each fault was survived, and what was lost.

    Args:
        trials: how many.
        seed: decides on faults and moments.
        jobs: trials beside each other.
        only: a part of the names of the faults to do.
        seconds: begins no trial after so long.
        root: an empty folder to work in.
    """
    faults = [fault for fault in FAULTS if only in fault.name]
    warm()
    needed = {each.ranks for each in faults[:trials]}
    whole = {ranks: undisturbed(root, ranks=ranks) for ranks in needed}
    began = time.monotonic()
    workers = []
    for job in range(jobs):
        pid = os.fork()
        if pid:
            workers.append(pid)
            continue
        status = 70
        try:
            with (root / f"results-{job}.jsonl").open("w", buffering=1) as results:
                for number in range(job, trials, jobs):
                    if seconds is not None and time.monotonic() - began > seconds:
                        break
                    try:
                        name, lost = one(number, seed, root, whole, only), None
                    except Exception as error:  # noqa: BLE001  (it is counted and told)
                        name, lost = "", f"{type(error).__name__}: {error}"
                        log = root / f"trial-{number}" / "log.txt"
                        if log.exists():
                            lost += "\n" + "\n".join(log.read_text().splitlines()[-12:])
                    if lost is None:
                        shutil.rmtree(root / f"trial-{number}", ignore_errors=True)
                    results.write(json.dumps([number, name, lost]) + "\n")
            status = 0
        finally:
            os._exit(status)
    for pid in workers:
        os.waitpid(pid, 0)
    survived: Counter[str] = Counter()
    lost_ones = []
    for job in range(jobs):
        for line in (root / f"results-{job}.jsonl").read_text().splitlines():
            number, name, lost = json.loads(line)
            if lost is None:
                survived[name] += 1
            else:
                fault = faults[number % len(faults)]
                lost_ones.append(f"trial {number} ({fault.name}): {lost}")
    return survived, lost_ones


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="part of a fault's name")
    parser.add_argument("--seconds", type=float, help="begin no trial after so long")
    parser.add_argument("--keep", action="store_true", help="keep the folder")
    parser.add_argument("--json", type=Path, help="write the count here")
    options = parser.parse_args()
    os.environ.setdefault("HASTEN_CACHE_DIR", "off")
    root = Path(tempfile.mkdtemp(prefix="hasten-chaos-"))
    began = time.monotonic()
    try:
        survived, lost = run(
            options.trials,
            options.seed,
            jobs=options.jobs,
            only=options.only,
            seconds=options.seconds,
            root=root,
        )
    finally:
        if not options.keep:
            shutil.rmtree(root, ignore_errors=True)
    for name, count in sorted(survived.items()):
        print(f"{count:4} {name}")
    for text in lost:
        print(f"LOST {text}")
    left_out = sum(count for name, count in survived.items() if "left out" in name)
    good = sum(survived.values()) - left_out
    print(
        f"{good} of {good + len(lost)} with nothing lost"
        f" (seed {options.seed}, {time.monotonic() - began:.0f} s)"
    )
    if options.json is not None:
        options.json.write_text(json.dumps({"survived": good, "lost": lost}))
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
