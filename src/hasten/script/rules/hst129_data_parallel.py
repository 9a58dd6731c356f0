"""HST129: DataParallel where DistributedDataParallel serves."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.rules.file import File, Rule, first_of_each_line


class DataParallel(Rule):
    """`nn.DataParallel` splits each batch in one process.

    ## What it does

    Finds `nn.DataParallel(...)`. It is a suggestion: the script works.

    ## Why is this bad?

    One Python process drives all GPUs and copies the model to each of them in every step; with
    `DistributedDataParallel` each GPU has its own process, which is faster on one machine too.

    ## Bad

    ```python
    import torch

    model = torch.nn.DataParallel(torch.nn.Linear(4, 2))
    ```

    ## Good

    ```python
    import torch
    from torch.nn.parallel import DistributedDataParallel


    def wrap(model, rank):
        return DistributedDataParallel(model.to(rank), device_ids=[rank])
    ```

    ## Fix safety

    Not fixed by itself: the script has to be started with torchrun, and its loader needs a
    DistributedSampler.
    """

    code = "HST129"

    def check(self, file: File) -> Iterator[Finding]:
        """Wrappers in one process."""
        return first_of_each_line(
            self.finding(
                file, seen.node, "DataParallel drives all GPUs from one process.",
                "DistributedDataParallel, one process a GPU, started with torchrun",
            )
            for seen in file.facts.of("parallel")
            if seen.name.endswith(".DataParallel")
        )  # fmt: skip
