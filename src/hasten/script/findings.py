"""Findings: what a rule or a rehearsal says of one place in a script, and the table of kinds.

Rules (which read) and rehearsal (which runs) speak of the same faults by the same codes, so that
`merge` can join what both saw. A finding is a plain record; `hasten.script.output` renders it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Severity = Literal["error", "warning", "suggestion"]
FoundBy = Literal["static", "rehearsal", "both"]
_RANK: dict[str, int] = {"error": 0, "warning": 1, "suggestion": 2}


class Related(NamedTuple):
    """Another place that belongs to the fault, as where the error surfaces."""

    file: str
    line: int
    note: str


class Kind(NamedTuple):
    """One kind of fault: its name, the severity it has when proven, and one line on it."""

    name: str
    severity: Severity
    summary: str


# The one table that rules and rehearsal share. Those that only a run can see have no rule file.
KINDS: Mapping[str, Kind] = {
    "HST100": Kind("unreadable-file", "error", "the file cannot be read as Python"),
    "HST101": Kind("hard-coded-cuda", "warning", "asks for CUDA by name and fails without it"),
    "HST102": Kind("no-device-fallback", "warning", "the device is CUDA, with no other choice"),
    "HST103": Kind("to-result-dropped", "error", "the moved tensor is thrown away"),
    "HST104": Kind("tensor-made-on-cpu", "error", "a tensor is made without the device it meets"),
    "HST105": Kind("tensor-attribute-not-buffer", "error", "a module's tensor stays on the CPU"),
    "HST106": Kind("modules-in-plain-container", "error", "modules that their owner cannot see"),
    "HST107": Kind("parameters-used-before-move", "error", "parameters were copied, then moved"),
    "HST108": Kind("loss-weight-on-cpu", "error", "the loss has weights on another device"),
    "HST109": Kind("batch-not-moved", "error", "part of a batch stays on the CPU"),
    "HST110": Kind("index-on-other-device", "error", "a CPU tensor is indexed from the device"),
    "HST111": Kind("module-not-moved", "error", "a module is used on the device but lives on CPU"),
    "HST112": Kind("numpy-on-device-tensor", "error", "a device tensor is handed to NumPy"),
    "HST113": Kind("packed-lengths-on-device", "error", "packing needs its lengths on the CPU"),
    "HST114": Kind("device-work-in-dataset", "error", "a data set touches the device"),
    "HST115": Kind("device-mismatch", "error", "an operation mixes devices"),
    "HST116": Kind("parallel-module-prefix", "warning", "weights saved with `module.` names"),
    "HST117": Kind("load-without-map-location", "warning", "a checkpoint tied to its device"),
    "HST118": Kind("load-without-weights-only", "suggestion", "loading may run code in the file"),
    "HST119": Kind("moved-by-parts", "error", "a class's own `to` leaves a field behind"),
    "HST120": Kind("sync-in-step", "warning", "the step waits for the device"),
    "HST121": Kind("empty-cache-in-loop", "warning", "memory is given back at each step"),
    "HST122": Kind("graph-kept", "warning", "what is kept holds the graph of its step"),
    "HST123": Kind("loader-without-workers", "warning", "samples are made while the GPU waits"),
    "HST124": Kind("loader-not-pinned", "suggestion", "batches are copied from pageable memory"),
    "HST125": Kind("workers-not-persistent", "warning", "workers start anew at each epoch"),
    "HST126": Kind("non-blocking-unpinned", "suggestion", "non_blocking does nothing here"),
    "HST127": Kind("non-blocking-to-host", "warning", "read on the host before it has arrived"),
    "HST128": Kind("timing-without-sync", "warning", "the time of launching, not of the work"),
    "HST129": Kind("data-parallel", "suggestion", "DistributedDataParallel is faster"),
    "HST130": Kind("set-epoch-missing", "warning", "each epoch has the order of the first"),
    "HST131": Kind("eval-missing", "warning", "evaluation with dropout or batch statistics on"),
    "HST132": Kind("no-grad-missing", "suggestion", "evaluation builds graphs nobody uses"),
    "HST133": Kind("deprecated-cuda-amp", "warning", "torch.cuda.amp is deprecated"),
    "HST134": Kind("clip-before-unscale", "error", "scaled gradients are clipped"),
    "HST135": Kind("scaler-not-saved", "warning", "a resume starts with another loss scale"),
    "HST136": Kind("zero-grad-missing", "warning", "gradients of all steps pile up"),
    "HST137": Kind("made-on-cpu-then-moved", "suggestion", "made on the CPU and moved each step"),
    "HST138": Kind("model-moved-in-loop", "warning", "the model is moved at each step"),
    "HST139": Kind("same-data-copied", "suggestion", "the same data is copied at each step"),
    "HST140": Kind("optimizer-without-model", "error", "the optimizer's parameters are no more"),
    "HST141": Kind("state-on-other-device", "error", "optimizer state and parameters are apart"),
    "HST142": Kind("devices-idle", "warning", "some of the devices get no work"),
    "HST143": Kind("parameters-left-on-cpu", "error", "parameters stay on the CPU in training"),
    "HST144": Kind("tied-checkpoint", "warning", "a checkpoint loads only with this device"),
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault at one place.

    Attributes:
        code: ``HST101`` and so on, a key of `KINDS`; `name` is the kind's name.
        severity: ``error`` and ``warning`` fail a check, ``suggestion`` never does.
        file: as given by the caller; ``notebook.ipynb[3]`` for the third cell of a notebook.
        line: where the fix goes, from 1; `column` from 1.
        message: what is wrong and why that is proven.
        fix: what to write instead.
        found_by: ``static``, ``rehearsal`` or ``both``.
        count: how often it was seen (running), 1 for static.
        related: other lines of the same fault, as where the error surfaces.
    """

    code: str
    name: str = ""
    severity: Severity = "error"
    file: str
    line: int
    column: int = 1
    message: str
    fix: str = ""
    found_by: FoundBy = "static"
    count: int = 1
    related: tuple[Related, ...] = ()

    def __post_init__(self) -> None:
        if self.severity not in _RANK:
            raise ValueError(f"severity is error, warning or suggestion, not {self.severity!r}")
        object.__setattr__(self, "related", tuple(Related(*place) for place in self.related))
        if not self.name and self.code in KINDS:
            object.__setattr__(self, "name", KINDS[self.code].name)

    def to_json(self) -> dict[str, Any]:
        """The record as JSON has it; `from_json` takes it back."""
        record = dataclasses.asdict(self)
        record["related"] = [place._asdict() for place in self.related]
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Finding:
        """A finding from `to_json`'s record; fields it does not know are left out."""
        known = {field.name for field in dataclasses.fields(cls)}
        values = {key: value for key, value in record.items() if key in known}
        values["related"] = tuple(
            Related(place["file"], place["line"], place["note"])
            if isinstance(place, Mapping)
            else Related(*place)
            for place in record.get("related", ())
        )
        return cls(**values)


def fails(findings: Iterable[Finding]) -> bool:
    """Whether a check with these findings fails: any error or warning among them."""
    return any(finding.severity != "suggestion" for finding in findings)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """By file and line; at one place the worst first."""
    return sorted(
        findings, key=lambda f: (f.file, f.line, f.column, _RANK[f.severity], f.code, f.message)
    )


# Codes that speak of tensors of one operation on several devices: a run sees the operation, the
# rules see the reason, so that the codes may differ while the fault is one.
_MISMATCHES = frozenset(
    f"HST{number}" for number in (103, 104, 105, 106, 107, 108, 109, 110, 111, 115, 119, 141, 143)
)


# Advice on how to copy, and the faults that say of the copy at their line that it does not serve.
_ON_COPIES = frozenset(["HST124", "HST126", "HST137", "HST139"])
_WRONG_COPIES = frozenset(["HST103", "HST114"])


def _exactly(one: Finding, other: Finding) -> bool:
    return one.code == other.code and _place(one) == _place(other)


def _alike(one: Finding, other: Finding) -> bool:
    return one.code == other.code or {one.code, other.code} <= _MISMATCHES


def _same(one: Finding, other: Finding) -> bool:
    return _alike(one, other) and (
        _place(one) == _place(other)
        or _place(one) in _others(other)
        or _place(other) in _others(one)
    )


def _surface(one: Finding, other: Finding) -> bool:
    """Whether two mismatches name a line in common where they surface."""
    mismatches = {one.code, other.code} <= _MISMATCHES
    return mismatches and bool(_others(one) & _others(other))


def _place(finding: Finding) -> tuple[str, int]:
    return finding.file, finding.line


def _others(finding: Finding) -> set[tuple[str, int]]:
    return {(place.file, place.line) for place in finding.related}


def _joined(static: Finding, rehearsed: Finding) -> Finding:
    """One finding of two: the place and reason of the rule, the count and evidence of the run.

    Where the rule only suggests and the run proves, the run's place and reason stand.
    """
    if static.severity == "suggestion" != rehearsed.severity and _place(static) != _place(
        rehearsed
    ):
        static, rehearsed = rehearsed, static
    places: dict[tuple[str, int], Related] = {}
    for place in (*static.related, *rehearsed.related):
        places.setdefault((place.file, place.line), place)
    if _place(rehearsed) != _place(static):
        note = rehearsed.message.splitlines()[0]
        places[_place(rehearsed)] = Related(rehearsed.file, rehearsed.line, note)
    places.pop(_place(static), None)
    severity = min(static.severity, rehearsed.severity, key=_RANK.__getitem__)
    message = static.message
    # Of a mismatch the run says why, then what it saw; the rule has said why.
    evidence = rehearsed.message.split("\n", 1)[-1]
    if _place(rehearsed) == _place(static) and evidence not in message:
        message = f"{message}\n{evidence}"
    return dataclasses.replace(
        static,
        severity=severity,
        message=message,
        fix=static.fix or rehearsed.fix,
        found_by="both",
        count=max(static.count, rehearsed.count),
        related=tuple(places.values()),
    )


def merge(static: Sequence[Finding], rehearsed: Sequence[Finding]) -> list[Finding]:
    """Join what rules and rehearsal found: one finding a fault, in order of file and line.

    Two findings are one fault when their code and line agree, or when one names the other's line
    as related and both speak of the same kind (any two device mismatches are the same kind).
    """
    result = list(static)
    left = []
    for seen in rehearsed:
        exact = [i for i, f in enumerate(result) if _exactly(f, seen)]
        if exact:
            result[exact[0]] = _joined(result[exact[0]], seen)
        else:
            left.append(seen)
    for seen in left:
        close = [i for i, f in enumerate(result) if _same(f, seen)]
        # Two mismatches that surface at one line are one, unless each has its own partner.
        close = close or [
            i for i, f in enumerate(result) if f.found_by == "static" and _surface(f, seen)
        ]
        if close:
            result[close[0]] = _joined(result[close[0]], seen)
        else:
            result.append(seen)
    wrong = {_place(finding) for finding in result if finding.code in _WRONG_COPIES}
    return joined_by_loader(f for f in result if not _of_a_wrong_copy(f, wrong))


def _of_a_wrong_copy(finding: Finding, wrong: set[tuple[str, int]]) -> bool:
    """Whether a finding advises on a copy that should not be made at all."""
    return finding.code in _ON_COPIES and _place(finding) in wrong


def joined_by_loader(findings: Iterable[Finding]) -> list[Finding]:
    """Join to each loader that does not pin the copies that do not block for nothing.

    Both are mended by ``pin_memory=True`` at the loader, which HST126 names as related.
    """
    loaders: dict[tuple[str, int], Finding] = {}
    others = []
    copies = []
    for finding in findings:
        if finding.code == "HST124":
            loaders[_place(finding)] = finding
        elif finding.code == "HST126":
            copies.append(finding)
        else:
            others.append(finding)
    for copy in copies:
        owner = next((place for place in _others(copy) if place in loaders), None)
        if owner is None:
            others.append(copy)
            continue
        loader = loaders[owner]
        note = Related(copy.file, copy.line, "non_blocking=True has no effect here until then")
        loaders[owner] = dataclasses.replace(
            loader,
            found_by=loader.found_by if loader.found_by == copy.found_by else "both",
            count=max(loader.count, copy.count),
            related=(*(p for p in loader.related if _place(copy) != (p.file, p.line)), note),
        )
    return in_order([*others, *loaders.values()])
