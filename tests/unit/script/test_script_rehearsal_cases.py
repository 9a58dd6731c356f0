"""Every script of tests/fixtures/cases: the stated fault at the stated line, and no false ones."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from hasten.script.findings import Finding, merge
from hasten.script.rehearsal import Outcome, Request, rehearse
from hasten.script.rules import check_file

CASES = Path(__file__).parents[2] / "fixtures" / "cases"
SCRIPTS = sorted(CASES.rglob("*.py"))
# Faults that only reading shows: the rehearsal has the device and one of it.
READ_ONLY = {"024_cuda_tensor_types.py"}
# Kinds that slow a script down or are silent: a warning is enough. All others are errors.
SILENT = {
    "graph-kept-in-accumulator",
    "hard-coded-cuda",
    "sync-every-step",
    "empty-cache-in-loop",
    "dataparallel-module-prefix",
    "load-without-map-location",
    "gradscaler-not-resumed",
    "workers-not-persistent",
    "slow-input-pipeline",
    "zero-grad-missing",
    "eval-missing",
    "model-moved-in-loop",
}


@dataclass(frozen=True)
class Case:
    path: Path
    kinds: frozenset[str]
    lines: frozenset[int]


def case_of(path: Path) -> Case:
    head = dict(
        line[2:].split(": ", 1) for line in path.read_text().splitlines()[:5] if ": " in line
    )
    return Case(
        path,
        frozenset(head["kind"].split(", ")),
        frozenset(int(number) for number in re.findall(r"\d+", head["line"])),
    )


@cache
def _rehearsed(paths: tuple[Path, ...]) -> dict[Path, Outcome]:
    """Scripts, two at a time: each is a process that imports torch."""
    with ThreadPoolExecutor(2) as pool:
        outcomes = pool.map(lambda path: rehearse(Request(script=str(path))), paths)
        return dict(zip(paths, outcomes, strict=True))


def rehearsed(path: Path) -> Outcome:
    """A script's rehearsal; a few neighbours are rehearsed with it, not all: a test has a limit."""
    index = SCRIPTS.index(path) // 4 * 4
    return _rehearsed(tuple(SCRIPTS[index : index + 4]))[path]


def lines_named(finding: Finding) -> set[int]:
    return {finding.line, *(place.line for place in finding.related)}


def proven(findings: list[Finding] | tuple[Finding, ...]) -> list[Finding]:
    return [finding for finding in findings if finding.severity != "suggestion"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_script_runs_to_its_end(path: Path) -> None:
    outcome = rehearsed(path)
    assert (outcome.ending, outcome.error) == ("finished", "")
    assert outcome.steps or "word_language_model" in path.name


FAULTY = [path for path in SCRIPTS if case_of(path).lines]


@pytest.mark.parametrize("path", FAULTY, ids=lambda path: path.stem)
def test_running_finds_the_fault_and_reports_no_other_error(path: Path) -> None:
    case, outcome = case_of(path), rehearsed(path)
    if path.name in READ_ONLY:
        assert not proven(outcome.findings)
        return
    found = proven(outcome.findings)
    assert case.lines & {finding.line for finding in found}, found
    assert all(finding.found_by == "rehearsal" for finding in found)
    if not case.kinds & SILENT:
        assert any(f.severity == "error" and f.line in case.lines for f in found)
    errors = [f for f in found if f.severity == "error" and not lines_named(f) & case.lines]
    assert errors == []


@pytest.mark.parametrize("path", FAULTY, ids=lambda path: path.stem)
def test_reading_and_running_together_name_the_fault_once(path: Path) -> None:
    case, outcome = case_of(path), rehearsed(path)
    static = check_file(outcome.files[0] if len(outcome.files) == 1 else path)
    joined = merge(static, outcome.findings)
    assert case.lines & {line for f in proven(joined) for line in lines_named(f)}
    stray = [f for f in joined if f.severity == "error" and not lines_named(f) & case.lines]
    assert stray == []


@pytest.mark.parametrize(
    "path", [path for path in SCRIPTS if not case_of(path).lines], ids=lambda path: path.stem
)
def test_a_clean_script_has_no_error_and_no_warning(path: Path) -> None:
    outcome = rehearsed(path)
    assert proven(outcome.findings) == []
    assert proven(merge(check_file(outcome.files[0]), outcome.findings)) == []


def test_each_place_is_said_once_with_a_count() -> None:
    outcome = rehearsed(CASES / "008_multitask_heads_dict.py")
    (finding,) = proven(outcome.findings)
    assert finding.count > 3
    assert finding.code == "HST106"


def test_a_mismatch_names_expression_operands_and_where_they_were_made() -> None:
    outcome = rehearsed(CASES / "004_position_ids.py")
    (finding,) = proven(outcome.findings)
    assert finding.line == 32
    assert "`self.pos(positions)` mixes devices" in finding.message
    assert "`positions` is on cpu, shape [12], made on the CPU at" in finding.message
    assert "`self.pos.weight` is on cuda:0, shape [32, 16]" in finding.message
    assert [(place.line, place.note) for place in finding.related] == [
        (33, "fails here: self.pos(positions)")
    ]


def test_a_saved_prefix_is_found_where_there_are_two_devices() -> None:
    script = str(CASES / "034_parallel_checkpoint.py")
    outcome = rehearse(Request(script=script, devices=2))
    found = {(finding.code, finding.line) for finding in proven(outcome.findings)}
    assert ("HST116", 34) in found
    assert ("HST117", 40) in found
    assert outcome.ending == "finished"
