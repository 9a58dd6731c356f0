"""HST123: samples that take work are made in the training process."""

# Long lists of names read better as text.
# ruff: noqa: SIM905

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from hasten.script.findings import Finding, Severity
from hasten.script.flow import tables
from hasten.script.flow.expressions import spelled
from hasten.script.flow.facts import Seen
from hasten.script.flow.values import (
    ClassValue,
    Const,
    Function,
    Instance,
    Loader,
    Seq,
    Thing,
    Value,
)
from hasten.script.rules.file import File, Rule, first_of_each_line

_DECODERS = frozenset(
    "open imread imdecode read_image decode_image decode_jpeg load loadtxt"
    " read_csv read_file".split()
)


# Work on a whole sample, whatever it is called through; of the second kind one alone is little.
_HEAVY = frozenset(
    "sleep rfft fft fft2 ifft stft spectrogram GaussianBlur warpAffine svd gaussian_filter filter2D"
    " convolve convolve2d".split()
)
_SOME = frozenset(
    "conv1d conv2d conv3d avg_pool2d max_pool2d interpolate grid_sample affine_grid resize rotate"
    " gaussian_blur rot90".split()
)
_WORKERS = ("cv2.", "scipy.", "ndimage.", "skimage.", "librosa.", "torchaudio.", "albumentations.")


class LoaderWithoutWorkers(Rule):
    """The data set does real work for each sample, and the loader has no workers.

    ## What it does

    Finds `DataLoader`s with `num_workers=0` (the default) that feed a training loop on a device,
    whose data set decodes files, calls a transform, or loops over operations for each sample. Data
    sets that only index tensors in memory are fine without workers and not reported.

    ## Why is this bad?

    The device waits while the training process makes the batch.

    ## Bad

    ```python
    import torch
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


    class Photos(Dataset):
        def __init__(self, paths, transform):
            self.paths, self.transform = paths, transform

        def __len__(self):
            return len(self.paths)

        def __getitem__(self, i):
            return self.transform(Image.open(self.paths[i]).convert("RGB"))


    def train(paths, transform, model, optimizer):
        model.to(device)
        for images in DataLoader(Photos(paths, transform), batch_size=32, shuffle=True):
            loss = model(images.to(device)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    ```

    ## Good

    ```python
    import torch
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


    class Photos(Dataset):
        def __init__(self, paths, transform):
            self.paths, self.transform = paths, transform

        def __len__(self):
            return len(self.paths)

        def __getitem__(self, i):
            return self.transform(Image.open(self.paths[i]).convert("RGB"))


    def train(paths, transform, model, optimizer):
        model.to(device)
        data = Photos(paths, transform)
        for images in DataLoader(data, batch_size=32, shuffle=True, num_workers=4):
            loss = model(images.to(device)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    ```

    ## Fix safety

    Random numbers drawn in `__getitem__` come from each worker's own seed.
    """

    code = "HST123"

    def check(self, file: File) -> Iterator[Finding]:
        """Loaders without workers."""
        return first_of_each_line(self._all(file))

    def _all(self, file: File) -> Iterator[Finding]:
        if not uses_device(file):
            return
        for seen in file.facts.of("loader"):
            loader = seen.receiver
            if (
                not isinstance(loader, Loader)
                or loader.extra.get("loose")
                or not feeds_training(file, loader)
            ):
                continue
            workers = loader.settings.get("num_workers", Const(0))
            if not isinstance(workers, Const) or workers.value != 0:
                continue
            severity, why = _work(loader.dataset, _helpers(file))
            if why:
                yield self.finding(
                    file, seen.node,
                    f"the data set {why} for each sample, and the loader does it in the"
                    " training process.",
                    "num_workers=4 or so (hasten tune finds the number), with"
                    " persistent_workers=True",
                    severity=severity,
                )  # fmt: skip


def uses_device(file: File) -> bool:
    """Whether the script moves anything to a device that may be a GPU."""
    return any(
        s.data.get("to") == "dev" or s.data.get("place") == "dev"
        for s in file.facts.of("move", "tensor-move", "unknown-move")
    )


def feeds_training(file: File, loader: Loader) -> bool:
    """Whether a loop with a backward pass takes its batches from this loader."""
    for seen in file.facts.of("loader-use"):
        if seen.receiver is loader and any(loop.has_backward for loop in seen.loops()):
            return True
    for end in file.facts.of("loop-end"):
        loop = end.data["loop"]
        if loop.has_backward and any(
            s.receiver is loader and file.holds(loop.node, s.node)
            for s in file.facts.of("loader-use")
        ):
            return True
    return False


def _helpers(file: File) -> dict[str, Function]:
    """The functions of the file by name."""
    return {f.name: f for f in file.facts.functions if f.owner is None}


def _work(dataset: Value, helpers: dict[str, Function]) -> tuple[Severity, str]:
    if isinstance(dataset, Seq):
        return "suggestion", ""
    if isinstance(dataset, Thing):
        if dataset.lib in tables.DECODING:
            return "warning", "decodes a file"
        if dataset.lib in tables.IN_MEMORY and dataset.extra.get("pair"):
            return "suggestion", "runs a transform"
        if dataset.lib.endswith(("Subset", "ConcatDataset")) and dataset.parts:
            return _work(dataset.parts[0], helpers)
        return "suggestion", ""
    if isinstance(dataset, Instance) and dataset.cls is not None:
        method = dataset.cls.find("__getitem__")
        if isinstance(method, Function):
            finder = _Work(dataset.cls, helpers)
            method.node.body.visit(finder)
            if finder.decodes:
                return "warning", f"calls `{finder.decodes}`"
            if finder.loops:
                return "warning", "loops over operations"
            if finder.transform:
                return "warning", f"calls `{finder.transform}`"
    return "suggestion", ""


class _Work(cst.CSTVisitor):
    """What a `__getitem__` does that takes time; methods of the class are looked into."""

    def __init__(self, cls: ClassValue, helpers: dict[str, Function], depth: int = 2) -> None:
        self.decodes = ""
        self.loops = False
        self.transform = ""
        self.operations = 0
        self.cls, self.helpers, self.depth = cls, helpers, depth

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
        """A call: of a decoder, of a transform, of work on a whole sample, or of a helper."""
        name = spelled(node.func)
        last = name.rsplit(".", 1)[-1]
        if ("." in name and last in _DECODERS) or last in _HEAVY or name.startswith(_WORKERS):
            self.decodes = self.decodes or name
        if last in _SOME:
            self.operations += 1
            if self.operations > 1:
                self.decodes = self.decodes or name
        if "transform" in last or "augment" in last:
            self.transform = self.transform or name
        method = (
            self.cls.find(last) if name == f"self.{last}" else self.helpers.get(name)
        )  # a function of the script does the work for it
        if isinstance(method, Function) and self.depth:
            inner = _Work(self.cls, self.helpers, self.depth - 1)
            method.node.body.visit(inner)
            self.decodes = self.decodes or inner.decodes
            self.transform = self.transform or inner.transform
            self.loops = self.loops or inner.loops

    def visit_For(self, node: cst.For) -> None:  # noqa: N802
        """A loop with calls in it."""
        self._loop(node.body)

    def visit_While(self, node: cst.While) -> None:  # noqa: N802
        """A loop with calls in it."""
        self._loop(node.body)

    def _loop(self, body: cst.BaseSuite) -> None:
        finder = _Calls()
        body.visit(finder)
        self.loops = self.loops or finder.count > 0


class _Calls(cst.CSTVisitor):
    def __init__(self) -> None:
        self.count = 0

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
        """Count it."""
        self.count += 1


__all__ = ["LoaderWithoutWorkers", "Seen", "feeds_training", "uses_device"]
