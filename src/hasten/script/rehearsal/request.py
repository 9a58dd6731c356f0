"""What is asked of a rehearsal, and what came of it: records that cross the process border."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hasten.errors import UsageError
from hasten.script.findings import Finding

# How the script ended: by itself (also by sys.exit(0)), by the rehearsal having seen enough, by the
# wall-clock limit, by an error of its own, by a device fault that could not be mended, by dying.
Ending = Literal["finished", "enough", "time", "failed", "device", "died"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One rehearsal.

    Attributes:
        script: path of the script, or the module's dotted name with ``as_module``.
        arguments: the script's own arguments.
        as_module: run as ``python -m`` does.
        steps: optimizer steps in each training loop before the loop is ended.
        devices: simulated devices.
        timeout_s: seconds of wall clock before the script is stopped.
        keep: let the script write where it wants; otherwise writes go to a temporary folder.
    """

    script: str
    arguments: tuple[str, ...] = ()
    as_module: bool = False
    steps: int = 3
    devices: int = 1
    timeout_s: float = 120.0
    keep: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"--steps {self.steps}: at least one optimizer step is needed")
        if not 1 <= self.devices <= 64:
            raise UsageError(f"--devices {self.devices}: between 1 and 64 devices can be simulated")
        if not self.timeout_s > 0:
            raise UsageError(f"--timeout-s {self.timeout_s}: seconds above 0")
        if not self.as_module:
            _check_file(Path(self.script))

    def to_json(self) -> str:
        """The request as text; `from_json` takes it back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        """The request that `to_json` wrote."""
        record = json.loads(text)
        return cls(**{**record, "arguments": tuple(record["arguments"])})


def _check_file(path: Path) -> None:
    if path.suffix == ".ipynb":
        raise UsageError(
            f"{path} is a notebook, which Python does not run: read it with --static, or make a "
            "script of it (jupyter nbconvert --to script)"
        )
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise UsageError(
            f"{path} is a folder: name the script in it, or use --static for all files"
        )
    if not path.exists():
        raise UsageError(f"there is no file {path}")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rehearsal found.

    Attributes:
        findings: what was seen while running.
        steps: optimizer steps made in all.
        ending: how the script ended.
        said: what a person should know besides the findings, one sentence each.
        error: the script's own traceback as Python prints it, when it failed.
        files: the script's own files that ran: itself and modules beside it.
    """

    findings: tuple[Finding, ...] = ()
    steps: int = 0
    ending: Ending = "finished"
    said: tuple[str, ...] = ()
    error: str = ""
    files: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The outcome as text; `from_json` takes it back."""
        record: dict[str, Any] = {
            "findings": [finding.to_json() for finding in self.findings],
            "steps": self.steps,
            "ending": self.ending,
            "said": list(self.said),
            "error": self.error,
            "files": list(self.files),
        }
        return json.dumps(record)

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """The outcome that `to_json` wrote."""
        record = json.loads(text)
        return cls(
            findings=tuple(Finding.from_json(finding) for finding in record["findings"]),
            steps=record["steps"],
            ending=record["ending"],
            said=tuple(record["said"]),
            error=record["error"],
            files=tuple(record["files"]),
        )
