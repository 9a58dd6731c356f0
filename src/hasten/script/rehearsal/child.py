"""The process that runs the script: `python -c "from ... import main; main()" FOLDER`.

The folder holds the request; the outcome is written beside it.
"""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hasten.errors import HastenError
from hasten.script.rehearsal.request import Ending, Outcome, Request

REQUEST, OUTCOME = "request.json", "outcome.json"
_DEVICE_WORDS = (
    "Expected all tensors to be on the same device",
    "Cannot re-initialize CUDA",
    "device type tensor to numpy",
    "CUDA out of memory",
    "CUDA error",
    "DistributedDataParallel device_ids and output_device arguments only work",
)
_NETWORK_ERRORS = frozenset(
    [
        "urllib.error.URLError",
        "builtins.ConnectionError",
        "socket.gaierror",
        "requests.exceptions.RequestException",
        "httpx.TransportError",
    ]
)


class Rehearsal:
    """The script, the simulation around it, and everything that watches."""

    def __init__(self, request: Request, folder: Path) -> None:
        from hasten.script.rehearsal.borders import Borders, Habits
        from hasten.script.rehearsal.causes import Causes
        from hasten.script.rehearsal.collected import Collected
        from hasten.script.rehearsal.evaluation import Evaluation
        from hasten.script.rehearsal.files import Overlay
        from hasten.script.rehearsal.graphs import Graphs
        from hasten.script.rehearsal.guard import Guard
        from hasten.script.rehearsal.loaders import Loaders
        from hasten.script.rehearsal.loops import Loops
        from hasten.script.rehearsal.modules import Modules
        from hasten.script.rehearsal.origins import Origins
        from hasten.script.rehearsal.places import Territory
        from hasten.script.rehearsal.rhythm import Rhythm
        from hasten.script.rehearsal.running import Program
        from hasten.script.rehearsal.saving import Saving
        from hasten.script.rehearsal.steps import Steps
        from hasten.script.rehearsal.waits import Waits
        from hasten.script.rehearsal.world import World

        self.request, self.folder = request, folder
        self.program = Program(request)
        self.territory = Territory(self.program.folder)
        self.started_in = str(Path.cwd())
        self.collected = Collected(self.started_in)
        self.modules = Modules(self.territory)
        rhythm = Rhythm(self.territory.holds)
        self.loops = Loops(request.steps, lambda: self.modules.depth > 0, rhythm.steps)
        self.origins = Origins(self.territory)
        self.causes = Causes(self.territory, self.origins, self.modules, self.collected)
        self.waits = Waits(self.territory, self.origins, self.collected, self.loops)
        self.steps = Steps(self.territory, self.loops, self.modules, self.collected, self._quietly)
        self.evaluation = Evaluation(self.collected, self.modules)
        self.loaders = Loaders(
            self.territory,
            self.origins,
            self.collected,
            self.loops.limit,
            lambda: self.steps.rounds,
        )
        self.waits.elsewhere = lambda: self.loaders.in_worker
        self.borders = Borders(self.territory, self.origins, self.collected, self._quietly)
        self.habits = Habits(self.territory, self.modules, self.collected)
        self.saving = Saving(self.territory, self.collected, self.steps)
        self.graphs = Graphs(self.territory, self.collected)
        self.world = World(self.territory)
        self.overlay = None if request.keep else Overlay(folder)
        self.guard = Guard(request.timeout_s, self.territory, self._give_up, self._abandon)
        self.process = os.getpid()
        self.started_processes = False
        self.leave: Callable[[int], Any] = os._exit
        self.ending: Ending = "finished"
        self.error = ""
        self.said: list[str] = []
        self.clock: Any = None  # of the device, once there is one

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        """Read device values without the watchers seeing it."""
        events = self.simulation.events
        kept, self.waits.quiet = len(events), True
        try:
            yield
        finally:
            self.waits.quiet = False
            del events[kept:]

    def run(self) -> None:
        """Run the script to its end, whatever that is."""

        import hasten.simulate

        make: Any = hasten.simulate
        with make.simulate(
            devices=self.request.devices, on_mismatch=self.causes.mismatch
        ) as self.simulation:
            self.clock = self.simulation.clock
            self._install()
            self.guard.start()
            with self.origins:
                self._run()
            self.guard.end()
            self._tell()

    def _install(self) -> None:
        from hasten.script.rehearsal.borders import watch_parallel

        self._watch_ends()
        self.modules.install(self.evaluation.called)
        self.steps.install(self.causes)
        self.steps.listeners += [
            self.waits.step,
            self.habits.step,
            self.graphs.step,
            self.evaluation.step,
        ]
        self.steps.backward_listeners.append(self.evaluation.backward)
        self.causes.install()
        self.loaders.install()
        self.borders.install()
        self.habits.install()
        self.world.install()
        watch_parallel(self.territory, self.collected)
        if self.overlay is not None:
            self.overlay.install()
        self.saving.install()
        self.loops.install(self.territory.holds)
        self.waits.follow(self.simulation.events)

    def _run(self) -> None:
        from hasten.script.rehearsal.guard import Stop

        try:
            self.program.run()
        except Stop:
            self.ending = "time"
        except SystemExit as stop:
            self._exited(stop)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001
            self._failed(error)
        if self.guard.reason:
            self.ending = "time"

    def _exited(self, stop: SystemExit) -> None:
        if stop.code is None or stop.code == 0:
            return
        self.ending = "failed"
        if isinstance(stop.code, int):
            self.error = f"SystemExit: {stop.code}"
            self.said.append(f"the script itself ended with exit status {stop.code}")
        else:
            self.error = str(stop.code)
            self.said.append("the script itself ended with a message")

    def _failed(self, error: BaseException) -> None:
        self.error = self._as_python_prints(error)
        text = str(error)
        self.ending = "device" if any(word in text for word in _DEVICE_WORDS) else "failed"
        if self.ending == "device":
            self._tell_device_error(error)
        else:
            self.said += why_it_may_fail_here(error)

    def _tell_device_error(self, error: BaseException) -> None:
        frames = [
            entry
            for entry in traceback.extract_tb(error.__traceback__)
            if self.territory.holds(entry.filename)
        ]
        if frames:
            last = frames[-1]
            self.collected.add(
                "HST115",
                last.filename,
                last.lineno or 1,
                f"{type(error).__name__}: {str(error).splitlines()[0]}",
                fix="bring the tensors to one device; the script could not go on from here",
            )

    def _as_python_prints(self, error: BaseException) -> str:
        """The traceback without the frames of this package, and those that led to the script."""
        shown = traceback.TracebackException.from_exception(error)
        own = str(Path(__file__).parents[2])
        at: traceback.TracebackException | None = shown
        for _ in range(16):
            if at is None:
                break
            kept = [entry for entry in at.stack if not entry.filename.startswith(own)]
            first = next((i for i, e in enumerate(kept) if self.territory.holds(e.filename)), None)
            kept = kept[first:] if first is not None else []
            at.stack = traceback.StackSummary.from_list(kept)
            at = at.__cause__ or at.__context__
        text = "".join(shown.format())
        return text if shown.stack else text.removeprefix("Traceback (most recent call last):\n")

    def _tell(self) -> None:
        for watcher in (self.waits, self.habits, self.loaders, self.evaluation):
            watcher.tell()

    def _give_up(self) -> None:
        """Called by the guard's thread when the script does not stop."""
        self.ending = "time"
        self._tell()
        self.write()
        self.leave(0)

    def _abandon(self) -> None:
        """The check was killed: leave neither processes nor files."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    def _watch_ends(self) -> None:
        """Report also where the script leaves without Python's ending, and see its processes."""
        plain_exit, plain_start = os._exit, multiprocessing.process.BaseProcess.start

        def leave(status: int) -> None:
            if os.getpid() == self.process and threading.current_thread() is self._main:
                self._exited(SystemExit(status))
                self._tell()
                self.write()
            plain_exit(status)

        def start(this: Any) -> None:
            self.started_processes = True
            plain_start(this)

        os._exit = leave  # type: ignore[assignment]
        setattr(multiprocessing.process.BaseProcess, "start", start)  # noqa: B010
        self.leave, self._main = plain_exit, threading.main_thread()

    def outcome(self) -> Outcome:
        """What came of it."""
        said = list(self.said)
        if self.guard.reason:
            said.append(self.guard.reason)
        if (
            not self.steps.count
            and not self.steps.backwards
            and self.ending in ("finished", "enough")
        ):
            said.append(
                "the script made no optimizer step: what happens in a training step was not seen"
            )
        elif self.steps.count and not self.clock.launches:
            said.append(
                "the script put nothing on the device: with a GPU, too, it trains on the CPU; "
                'take device = torch.device("cuda" if torch.cuda.is_available() else "cpu") and '
                "move the model and each batch to it"
            )
        cut = len(self.loops.cut)
        if cut:
            said.append(
                f"{cut} {'loop was' if cut == 1 else 'loops were'} ended early, after "
                f"{self.request.steps} optimizer steps (more for what comes every so many) or two "
                "epochs"
            )
        if self.world.used:
            said.append("the script is made for several processes: it ran as rank 0 of 1")
        if self.started_processes:
            said.append("the script started processes of its own: what they did was not watched")
        if self.overlay is not None and self.overlay.written:
            said.append(
                "files that the script wrote went to a temporary folder (--keep keeps them)"
            )
        return Outcome(
            findings=tuple(self.collected.all()),
            steps=self.steps.count,
            ending=self.ending,
            said=tuple(said),
            error=self.error,
            files=tuple(self._own_files()),
        )

    def _own_files(self) -> list[str]:
        files = {self.program.file}
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if not isinstance(file, str) or not file.endswith(".py"):
                continue
            beside = file.startswith((self.program.folder + "/", self.started_in + "/"))
            if beside and self.territory.holds(file) and Path(file).is_file():
                files.add(file)
        return sorted(self.collected.shown(file) for file in files)

    def write(self) -> None:
        """Write the outcome beside the request."""
        text = self.outcome().to_json()
        descriptor = os.open(self.folder / OUTCOME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)


def why_it_may_fail_here(error: BaseException) -> list[str]:
    """A word on an error that comes from where the script runs, not from what it does."""
    if isinstance(error, EOFError) and "reading a line" in str(error):
        return ["the script asks for input and there is none: give it through a pipe"]
    if "docs/simulate.md" in str(error):
        return ["this is a limit of the simulated accelerator, not a fault of the script"]
    # URLError, ConnectionError and time-outs are all OSError; their modules tell them from files'.
    at: BaseException | None = error
    while at is not None:
        names = {f"{kind.__module__}.{kind.__name__}" for kind in type(at).__mro__}
        if names & _NETWORK_ERRORS:
            return [
                "the script needs the network: run it once by itself, so that what it downloads "
                "is there"
            ]
        at = at.__cause__ or at.__context__
    return []


def main() -> None:
    """Run what the folder in the arguments asks for."""
    folder = Path(sys.argv[1])
    request = Request.from_json((folder / REQUEST).read_text())
    if sys.path and sys.path[0] == "":
        del sys.path[0]  # put there for `-c`; the script's own folder takes its place
    temporary = folder / "tmp"
    if not request.keep:
        temporary.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    rehearsal = None
    try:
        rehearsal = Rehearsal(request, folder)
        rehearsal.run()
        if os.getpid() != rehearsal.process:
            sys.exit(0)  # a fork of the script's that came to its end
        rehearsal.write()
    except HastenError as error:
        (folder / OUTCOME).write_text(Outcome(ending="died", error=str(error)).to_json())
    except KeyboardInterrupt:
        (os._exit if rehearsal is None else rehearsal.leave)(130)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads and worker processes of the script are not waited for: it may have been stopped.
    (os._exit if rehearsal is None else rehearsal.leave)(0)
