"""A hundred faults at random moments: is anything lost?

    python tests/chaos/chaos.py [--trials 100] [--seed 20261130] [--jobs 2] [--only NAME] [--keep]

Each trial trains a small classifier by the command line's own code, in one process or in two ranks
(ddp, fsdp), strikes it at a moment that the seed decides, and resumes what is left, now and then by
another strategy or number of processes and with another stroke. Lost is what differs from a run
that nothing happened to: the final weights, the optimizer's state, the random generators, the
history, the exported weights, bit for bit. Lost is also, though the end be the same, a checkpoint
that was whole when the run was struck and that is not gone on from, an epoch that the log lacks,
and a process that hangs or ends as it should not.

Runs are forked from a process that has imported everything, which saves each of them seconds of
starting Python; what strikes them are real signals, disks and files. A seed gives the same faults
at the same moments of a run's expected length; the machine decides which step that is.
`--sabotage NAME` breaks hasten on purpose (chaos_sabotage.py), to see that the count falls.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import chaos_ranks
import chaos_sabotage
from chaos_faults import FAULTS, Fault
from chaos_trial import (
    EPOCHS,
    ONE,
    Lost,
    Setup,
    State,
    Trial,
    epochs_saved,
    newest,
    state_of,
    until,
)

SEED = 20261130
SETUPS = {setup.name: setup for setup in (ONE, chaos_ranks.DDP, chaos_ranks.FSDP)}
_DISK_BYTES = 24 * 2**20
_ROOM_BYTES = 2**30
_EVERY = ("4 steps", "4 steps", "1 step", "0.3 s", "1 epoch")
_CLOSE = 1e-3  # losses by another strategy, in parts of them


@dataclass(frozen=True, kw_only=True)
class Whole:
    """The run that nothing happens to."""

    end: State
    seconds: float


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


def one(number: int, options: Options, whole: dict[str, Whole]) -> str:
    """A trial; gives the fault's name, or raises what was lost."""
    fault = options.faults[number % len(options.faults)]
    chance, setup = options.drawn(number)
    top = options.root / f"trial-{number}"
    with disk(top / "runs", own=fault.own_disk) as own:
        if fault.own_disk and not own:
            return f"{fault.name}: left out, no disk can be made here"
        trial = Trial(
            number=number,
            chance=chance,
            place=top / "runs",
            setup=setup,
            words=("--checkpoint-every", chance.choice(_EVERY), "--keep", chance.choice("12")),
            seconds=whole[setup.name].seconds,
            sabotage=chaos_sabotage.ALL[options.sabotage],
        )
        struck(trial, fault, whole)
    return fault.name


def struck(trial: Trial, fault: Fault, whole: dict[str, Whole]) -> None:
    """Strike a run, resume it until it is over, and compare."""
    chance, expected = trial.chance, whole[trial.setup.name].end
    child = fault.act(trial)
    child.wait()
    trial.check_beginning(anew=True)
    trial.check_floor()
    again = 0
    while not is_over(trial.folder):
        if again == 0 and chance.random() < (0.5 if fault.ranks else 0.1):
            changed = chance.choice([s for s in SETUPS.values() if s is not trial.setup])
            expected = by_another(trial, changed, expected)
            trial.setup = changed
        child = trial.resume() if trial.folder.exists() else trial.begin()
        anew = trial.floor < 0
        if again == 0 and chance.random() < 0.3:
            trial.moment(child)
            trial.note()
            child.send(9)
            child.wait()
        elif child.wait() != 0:
            raise Lost(f"resuming ended with {child.status}")
        trial.check_beginning(anew=anew)
        trial.check_floor()
        again += 1
    compare(trial, fault, expected)


def by_another(trial: Trial, setup: Setup, before: State) -> State:
    """What a copy of the run comes to when it goes on by another strategy, undisturbed."""
    place = trial.place.parent / "by-another" / "runs"
    place.mkdir(parents=True)
    if not (trial.folder / "config.json").exists():
        return undisturbed(setup, place.parent, keep=1).end
    shutil.copytree(trial.folder, place / "run")
    copy = replace(trial, place=place, setup=setup, sabotage=lambda: None)
    child = copy.resume()
    if child.wait() != 0:
        raise Lost(f"going on by {setup.name} ended with {child.status}:\n{copy.heard()[-2000:]}")
    copy.check_beginning(anew=trial.floor < 0)
    found = state_of(newest(copy.folder))
    losses = [(a[2], b[2]) for a, b in zip(found.history, before.history, strict=True)]
    if any(abs(a - b) > _CLOSE * abs(b) for a, b in losses):
        raise Lost(f"by {setup.name} the losses are {found.history} and not {before.history}")
    return found


def compare(trial: Trial, fault: Fault, expected: State) -> None:
    """The run at its end with what it should be.

    Raises:
        Lost: they differ.
    """
    from hasten.observe import log
    from hasten.train import weights

    saved = newest(trial.folder)
    found = state_of(saved)
    if not fault.keeps_best:
        found = replace(found, best=expected.best)
    wrong = found.differs(expected)
    if wrong:
        raise Lost(f"at the end there differs: {wrong}")
    exported = weights.read(trial.folder / "model.safetensors")
    if any(not exported[name].equal(tensor) for name, tensor in saved.model.items()):
        raise Lost("the exported weights differ")
    epochs = [r for r in log.read(trial.folder) if r.kind == "epoch"]
    told = [(r.epoch, r.step, r.loss) for r in epochs]
    known = [record[:3] for record in found.history]
    if told != known if fault.keeps_log else any(each not in known for each in told):
        raise Lost(f"the log tells of the epochs {told}")


def is_over(folder: Path) -> bool:
    """Whether the run came to its end, its weights written."""
    from hasten.errors import HastenError
    from hasten.train import weights as files

    try:
        files.read(folder / "model.safetensors")
    except HastenError:
        return False
    return epochs_saved(folder) == EPOCHS


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


def undisturbed(setup: Setup, top: Path, *, keep: int = 2) -> Whole:
    trial = Trial(
        number=-1,
        chance=random.Random(0),
        place=top / "runs",
        setup=setup,
        words=("--checkpoint-every", "4 steps", "--keep", str(keep)),
    )
    trial.place.mkdir(parents=True, exist_ok=True)
    child = trial.begin()
    since = time.monotonic()
    until(child, (trial.folder / "model.safetensors").exists)
    seconds = time.monotonic() - since
    if child.wait() != 0:
        raise SystemExit(f"the undisturbed run failed:\n{trial.heard()}")
    return Whole(end=state_of(newest(trial.folder)), seconds=seconds)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is to be done."""

    trials: int
    seed: int
    """Decides on faults and moments."""
    root: Path
    """An empty folder to work in."""
    jobs: int = 2
    """Trials beside each other."""
    only: tuple[str, ...] = ()
    """The names of the faults to do, or parts of them; none is all."""
    seconds: float | None = None
    """No trial begins after so long."""
    verbose: bool = False
    """Says how long each took."""
    sabotage: str = ""
    """How to break hasten."""

    @property
    def faults(self) -> list[Fault]:
        names = {fault.name for fault in FAULTS}
        return [
            fault
            for fault in FAULTS
            if any(
                fault.name == part if part in names else part in fault.name
                for part in self.only or ("",)
            )
        ]

    def drawn(self, number: int) -> tuple[random.Random, Setup]:
        """The chance of a trial, and the setup that it begins with."""
        chance = random.Random(f"{self.seed} {number}")
        ranks = self.faults[number % len(self.faults)].ranks
        return chance, chance.choice([chaos_ranks.DDP, chaos_ranks.FSDP]) if ranks else ONE


def run(options: Options) -> tuple[Counter[str], list[str]]:
    """Do the trials; gives how often each fault was survived, and what was lost."""
    warm()
    whole = {}
    for name in {options.drawn(number)[1].name for number in range(options.trials)}:
        whole[name] = undisturbed(SETUPS[name], options.root / f"whole-{name}")
    began = time.monotonic()
    workers = []
    for job in range(options.jobs):
        pid = os.fork()
        if pid:
            workers.append(pid)
            continue
        status = 70
        try:
            _work(job, options, whole, began)
            status = 0
        finally:
            os._exit(status)
    for pid in workers:
        os.waitpid(pid, 0)
    survived: Counter[str] = Counter()
    lost_ones = []
    for job in range(options.jobs):
        for line in (options.root / f"results-{job}.jsonl").read_text().splitlines():
            number, name, lost, took = json.loads(line)
            fault = options.faults[number % len(options.faults)]
            if options.verbose:
                print(f"{number:4} {took:6.1f} s  {fault.name}")
            if lost is None:
                survived[name] += 1
            else:
                setup = options.drawn(number)[1].name
                lost_ones.append(f"trial {number} ({fault.name}, {setup}): {lost}")
    return survived, lost_ones


def _work(job: int, options: Options, whole: dict[str, Whole], began: float) -> None:
    with (options.root / f"results-{job}.jsonl").open("w", buffering=1) as results:
        for number in range(job, options.trials, options.jobs):
            if options.seconds is not None and time.monotonic() - began > options.seconds:
                break
            folder = options.root / f"trial-{number}"
            since = time.monotonic()
            try:
                name, lost = one(number, options, whole), None
            except Exception as error:  # noqa: BLE001  (it is counted and told)
                name, lost = "", f"{type(error).__name__}: {error}"
                log = folder / "log.txt"
                if log.exists():
                    lost += "\n" + "\n".join(log.read_text(errors="replace").splitlines()[-12:])
            if lost is None:
                shutil.rmtree(folder, ignore_errors=True)
            results.write(json.dumps([number, name, lost, time.monotonic() - since]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--only", action="append", default=[], help="a fault's name, or a part of one"
    )
    parser.add_argument("--seconds", type=float, help="begin no trial after so long")
    parser.add_argument("--sabotage", default="", choices=chaos_sabotage.ALL)
    parser.add_argument("--verbose", action="store_true", help="say how long each trial took")
    parser.add_argument("--keep", action="store_true", help="keep the folder")
    parser.add_argument("--json", type=Path, help="write the count here")
    given = parser.parse_args()
    os.environ.setdefault("HASTEN_CACHE_DIR", "off")
    # In memory, where there is room: a power cut is told by what was flushed, not by a disk.
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > _ROOM_BYTES
    place = memory if roomy and "TMPDIR" not in os.environ else None
    root = Path(tempfile.mkdtemp(prefix="hasten-chaos-", dir=place))
    options = Options(
        trials=given.trials,
        seed=given.seed,
        root=root,
        jobs=given.jobs,
        only=tuple(given.only),
        seconds=given.seconds,
        sabotage=given.sabotage,
        verbose=given.verbose,
    )
    began = time.monotonic()
    try:
        survived, lost = run(options)
    finally:
        if given.keep:
            print(f"kept: {root}")
        else:
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
    if given.json is not None:
        given.json.write_text(json.dumps({"survived": good, "lost": lost}))
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
