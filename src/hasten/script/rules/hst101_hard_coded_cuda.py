"""HST101: calls that ask for CUDA by name."""

# Long lists of names read better as text.
# ruff: noqa: SIM905

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from hasten.script.findings import Finding
from hasten.script.flow.facts import Seen
from hasten.script.flow.values import Const, Module, ParameterOf, Tensor, Unknown
from hasten.script.rules.file import File, Rule, first_of_each_line, under_cuda_condition

# Of torch.cuda, what fails (rather than does nothing) on a machine without CUDA.
_NEEDS_CUDA = frozenset(
    "set_device synchronize current_device get_device_name get_device_properties"
    " get_device_capability Stream Event current_stream default_stream stream mem_get_info"
    " FloatTensor DoubleTensor HalfTensor BFloat16Tensor LongTensor IntTensor ShortTensor"
    " ByteTensor CharTensor BoolTensor".split()
)


class HardCodedCuda(Rule):
    """Asks for CUDA by name, where the device could be chosen at run time.

    ## What it does

    Finds `.cuda()`, `.to("cuda")`, `device="cuda:0"`, `torch.cuda.FloatTensor`,
    `torch.cuda.set_device` and `torch.cuda.synchronize` that no condition protects. Code under
    `if torch.cuda.is_available():`, or after a check that leaves without a GPU, is not reported.
    In scripts that are written for several NVIDIA GPUs (NCCL) it is a suggestion.

    ## Why is this bad?

    On a machine without CUDA (a laptop, continuous integration, an AMD, Intel or Apple GPU under
    its own name) the script fails at this line.

    ## Bad

    ```python
    import torch

    model = torch.nn.Linear(4, 2).cuda()
    ```

    ## Good

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(4, 2).to(device)
    ```

    ## Fix safety

    Safe: on a machine with CUDA the same device is chosen.
    """

    code = "HST101"

    def check(self, file: File) -> Iterator[Finding]:
        """Calls with CUDA in them."""
        return first_of_each_line(sorted(self._all(file), key=lambda f: (f.line, f.column)))

    def _all(self, file: File) -> Iterator[Finding]:
        severity = "suggestion" if for_many_gpus(file) else "warning"
        for seen in file.facts.of("method", "call"):
            if under_cuda_condition(file, seen) or any(f.name == "cuda" for f in seen.inside):
                continue
            what, fix = _named(file, seen)
            if what:
                yield self.finding(
                    file, seen.node, f"{what} needs CUDA; without it the script fails here.", fix,
                    severity=severity,  # type: ignore[arg-type]
                )  # fmt: skip


def for_many_gpus(file: File) -> bool:
    """Whether the script is written for several NVIDIA GPUs (NCCL)."""
    for seen in file.facts.all("call"):
        if seen.name.endswith("init_process_group"):
            return True
    return any(path.startswith("deepspeed") for path in file.facts.imports)


def _named(file: File, seen: Seen) -> tuple[str, str]:
    node = seen.node
    choose = (
        'choose the device once, torch.device("cuda" if torch.cuda.is_available() else "cpu"), and '
    )
    if seen.kind == "method" and seen.name == "cuda":
        if isinstance(seen.receiver, (Tensor, Module, Unknown, ParameterOf)):
            return f"`{file.short(node)}`", choose + "write .to(device)"
        return "", ""
    if seen.kind == "call" and seen.name.startswith("torch.cuda."):
        last = seen.name.rsplit(".", 1)[-1]
        if last.endswith("Tensor") and last in _NEEDS_CUDA:
            if not isinstance(node, cst.Call) or "cuda" not in file.text(node.func):
                return "", ""  # a name that was given its type where CUDA was asked for
            return f"`{file.short(node)}`", choose + "make the tensor with device=device"
        if last in _NEEDS_CUDA:
            return (
                f"`{file.short(node)}`",
                "do this only if torch.cuda.is_available(), or use torch.accelerator",
            )
        return "", ""
    if (
        not isinstance(node, cst.Call)
        or seen.name == "torch.device"
        or seen.name.endswith("autocast")
    ):
        return "", ""
    for arg in node.args:
        literal = isinstance(arg.value, (cst.SimpleString, cst.FormattedString))
        placed = arg.keyword is not None and arg.keyword.value in ("device", "map_location")
        if literal and (placed or seen.name == "to") and names_cuda(seen, arg):
            return f"`{file.short(node)}`", choose + "pass it"
    return "", ""


def names_cuda(seen: Seen, arg: cst.Arg) -> bool:
    """Whether a literal argument spells a CUDA device."""
    values = seen.kwargs.values() if arg.keyword is not None else seen.args
    return any(
        isinstance(v, Const) and isinstance(v.value, str) and v.value.startswith("cuda")
        for v in values
    )
