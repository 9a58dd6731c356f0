"""What a rule gets and gives: the file with its facts, and findings at places in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import libcst as cst

from hasten.script.findings import KINDS, Finding, Related, Severity

if TYPE_CHECKING:
    from libcst.metadata import CodeRange

    from hasten.script.flow.facts import Facts, Loop, Seen

_CALLERS = 3  # calls on the way to a place that a finding names


@dataclass(eq=False)
class File:
    """One file, read and followed.

    Attributes:
        path: its name in findings.
        facts: what the flow saw in it.
        positions: where each node stands.
    """

    path: str
    module: cst.Module
    facts: Facts
    positions: Mapping[cst.CSTNode, CodeRange]
    texts: dict[cst.CSTNode, str] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)

    def attributes(self) -> set[str]:
        """Every attribute name that the file reads, calls or sets."""
        if "attributes" not in self.shared:
            self.shared["attributes"] = {
                node.attr.value for node in self.positions if isinstance(node, cst.Attribute)
            }
        return self.shared["attributes"]  # type: ignore[no-any-return]

    def line(self, node: cst.CSTNode) -> int:
        """The line that a node starts on; of a definition the line of its name."""
        return self._place(node).start.line

    def _place(self, node: cst.CSTNode) -> CodeRange:
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            node = node.name
        return self.positions[node]

    def text(self, node: cst.CSTNode) -> str:
        """The source of a node, on one line."""
        if node not in self.texts:
            self.texts[node] = " ".join(self.module.code_for_node(node).split())
        return self.texts[node]

    def short(self, node: cst.CSTNode, most: int = 48) -> str:
        """The source of a node, cut for a message."""
        text = self.text(node)
        return text if len(text) <= most else text[: most - 4] + " ..."

    def holds(self, outer: cst.CSTNode, inner: cst.CSTNode) -> bool:
        """Whether one node stands within another."""
        one, other = self.positions.get(outer), self.positions.get(inner)
        if one is None or other is None:
            return False
        start = (one.start.line, one.start.column) <= (other.start.line, other.start.column)
        return start and (other.end.line, other.end.column) <= (one.end.line, one.end.column)


class Rule:
    """One kind of fault: found in a file's facts, explained by its docstring.

    A subclass has `code`, and a docstring with the sections What it does, Why is this bad?,
    Bad, Good and Fix safety, from which its page is made.
    """

    code: ClassVar[str]

    def check(self, file: File) -> Iterable[Finding]:
        """The findings of this rule in a file."""
        raise NotImplementedError

    def finding(
        self,
        file: File,
        node: cst.CSTNode,
        message: str,
        fix: str,
        *,
        severity: Severity | None = None,
        related: Iterable[tuple[cst.CSTNode, str]] = (),
    ) -> Finding:
        """A finding at a node."""
        start = file._place(node).start
        kind = KINDS[self.code]
        places: dict[int, Related] = {}
        for place, note in related:
            line = file.line(place)
            if line != start.line:
                places.setdefault(line, Related(file.path, line, note))
        return Finding(
            code=self.code,
            name=kind.name,
            severity=severity or kind.severity,
            file=file.path,
            line=start.line,
            column=start.column + 1,
            message=message,
            fix=fix,
            related=tuple(places.values()),
        )


def called_from(file: File, seen: Seen, loop: Loop) -> list[tuple[cst.CSTNode, str]]:
    """The calls in a loop that lead to a place in a function, as related places."""
    inside = [i for i, call in enumerate(seen.calls) if file.holds(loop.node, call)]
    calls = seen.calls[inside[0] :][:_CALLERS] if inside else ()
    return [(call, "called from here") for call in calls]


def under_cuda_condition(file: File, seen: Seen) -> bool:
    """Whether a place is reached only where there is a GPU, or where one was asked for."""
    for around in seen.around:
        if around.kind == "guard":
            return True
        if around.kind == "if" and around.test is not None:
            text = file.text(around.test).lower()
            if any(word in text for word in ("cuda", "gpu", "device", "distributed", "nccl")):
                return True
        if around.kind == "try":
            return True
    return False


def first_of_each_line(findings: Iterable[Finding]) -> Iterator[Finding]:
    """One finding a line."""
    seen = set()
    for finding in findings:
        if finding.line not in seen:
            seen.add(finding.line)
            yield finding
