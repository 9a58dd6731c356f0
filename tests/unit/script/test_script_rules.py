"""The rules on the handed cases, on fixtures of each kind, and on their own examples."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from hasten.errors import UsageError
from hasten.script.findings import KINDS, Finding
from hasten.script.rules import all_rules, check_file, check_source, explain

ROOT = Path(__file__).parents[3]
CASES = ROOT / "tests" / "fixtures" / "cases"
RULES = ROOT / "tests" / "fixtures" / "rules"
_MARK = re.compile(r"# (expect|also|suggest) (HST\d+)")


def _proven(findings: list[Finding]) -> list[Finding]:
    return [f for f in findings if f.severity != "suggestion"]


def _lines(path: Path) -> list[int]:
    head = path.read_text(encoding="utf-8").splitlines()[:5]
    said = next((line for line in head if line.startswith("# line")), "# line: none")
    return [int(n) for n in re.findall(r"\d+", said)]


@pytest.mark.parametrize("path", sorted(CASES.glob("0*.py")), ids=lambda p: p.stem)
def test_each_handed_case_is_found_where_it_says_and_nothing_else_is_an_error(path: Path) -> None:
    found = check_file(path)
    lines = {f.line for f in _proven(found)}
    assert set(_lines(path)) <= lines
    assert [f for f in found if f.severity == "error" and f.line not in _lines(path)] == []
    if "clean" in path.name:
        assert _proven(found) == []


@pytest.mark.parametrize(
    "path", sorted(RULES.glob("*/bad*.py")), ids=lambda p: f"{p.parent.name}-{p.stem}"
)
def test_bad_fixtures_are_found_at_their_marks_and_nowhere_else(path: Path) -> None:
    marks = [
        (number, match[1], match[2])
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := _MARK.search(line.replace("# warn", "# expect")))
    ]
    found = check_file(path)
    proven = {(f.line, f.code) for f in _proven(found)}
    assert marks
    assert {(n, code) for n, kind, code in marks if kind == "expect"} <= proven
    said = {(f.line, f.code) for f in found}
    suggested = {(n, code) for n, kind, code in marks if kind == "suggest"}
    assert suggested <= said
    assert not suggested & proven
    errors = {(f.line, f.code) for f in found if f.severity == "error"}
    assert errors <= {(n, code) for n, _, code in marks}


@pytest.mark.parametrize(
    "path", sorted(RULES.glob("*/good*.py")), ids=lambda p: f"{p.parent.name}-{p.stem}"
)
def test_good_fixtures_have_no_error_and_no_warning(path: Path) -> None:
    found = check_file(path)
    assert _proven(found) == []
    code = path.parent.name
    if code in KINDS and KINDS[code].severity == "suggestion":
        assert [f for f in found if f.code == code] == []


@pytest.mark.parametrize("path", sorted((CASES / "clean").glob("*.py")), ids=lambda p: p.stem)
def test_scripts_in_the_style_of_pytorchs_examples_have_no_error_and_no_warning(path: Path) -> None:
    assert _proven(check_file(path)) == []


@pytest.mark.parametrize("rule", all_rules(), ids=lambda r: r.code)
def test_each_rule_finds_its_bad_example_and_not_its_good_one(rule: object) -> None:
    text = inspect.cleandoc(type(rule).__doc__ or "")
    for section, wanted in (("Bad", True), ("Good", False)):
        example = re.search(rf"## {section}\n\n```python\n(.*?)```", text, re.S)
        assert example is not None
        found = check_source(example[1])
        assert any(f.code == rule.code for f in found) is wanted  # type: ignore[attr-defined]
        assert [f for f in found if f.severity == "error" and f.code != rule.code] == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("rule", all_rules(), ids=lambda r: r.code)
def test_each_rule_has_its_sections_a_kind_and_fixtures_or_examples(rule: object) -> None:
    text = inspect.cleandoc(type(rule).__doc__ or "")
    for section in ("What it does", "Why is this bad?", "Bad", "Good", "Fix safety"):
        assert f"## {section}\n" in text
    code: str = rule.code  # type: ignore[attr-defined]
    assert KINDS[code].name in explain(code)
    assert type(rule).__module__.endswith(code.lower() + "_" + KINDS[code].name.replace("-", "_"))


def test_the_pages_are_those_that_the_rules_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import rule_pages  # type: ignore[import-not-found]

    folder = ROOT / "docs" / "rules"
    there = {p.name: p.read_text(encoding="utf-8") for p in folder.glob("*.md")}
    assert there == rule_pages.pages()


def test_explain_knows_kinds_that_only_running_finds_and_names_what_there_is() -> None:
    assert "by running" in explain("HST142")
    assert "HST101" in explain("hst101")
    with pytest.raises(UsageError, match="HST101"):
        explain("HST999")
