"""HST130: a distributed sampler that nobody tells the epoch."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.flow.values import Const, Loader, Thing
from hasten.script.rules.file import File, Rule, first_of_each_line
from hasten.script.rules.hst125_workers_not_persistent import epoch_loop


class SetEpochMissing(Rule):
    """A `DistributedSampler` shuffles by the epoch it was told, which is always 0 here.

    ## What it does

    Finds loaders with a shuffling `DistributedSampler` that a loop goes through several times, in a
    file without any `set_epoch`.

    ## Why is this bad?

    Every epoch has the order of the first.

    ## Bad

    ```python
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler


    def train(data, step):
        sampler = DistributedSampler(data)
        loader = DataLoader(data, batch_size=8, sampler=sampler)
        for epoch in range(10):
            for batch in loader:
                step(batch)
    ```

    ## Good

    ```python
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler


    def train(data, step):
        sampler = DistributedSampler(data)
        loader = DataLoader(data, batch_size=8, sampler=sampler)
        for epoch in range(10):
            sampler.set_epoch(epoch)
            for batch in loader:
                step(batch)
    ```

    ## Fix safety

    Changes the order of samples from the second epoch on, as was meant.
    """

    code = "HST130"

    def check(self, file: File) -> Iterator[Finding]:
        """Samplers without an epoch."""
        if "set_epoch" in file.attributes():
            return iter(())
        return first_of_each_line(self._all(file))

    def _all(self, file: File) -> Iterator[Finding]:
        for seen in file.facts.of("loader"):
            loader = seen.receiver
            sampler = loader.settings.get("sampler") if isinstance(loader, Loader) else None
            if (
                not isinstance(loader, Loader)
                or not isinstance(sampler, Thing)
                or not sampler.lib.endswith("DistributedSampler")
            ):
                continue
            shuffle = sampler.extra.get("shuffle")
            epochs = epoch_loop(file, loader)
            if epochs is None or (isinstance(shuffle, Const) and not shuffle.value):
                continue
            node = sampler.origin.node if sampler.origin is not None else seen.node
            yield self.finding(
                file, node,
                "nothing calls set_epoch on this sampler: every epoch has the same"
                " order.",
                "sampler.set_epoch(epoch) at the start of each epoch",
                related=[(epochs.node, "the epochs")],
            )  # fmt: skip
