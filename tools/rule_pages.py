"""Write docs/rules/: one page a rule from its docstring, and a list of all.

python tools/rule_pages.py          write them
python tools/rule_pages.py --check  exit with 1 if one is not as it would be written
"""

from __future__ import annotations

import sys
from pathlib import Path

from hasten.script.findings import KINDS
from hasten.script.rules import all_rules, page

FOLDER = Path(__file__).parent.parent / "docs" / "rules"


def pages() -> dict[str, str]:
    """File names and what belongs in them."""
    rules = {rule.code: rule for rule in all_rules()}
    found = {f"{code}.md": page(rule) for code, rule in rules.items()}
    rows = []
    for code, kind in sorted(KINDS.items()):
        name = f"[{code}]({code}.md)" if code in rules else code
        by = "reading" if code in rules or code == "HST100" else "running"
        rows.append(f"| {name} | {kind.name} | {kind.severity} | {by} | {kind.summary} |")
    found["README.md"] = "\n".join(
        [
            "# Rules",
            "",
            "What `hasten check` looks for. The severity is that of a proven case: where the"
            " proof is",
            "incomplete a rule says less, and a suggestion never fails a check. `hasten"
            " check --explain",
            "HST101` prints a page. Rules marked *reading* need no run; running finds many"
            " of their",
            "faults too, and the rest only running can see.",
            "",
            "| code | name | severity | found by | what |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
            "Switch a rule off on one line with `# hasten: ignore[HST101]` (`# hasten:"
            " ignore` for all",
            "rules), or in pyproject.toml:",
            "",
            "```toml",
            "[tool.hasten]",
            'select = ["HST1"]',
            'ignore = ["HST124"]',
            "",
            "[tool.hasten.per-file-ignores]",
            '"examples/*" = ["HST101", "HST102"]',
            "```",
            "",
        ]
    )
    return found


def main(arguments: list[str]) -> int:
    """Write the pages, or compare them; returns the exit status."""
    wanted = pages()
    there = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    if "--check" in arguments:
        odd = sorted(n for n in wanted.keys() | there.keys() if wanted.get(n) != there.get(n))
        for name in odd:
            print(f"docs/rules/{name} is not what its rule says; run tools/rule_pages.py")
        return int(bool(odd))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in there.keys() - wanted.keys():
        (FOLDER / name).unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
