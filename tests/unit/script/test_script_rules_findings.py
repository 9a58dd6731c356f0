"""Findings: joining what rules and rehearsal saw, and the four ways to write them."""

from __future__ import annotations

import json

import pytest

from hasten.script import output
from hasten.script.findings import Finding, Related, fails, in_order, merge


def _finding(code: str = "HST104", line: int = 5, **more: object) -> Finding:
    return Finding(code=code, file="a.py", line=line, message=f"{code} at {line}", **more)  # type: ignore[arg-type]


def test_one_code_at_one_line_is_one_finding_with_both_messages_and_the_count() -> None:
    seen = Finding(
        code="HST104", file="a.py", line=5, message="seen", found_by="rehearsal", count=3
    )
    (joined,) = merge([_finding()], [seen])
    assert (joined.found_by, joined.count, joined.line) == ("both", 3, 5)
    assert joined.message == "HST104 at 5\nseen"


def test_a_mismatch_that_a_rule_names_as_related_is_the_same_fault() -> None:
    static = _finding("HST104", 5, related=(Related("a.py", 9, "here"),))
    seen = _finding("HST115", 9, found_by="rehearsal", related=(Related("a.py", 5, "made here"),))
    (joined,) = merge([static], [seen])
    assert (joined.code, joined.line, joined.found_by) == ("HST104", 5, "both")
    assert (9, "HST115 at 9") in [(place.line, place.note) for place in joined.related]


def test_two_mismatches_that_surface_at_one_line_are_one_unless_each_has_its_partner() -> None:
    def at(line: int, by: str = "static", code: str = "HST105") -> Finding:
        return _finding(code, line, found_by=by, related=(Related("a.py", 20, "meets"),))

    (joined,) = merge([at(11)], [at(9, "rehearsal")])
    assert (joined.line, joined.found_by) == (11, "both")
    both = merge([at(8), at(9)], [at(8, "rehearsal"), at(9, "rehearsal")])
    assert [(f.line, f.found_by) for f in both] == [(8, "both"), (9, "both")]
    apart = merge([at(8)], [at(8, "rehearsal"), at(9, "rehearsal")])
    assert [(f.line, f.found_by) for f in apart] == [(8, "both"), (9, "rehearsal")]


def test_other_kinds_and_other_lines_stay_apart_and_in_order() -> None:
    static = [_finding("HST120", 9), _finding("HST104", 5)]
    seen = [
        _finding("HST122", 9, found_by="rehearsal"),
        _finding("HST104", 7, found_by="rehearsal"),
    ]
    assert [(f.line, f.code) for f in merge(static, seen)] == [
        (5, "HST104"), (7, "HST104"), (9, "HST120"), (9, "HST122"),
    ]  # fmt: skip


def test_the_worse_severity_is_kept_and_suggestions_never_fail() -> None:
    (joined,) = merge(
        [_finding("HST120", severity="suggestion")], [_finding("HST120", severity="warning")]
    )
    assert joined.severity == "warning"
    assert not fails([_finding(severity="suggestion")])
    assert fails([joined])


def test_findings_go_to_json_and_back() -> None:
    finding = _finding(related=(Related("b.py", 1, "there"),), fix="so")
    assert Finding.from_json(json.loads(json.dumps(finding.to_json()))) == finding
    with pytest.raises(ValueError, match="severity"):
        _finding(severity="fatal")


def test_text_shows_the_code_with_a_mark_and_the_related_lines() -> None:
    lines = ["import torch", "x = torch.zeros(3)", "", "", "y = x + z"]
    finding = Finding(
        code="HST104", file="a.py", line=2, column=5, message="made on the CPU",
        fix="device=z.device",
        related=(Related("a.py", 5, "meets z"), Related("gone.py", 3, "elsewhere")),
    )  # fmt: skip
    shown = output.text([finding], lines_of=lambda name: lines if name == "a.py" else [])
    assert shown == (
        "a.py:2:5: error HST104 tensor-made-on-cpu (read)\n"
        "  made on the CPU\n"
        "  2 | x = torch.zeros(3)\n"
        "    |     ^\n"
        "  5 | y = x + z\n"
        "    | = meets z\n"
        "  gone.py:3: elsewhere\n"
        "  fix: device=z.device\n"
    )
    assert "\x1b[31merror\x1b[0m" in output.text([finding], lines_of=lambda _: [], colour=True)
    assert output.text([]) == ""
    assert output.counted([finding, finding, _finding(severity="warning")]) == "2 errors, 1 warning"
    assert output.counted([]) == "nothing found"


def test_json_is_one_object_with_what_the_design_names() -> None:
    made = json.loads(output.as_json([_finding()], script="a.py", steps=3, devices=2))
    assert {"hasten", "schema", "script", "findings", "steps", "devices", "exit"} <= made.keys()
    assert (made["exit"], made["steps"], made["devices"]) == (1, 3, 2)
    keys = {
        "code",
        "name",
        "severity",
        "file",
        "line",
        "column",
        "message",
        "fix",
        "found_by",
        "count",
    }
    assert keys <= made["findings"][0].keys()
    assert json.loads(output.as_json([], script="a.py"))["exit"] == 0


def test_github_escapes_what_would_end_a_command() -> None:
    finding = Finding(
        code="HST101", file="a,b:c.py", line=2, message="100%\nsecond", severity="suggestion"
    )
    assert output.github([finding]) == (
        "::notice file=a%2Cb%3Ac.py,line=2,col=1,title=HST101 hard-coded-cuda::100%25%0Asecond\n"
    )


def test_sarif_has_rules_results_and_related_places() -> None:
    log = json.loads(output.sarif([_finding(related=(Related("b c.py", 7, "there"),))]))
    (run,) = log["runs"]
    assert log["version"] == "2.1.0"
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["HST104"]
    (result,) = run["results"]
    assert (result["ruleId"], result["level"], result["ruleIndex"]) == ("HST104", "error", 0)
    assert result["locations"][0]["physicalLocation"]["region"] == {
        "startLine": 5,
        "startColumn": 1,
    }
    related = result["relatedLocations"][0]
    assert related["physicalLocation"]["artifactLocation"]["uri"] == "b%20c.py"
    assert json.loads(output.sarif([]))["runs"][0]["results"] == []


def test_in_order_puts_the_worst_first_at_one_place() -> None:
    found = in_order([_finding("HST101", severity="suggestion"), _finding("HST104")])
    assert [f.severity for f in found] == ["error", "suggestion"]


def test_what_a_rule_only_suggests_gives_way_to_what_a_run_proves_elsewhere() -> None:
    static = _finding("HST107", 5, severity="suggestion", related=(Related("a.py", 9, "moved"),))
    seen = _finding("HST141", 9, found_by="rehearsal")
    (joined,) = merge([static], [seen])
    assert (joined.code, joined.line, joined.severity) == ("HST141", 9, "error")
    assert "HST141 at 9" in joined.message
    assert 5 in [place.line for place in joined.related]


def test_a_joined_mismatch_gives_its_reason_once() -> None:
    seen = Finding(
        code="HST104", file="a.py", line=5, message="why\n`a + b` mixes", found_by="rehearsal"
    )
    (joined,) = merge([_finding()], [seen])
    assert joined.message == "HST104 at 5\n`a + b` mixes"
