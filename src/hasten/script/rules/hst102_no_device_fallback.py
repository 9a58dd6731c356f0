"""HST102: a device that is CUDA whatever the machine has."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from hasten.script.findings import Finding
from hasten.script.flow.values import Const
from hasten.script.rules.file import File, Rule, first_of_each_line, under_cuda_condition
from hasten.script.rules.hst101_hard_coded_cuda import for_many_gpus


class NoDeviceFallback(Rule):
    """The device is CUDA, with nothing else to fall back to.

    ## What it does

    Finds `torch.device("cuda")`, `device = "cuda:0"` and a setting `"device": "cuda"` that stand
    under no condition. A default of a command line option is not reported: its user can change it.

    ## Why is this bad?

    On a machine without CUDA the first use of the device fails.

    ## Bad

    ```python
    import torch

    device = torch.device("cuda:0")
    model = torch.nn.Linear(4, 2).to(device)
    ```

    ## Good

    ```python
    import torch

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(4, 2).to(device)
    ```

    ## Fix safety

    Safe: on a machine with CUDA the same device is chosen.
    """

    code = "HST102"

    def check(self, file: File) -> Iterator[Finding]:
        """Devices that are CUDA by a literal."""
        return first_of_each_line(sorted(self._all(file), key=lambda f: f.line))

    def _all(self, file: File) -> Iterator[Finding]:
        severity = "suggestion" if for_many_gpus(file) else "warning"
        nodes: list[cst.CSTNode] = []
        for seen in file.facts.all("call", "torch.device"):
            if seen.args and _is_cuda(seen.args[0]) and not under_cuda_condition(file, seen):
                nodes.append(seen.node)
        for kind in ("bind", "store"):
            for seen in file.facts.all(kind):
                node = seen.node
                literal = isinstance(node, (cst.Assign, cst.AnnAssign)) and isinstance(
                    node.value, (cst.SimpleString, cst.FormattedString)
                )
                if (
                    literal
                    and seen.args
                    and _is_cuda(seen.args[0])
                    and not under_cuda_condition(file, seen)
                ):
                    assert isinstance(node, (cst.Assign, cst.AnnAssign)) and node.value is not None
                    nodes.append(node.value)
        for node in nodes:
            yield self.finding(
                file, node,
                f"`{file.short(node)}` is the device on every machine; without CUDA"
                " its first use fails.",
                'fall back: torch.device("cuda" if torch.cuda.is_available() else "cpu")',
                severity=severity,  # type: ignore[arg-type]
            )  # fmt: skip


def _is_cuda(value: object) -> bool:
    if not isinstance(value, Const) or not isinstance(value.value, str):
        return False
    return value.value == "cuda" or value.value.startswith("cuda:")
