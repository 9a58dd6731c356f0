"""`hasten check` on the command line: what it prints, and its exit statuses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import warm
from hasten.cli.app import _run
from hasten.cli.check import split
from hasten.script.rehearsal import launch

CASES = Path(__file__).parents[2] / "fixtures" / "cases"
FAULTY = CASES / "004_position_ids.py"
CLEAN = CASES / "042_clean_functions_and_resume.py"


Done = subprocess.CompletedProcess[str]
Check = Callable[..., Done]


def check_apart(*arguments: object) -> Done:
    """The command in a process of its own, and the script in another, as people have them."""
    return subprocess.run(
        [sys.executable, "-m", "hasten", "check", *map(str, arguments)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )


@pytest.fixture
def check(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Check:
    """The command in this process, and the script in a fork of one that has torch imported."""
    monkeypatch.setattr(launch, "subprocess", warm.subprocesses())

    def checked(*arguments: object, folder: Path | None = None) -> Done:
        with contextlib.chdir(folder or "."):
            status = _run(["check", *map(str, arguments)])
        said, told = capfd.readouterr()
        return Done(arguments, status, said, told)

    return checked


def as_json(done: Done) -> dict[str, Any]:
    content = json.loads(done.stdout)  # nothing else is on standard output
    assert isinstance(content, dict)
    return content


def test_a_fault_is_one_finding_of_reading_and_running() -> None:
    done = check_apart("--json", FAULTY)
    content = as_json(done)
    assert (done.returncode, content["exit"]) == (1, 1)
    assert (content["script"], content["devices"]) == (str(FAULTY), 1)
    (finding,) = [f for f in content["findings"] if f["severity"] != "suggestion"]
    assert (finding["code"], finding["line"], finding["found_by"]) == ("HST104", 32, "both")
    assert finding.keys() >= {"name", "file", "column", "message", "fix", "count"}
    # Two epochs of three steps; of all four where the machine is quick (`%` stands in the script).
    assert finding["count"] == content["steps"] in (6, 8)
    assert "epoch 0 loss" in done.stderr  # the script's own output


def test_a_clean_script_exits_with_0_and_shows_its_own_output() -> None:
    done = check_apart(CLEAN)
    assert done.returncode == 0
    assert "resumed" in done.stdout
    assert "9 optimizer steps rehearsed" in done.stdout


def test_the_text_shows_the_line_and_the_fix(check: Check) -> None:
    done = check(FAULTY)
    assert done.returncode == 1
    assert "32 |         positions = torch.arange(length)" in done.stdout
    assert "fails here: self.pos(positions)" in done.stdout or "33 | " in done.stdout
    assert "fix: " in done.stdout


def test_github_and_sarif(check: Check) -> None:
    lines = check("--format", "github", FAULTY).stdout.splitlines()
    assert any(line.startswith("::error ") and "line=32" in line for line in lines)
    log = json.loads(check("--format", "sarif", FAULTY).stdout)
    assert log["version"] == "2.1.0"
    assert "HST104" in {result["ruleId"] for result in log["runs"][0]["results"]}


def test_static_reads_folders_and_runs_nothing(check: Check, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("raise SystemExit(5)\n")
    (tmp_path / "b.py").write_text(FAULTY.read_text())
    done = check("--static", "--json", tmp_path)
    content = as_json(done)
    assert (done.returncode, content["steps"]) == (1, 0)
    assert {finding["found_by"] for finding in content["findings"]} == {"static"}
    assert check("--static", tmp_path / "a.py").returncode == 0


def test_a_failure_of_the_scripts_own_exits_with_2(check: Check, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import no_such_module_here\n")
    done = check("train.py", folder=tmp_path)
    assert done.returncode == 2
    assert "ModuleNotFoundError: No module named 'no_such_module_here'" in done.stdout
    assert "the script's own, not a device fault" in done.stdout
    assert "nothing found (0 optimizer steps rehearsed, stopped early)" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name the script"),
        (("missing.py",), "there is no file missing.py"),
        (("--steps", "0", str(CLEAN)), "--steps 0"),
        (("--devices", "0", str(CLEAN)), "--devices 0"),
        (("--timeout-s", "-1", str(CLEAN)), "--timeout-s -1"),
        (("--format", "xml", str(CLEAN)), "--format xml"),
        (("--static", "missing.py"), "missing.py"),
        (("--explain", "HST999"), "HST999"),
        (("-m", "no_such_package.train"), "no_such_package"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_why(
    check: Check, arguments: tuple[str, ...], said: str
) -> None:
    done = check(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_explain_tells_of_a_code(check: Check) -> None:
    done = check("--explain", "hst104")
    assert done.returncode == 0
    assert "HST104" in done.stdout
    assert check("--explain", "HST142").returncode == 0  # seen by running alone


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["train.py"], ["--", "train.py"]),
        (["--json", "train.py", "--lr", "1"], ["--json", "--", "train.py", "--lr", "1"]),
        (["train.py", "--json", "--lr", "1"], ["--json", "--", "train.py", "--lr", "1"]),
        (["train.py", "--steps", "9"], ["--steps", "9", "--", "train.py"]),
        (["own.py", "--steps", "9"], ["--", "own.py", "--steps", "9"]),
        (["train.py", "--", "--json"], ["--", "train.py", "--json"]),
        (["-m", "package.train", "--lr", "1"], ["-m", "package.train", "--", "--lr", "1"]),
        (["--static", "a.py", "b", "--json"], ["--static", "--json", "--", "a.py", "b"]),
        (["--explain", "HST101"], ["--explain", "HST101"]),
        ([], []),
    ],
)
def test_the_scripts_own_options_are_left_to_it(
    given: list[str], meant: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "own.py").write_text("parser.add_argument('--steps')\n")
    monkeypatch.chdir(tmp_path)
    assert split(given) == meant


def test_a_comment_silences_a_finding_of_both(check: Check, tmp_path: Path) -> None:
    lines = FAULTY.read_text().splitlines()
    lines[31] += "  # hasten: ignore[HST104]"
    (tmp_path / "train.py").write_text("\n".join(lines) + "\n")
    done = check("--json", "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_check_leaves_no_process_and_no_folder(
    tmp_path: Path, signal_number: signal.Signals
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(900)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "hasten", "check", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        # As in a terminal: what runs tests in the background has them ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.send_signal(signal_number)
    process.communicate()
    assert process.returncode == (130 if signal_number == signal.SIGINT else -signal_number)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (runs(child) or list(tmp_path.glob("hasten-check-*"))):
        time.sleep(0.05)
    assert not runs(child)
    assert list(tmp_path.glob("hasten-check-*")) == []


def runs(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:1]
    except FileNotFoundError:
        return False


def test_a_notebook_is_not_run(check: Check, tmp_path: Path) -> None:
    (tmp_path / "lesson.ipynb").write_text('{"cells": []}')
    done = check("lesson.ipynb", folder=tmp_path)
    assert done.returncode == 2
    assert "lesson.ipynb is a notebook" in done.stderr and "--static" in done.stderr


def test_settings_that_are_wrong_are_said_before_the_script_runs(
    check: Check, tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.hasten\n")
    (tmp_path / "script.py").write_text("print('it ran')\n")
    for arguments in (("script.py",), ("-m", "script")):
        done = check(*arguments, folder=tmp_path)
        assert done.returncode == 2
        assert "pyproject.toml cannot be read" in done.stderr and "it ran" not in done.stdout


def test_a_script_that_crashes_the_process_is_read_all_the_same(
    check: Check, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text("import os, torch\nx = torch.ones(2).cuda()\nos.abort()\n")
    done = check("--json", "script.py", folder=tmp_path)
    content = as_json(done)
    assert (done.returncode, content["exit"], content["ending"]) == (2, 2, "died")
    assert "SIGABRT" in content["error"]
    assert [finding["code"] for finding in content["findings"]] == ["HST101"]


def test_a_limit_of_the_simulation_is_not_called_the_scripts_own_fault(
    check: Check, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text("import torch\ntorch.cuda.CUDAGraph()\n")
    done = check("script.py", folder=tmp_path)
    assert done.returncode == 2 and "has no CUDA graphs" in done.stdout
    assert "limit of the simulated accelerator" in done.stdout
    assert "script's own" not in done.stdout


@pytest.mark.parametrize(
    ("source", "own"),
    [
        ("logging.basicConfig(format='%(message)s')", ["--format", "json"]),
        ("import json, os\nsteps = 0", ["--format", "json"]),
        ("parser.add_argument('--format')", []),
        ("import fire\ndef main(format='x'): ...\nfire.Fire(main)", []),
    ],
)
def test_a_name_in_the_script_is_not_an_option_of_it(
    tmp_path: Path, source: str, own: list[str]
) -> None:
    from hasten.cli.check import split

    script = tmp_path / "script.py"
    script.write_text(source)
    words = split([str(script), "--format", "json"])
    assert words[: words.index("--")] == own
