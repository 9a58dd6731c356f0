"""Compare the simulated accelerator with the CPU, operator by operator.

PyTorch's own operator database is the list: every sample input, forward and backward, in-place
variants too. Two questions are asked of each operator. Does it give what the CPU gives? And is
a tensor that was left on the CPU refused or allowed as CUDA does? The judge of the second is
PyTorch's FakeTensor, which knows CUDA's rules of placement and was not written here; where it is
known to differ from CUDA, `CUDA_DIFFERS` says how, and why.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import hasten.simulate

# Where FakeTensor is known to differ from CUDA: what CUDA does, and where that is to be seen.
CUDA_DIFFERS: dict[str, tuple[bool | None, str]] = {
    "convolution": (False, "Convolution.cpp, check_input_same_type_as_parameters"),
    "select_scatter": (True, "TensorShape.cpp: a clone, and copy_ into a view of it"),
    "as_strided_scatter": (True, "TensorShape.cpp: a clone, and copy_ into a view of it"),
    "_unsafe_masked_index": (True, "TensorAdvancedIndexing.cpp: index, which takes CPU indices"),
}
# Placements that the judge gets wrong for a whole operator of the database: tensor positions that
# CUDA refuses, and why.
CUDA_ALLOWS: dict[str, str] = {
    "nn.functional.ctc_loss": "LossCTC.cpp moves targets and lengths to where it wants them",
}
REFUSALS = ("device", "indices should be", "should be the same", "to be on cpu")
CUDA_REFUSES: dict[str, tuple[frozenset[int], str]] = {
    "__getitem__": (frozenset({0}), "a CPU tensor does not take CUDA indices"),
    "_unsafe_masked_index_put_accumulate": (frozenset({0}), "index_put_ checks its values"),
    "_unsafe_masked_index": (frozenset({0, 1}), "as index and masked_fill do"),
}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4, "equal_nan": True}


@dataclasses.dataclass(kw_only=True)
class Verdict:
    """What was found of one operator."""

    name: str
    samples: int = 0
    skipped: str = ""
    absent: bool = False
    """Whether CUDA has no kernel for it, and the device refuses it for that."""
    failed: list[str] = dataclasses.field(default_factory=list)
    mixed: int = 0
    unsaid: int = 0
    """Placements on which the judge is silent."""
    mixed_wrong: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


def operators() -> list[Any]:
    """The operators of PyTorch's database."""
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def full_name(op: Any) -> str:
    """An operator's name, with its variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def dtype_of(op: Any) -> torch.dtype | None:
    """Float32 where the operator takes it, else the first dtype that it does take."""
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64, torch.float64):
        if dtype in op.dtypes:
            return dtype
    return None


def samples_of(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    """Its sample inputs on the CPU."""
    grad = bool(op.supports_autograd and dtype.is_floating_point)
    yield from op.sample_inputs("cpu", dtype, requires_grad=grad)


def copied(tree: Any, device: str, stays: torch.Tensor | None = None) -> Any:
    """A copy of nested arguments as fresh leaves on a device, but for one that stays."""

    def copy(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            if isinstance(x, torch.device):
                return torch.device(device)
            return x
        # Layout and overlap are part of a sample: keep strides as they are.
        fresh = x.detach().clone()
        if x.layout is not torch.strided:
            return fresh.to(device).requires_grad_(x.requires_grad)
        if fresh.stride() != x.stride():
            fresh = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype).copy_(x.detach())
        if x.is_conj() and not fresh.is_conj():
            fresh = fresh.conj().resolve_conj().conj()
        return fresh.to(device).requires_grad_(x.requires_grad)

    def copy_device(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x is stays:
            return x
        return device if x == "cpu" else copy(x)

    return pytree.tree_map(copy_device, tree)


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of a nested value, in order."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def run(call: Callable[..., Any], sample: Any, device: str, backward: bool) -> Any:
    """Run one sample: the outputs, and the gradients of its inputs."""
    torch.manual_seed(0)
    stays = next(iter(tensors(sample.args)), None) if call is torch.tensor_split else None
    given = copied((sample.input, sample.args, sample.kwargs), device, stays)
    first, args, kwargs = given
    out = sample.output_process_fn_grad(call(first, *args, **kwargs))
    grads: list[Any] = []
    if backward:
        leaves = [x for x in tensors(given) if x.requires_grad and x.is_leaf]
        roots = [x for x in tensors(out) if x.requires_grad]
        if leaves and roots:
            weights = [torch.ones_like(x) for x in roots]
            grads = list(torch.autograd.grad(roots, leaves, weights, allow_unused=True))
    return out, grads


def inplace_call(op: Any) -> Callable[..., Any] | None:
    """The in-place variant, on a copy that is no leaf."""
    inplace = op.get_inplace()
    if inplace is None:
        return None

    def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return inplace(x.clone(), *args, **kwargs)

    return call


def difference(ours: Any, cpu: Any, exact: bool) -> str | None:
    """How two results differ, None where they agree."""
    mine, its = pytree.tree_leaves(ours), pytree.tree_leaves(cpu)
    if len(mine) != len(its):
        return f"{len(mine)} results, not {len(its)}"
    for a, b in zip(mine, its, strict=True):
        if isinstance(b, torch.Tensor):
            if not isinstance(a, torch.Tensor):
                return f"a {type(a).__name__} in place of a tensor"
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"{tuple(a.shape)} {a.dtype}, not {tuple(b.shape)} {b.dtype}"
            if exact and b.layout is not torch.strided:
                a, b = a.detach().cpu().to_dense(), b.detach().cpu().to_dense()
            if exact:
                x, y = a.detach().cpu().resolve_conj(), b.detach().cpu().resolve_conj()
                if x.layout is torch.strided and not torch.allclose(
                    *(t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (x, y)),
                    **TOLERANCE,
                ):
                    return "other numbers"
        elif exact and a != b and not (a != a and b != b):
            if isinstance(b, torch.device) or "cpu" in str(b):
                continue
            if isinstance(b, (int, float, complex)) and np.isclose(a, b, rtol=1e-4, atol=1e-5):
                continue
            return f"{a!r}, not {b!r}"
    return None


def is_random(call: Callable[..., Any], sample: Any) -> bool:
    """Whether two runs on the CPU with two seeds differ."""
    results = []
    for seed in (1, 2):
        first, args, kwargs = copied((sample.input, sample.args, sample.kwargs), "cpu")
        torch.manual_seed(seed)
        results.append(sample.output_process_fn_grad(call(first, *args, **kwargs)))
    return difference(results[0], results[1], exact=True) is not None


def agreement(op: Any, verdict: Verdict, most: int | None, rng: random.Random) -> None:
    """Compare an operator's results on the device with the CPU's."""
    dtype = dtype_of(op)
    if dtype is None:
        verdict.skipped = "no dtype"
        return
    samples = list(samples_of(op, dtype))
    if most is not None and len(samples) > most:
        samples = rng.sample(samples, most)
    calls = [("", op.op), ("in-place ", inplace_call(op))]
    for number, sample in enumerate(samples):
        for word, call in calls:
            if call is None or (word and sample.broadcasts_input):
                continue
            backward = dtype.is_floating_point and op.supports_autograd
            try:
                expected = run(call, sample, "cpu", backward)
            except Exception:  # noqa: BLE001, S112
                continue  # it does not work on the CPU: nothing to compare with
            verdict.samples += 1
            try:
                found = run(call, sample, "cuda", backward)
            except Exception as error:  # noqa: BLE001
                if "doesn't exist for this backend" in str(error):
                    verdict.absent, verdict.samples = True, 0
                    return
                text = str(error).split("\n")[0][:160]
                verdict.failed.append(f"{word}sample {number}: {type(error).__name__}: {text}")
                continue
            how = difference(found, expected, exact=False)
            numbers = "empty" not in op.name  # whose content is what the memory held
            if how is None and numbers and difference(found, expected, exact=True) is not None:
                random_too = is_random(call, sample)
                how = None if random_too else difference(found, expected, exact=True)
            if how is not None:
                verdict.failed.append(f"{word}sample {number}: {how}")
            elif tensors((sample.input, sample.args)) and misplaced(found[0], expected[0]):
                verdict.failed.append(f"{word}sample {number}: a result on the CPU")


def misplaced(ours: Any, cpu: Any) -> bool:
    """Whether a result is on the host that the CPU has too, and CUDA would have on the device."""
    return not all(x.is_cuda for x in tensors(ours)) and all(x.is_cpu for x in tensors(cpu))


class Rules:
    """What ``native_functions.yaml``, which comes with PyTorch, says of CUDA's device checks."""

    def __init__(self) -> None:
        import torchgen
        import yaml

        path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
        entries = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        self.entries = {entry["func"].split("(")[0]: entry for entry in entries}

    def allowed(self, func: Any, scalar: bool) -> bool | None:
        """Whether an operator takes a CPU tensor beside CUDA tensors; None: it is not said.

        Args:
            func: the operator.
            scalar: whether the CPU tensor is 0-dimensional.
        """
        name = func._schema.name.split("::")[1]
        if func._schema.overload_name:
            name += f".{func._schema.overload_name}"
        if name in CUDA_DIFFERS:
            return CUDA_DIFFERS[name][0]
        entry = self.entries.get(name)
        if entry is None:
            return None
        delegate = entry.get("structured_delegate")
        kernels = str(entry.get("dispatch", ""))
        if not delegate and "CUDA" not in kernels:
            return None
        if entry.get("device_check") != "NoCheck":
            return False
        through = self.entries[delegate] if delegate else entry
        if through.get("structured_inherits") == "TensorIteratorBase" and "index" not in name:
            return scalar
        return None


class Seen(TorchDispatchMode):
    """Notes the operators in which tensors of two devices meet."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kinds = {x.device.type for x in tensors((args, kwargs))}
        if len(kinds) > 1:
            self.mixed.append(func)
        return func(*args, **(kwargs or {}))


def judged(call: Callable[..., Any], sample: Any, place: int, rules: Rules) -> bool | None:
    """Whether CUDA's rules let the tensor at a position be on the CPU; None: they do not say."""
    first, args, kwargs = sample.input, sample.args, sample.kwargs
    given = tensors((first, args, kwargs))[place]
    seen = Seen()
    with FakeTensorMode(), seen:
        leaves, spec = pytree.tree_flatten((first, args, kwargs))
        count = -1
        for position, x in enumerate(leaves):
            if isinstance(x, torch.Tensor):
                count += 1
                fake = torch.empty_strided(
                    x.size(), x.stride(), dtype=x.dtype, device="cpu" if count == place else "cuda"
                )
                leaves[position] = fake
            elif isinstance(x, torch.device) or x == "cpu":
                leaves[position] = torch.device("cuda")
        first, args, kwargs = pytree.tree_unflatten(leaves, spec)
        faked: bool | None = True
        try:
            call(first, *args, **kwargs)
        except Exception as error:  # noqa: BLE001
            text = str(error)
            faked = False if "device" in text and "cpu" in text else None
    if not seen.mixed:
        return faked
    # FakeTensor lets every 0-dimensional tensor pass, and some others; CUDA asks the operator.
    answers = [rules.allowed(func, not given.dim()) for func in seen.mixed]
    if False in answers:
        return False
    if any(func.namespace != "aten" for func in seen.mixed):
        return None  # one opaque operator, of which FakeTensor sees the outside alone
    if None in answers:
        return None if faked and not given.dim() else faked
    return True


def refused(call: Callable[..., Any], sample: Any, place: int) -> bool | None:
    """Whether the simulated device refuses the tensor at a position on the CPU."""
    first, args, kwargs = copied((sample.input, sample.args, sample.kwargs), "cuda")
    leaves, spec = pytree.tree_flatten((first, args, kwargs))
    positions = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    leaves[positions[place]] = leaves[positions[place]].detach().cpu()
    first, args, kwargs = pytree.tree_unflatten(leaves, spec)
    try:
        call(first, *args, **kwargs)
    except Exception as error:  # noqa: BLE001
        text = str(error)
        return any(words in text for words in REFUSALS)
    return False


def mixing(op: Any, verdict: Verdict, most: int, rules: Rules) -> None:
    """Leave one tensor on the CPU, and compare with what CUDA's rules say."""
    dtype = dtype_of(op)
    if dtype is None:
        return
    tried = 0
    for sample in samples_of(op, dtype):
        given = tensors((sample.input, sample.args, sample.kwargs))
        count = len(given)
        if count < 2 or any(x.layout is not torch.strided for x in given):
            continue
        tried += 1
        if tried > most:
            break
        for place in range(count):
            allowed = judged(op.op, sample, place, rules)
            if place in CUDA_REFUSES.get(verdict.name, (frozenset(), ""))[0]:
                allowed = False
            if verdict.name in CUDA_ALLOWS:
                allowed = True
            if allowed is None:
                verdict.unsaid += 1
                continue
            shape = tuple(tensors((sample.input, sample.args, sample.kwargs))[place].shape)
            verdict.mixed += 1
            if refused(op.op, sample, place) == allowed:
                word = "refused, and CUDA allows it" if allowed else "allowed, and CUDA refuses it"
                verdict.mixed_wrong.append(f"tensor {place} of shape {shape} on the CPU: {word}")


def examine(op: Any, most: int | None, rng: random.Random, rules: Rules) -> Verdict:
    """Ask both questions of an operator."""
    verdict = Verdict(name=full_name(op))
    begun = time.perf_counter()
    with hasten.simulate.simulate():
        agreement(op, verdict, most, rng)
        mixing(op, verdict, most=3, rules=rules)
    verdict.seconds = time.perf_counter() - begun
    return verdict


def main() -> int:
    """Run all, print the totals, write the list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--most", type=int, default=None, help="samples an operator, at most")
    parser.add_argument("--write", type=Path, default=None, help="the document to write")
    parser.add_argument("--verbose", action="store_true")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rng = random.Random(0)
    rules = Rules()
    verdicts = []
    for op in operators():
        if chosen.only and chosen.only not in full_name(op):
            continue
        verdict = examine(op, chosen.most, rng, rules)
        verdicts.append(verdict)
        if chosen.verbose and (verdict.failed or verdict.mixed_wrong or verdict.seconds > 20):
            print(verdict.name, f"{verdict.seconds:.1f} s", len(verdict.failed), verdict.samples)
            for line in verdict.failed[:2] + verdict.mixed_wrong[:3]:
                print("    ", line, flush=True)
    print(totals(verdicts))
    if chosen.write is not None:
        chosen.write.write_text(document(verdicts, chosen.most))
    return 0 if passes(verdicts) else 1


def passes(verdicts: list[Verdict]) -> bool:
    """Whether 98 % of the operators that work on the CPU agree, and every placement is right."""
    works = [v for v in verdicts if v.samples]
    agree = sum(not v.failed for v in works)
    return agree >= 0.98 * len(works) and not any(v.mixed_wrong for v in verdicts)


def totals(verdicts: list[Verdict]) -> str:
    """The figures as one paragraph."""
    works = [v for v in verdicts if v.samples]
    agree = [v for v in works if not v.failed]
    mixed = [v for v in verdicts if v.mixed]
    right = [v for v in mixed if not v.mixed_wrong]
    cases = sum(v.mixed for v in mixed)
    wrong = sum(len(v.mixed_wrong) for v in mixed)
    return (
        f"operators that work on the CPU: {len(works)}; agree: {len(agree)} "
        f"({100 * len(agree) / max(len(works), 1):.2f} %); sample runs "
        f"{sum(v.samples for v in works)}, failed {sum(len(v.failed) for v in works)}\n"
        f"operators with a tensor left on the CPU: {len(mixed)}; as CUDA: {len(right)} "
        f"({100 * len(right) / max(len(mixed), 1):.2f} %); placements {cases}, wrong {wrong}, "
        f"and {sum(v.unsaid for v in verdicts)} on which the judge is silent\n"
    )


def document(verdicts: list[Verdict], most: int | None) -> str:
    """The figures and the list of what fails, as Markdown."""
    lines = [
        "# Fidelity of the simulated accelerator",
        "",
        "Written by `make fidelity`; do not edit. `tools/fidelity.py` says how it is done.",
        "",
        f"hasten {hasten.__version__}, torch {torch.__version__}, "
        f"Python {sys.version.split()[0]}; "
        + ("every sample input" if most is None else f"at most {most} samples an operator")
        + ", forward, backward and in place, float32 where the operator takes it.",
        "",
        *totals(verdicts).strip().split("\n"),
        "",
        "The judge of a tensor left on the CPU is PyTorch's FakeTensor together with the device",
        "checks that `native_functions.yaml` declares; no real GPU took part. Where the judge is",
        "known to differ from CUDA, the rule below was used in its place.",
        "",
        "## Operators that do not agree with the CPU",
        "",
    ]
    for v in sorted(verdicts, key=lambda v: v.name):
        if v.failed:
            lines.append(f"- `{v.name}`: {len(v.failed)} of {v.samples} runs. {v.failed[0]}")
    lines += ["", "## Placements that are not as CUDA's", ""]
    wrong = [v for v in verdicts if v.mixed_wrong]
    lines += [f"- `{v.name}`: {v.mixed_wrong[0]}" for v in wrong] or ["None."]
    lines += ["", "## Rules used in place of the judge", ""]
    lines += [
        f"- `{name}`: {'allowed' if allowed else 'refused'} ({reason})"
        for name, (allowed, reason) in sorted(CUDA_DIFFERS.items())
    ]
    lines += [f"- `{name}`: allowed ({reason})" for name, reason in sorted(CUDA_ALLOWS.items())]
    lines += [
        f"- `{name}`, tensor {', '.join(map(str, sorted(places)))}: refused ({reason})"
        for name, (places, reason) in sorted(CUDA_REFUSES.items())
    ]
    lines += ["", "## Operators that CUDA has not, and that are refused here too", ""]
    absent = sorted(v.name for v in verdicts if v.absent)
    lines += [", ".join(f"`{name}`" for name in absent) or "None."]
    lines += ["", "## Operators that the database runs on no sample here", ""]
    idle = sorted(v.name for v in verdicts if not v.samples and not v.absent)
    lines += [", ".join(f"`{name}`" for name in idle) or "None.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
