"""What a feed's plan would be quicker by: a name for each case, which the feed says, and words."""

from __future__ import annotations

from typing import Literal

Remedy = Literal[
    "as given",
    "auto",
    "cheap",
    "cheaper",
    "cores",
    "device_transform",
    "lasting",
    "no workers",
    "num_workers=0",
    "own loader",
    "room",
    "rows",
    "source",
    "steady",
    "stream",
    "take over",
    "unshared",
    "whole",
    "workers",
]
"""The change that helps where the loop waits for this plan's batches."""

_CHEAPER = "make a sample cheaper, by images stored at the size that is used for instance"
_WHOLE = "the data set is whole tensors, which are batched by one indexed copy then"

ADVICE: dict[Remedy, str] = {
    "as given": (
        "let the feed plan itself: hasten.Loader of the data set, or Loader.from_dataloader of a "
        "DataLoader"
    ),
    "auto": "leave the plan to the feed: no num_workers and no plan",
    "cheap": (
        "hold the data as whole tensors (a TensorDataset), or make whole batches in a __getitems__ "
        "of the data set: a sample costs too little to be handed to workers"
    ),
    "cheaper": _CHEAPER,
    "cores": (
        f"{_CHEAPER}, or give a hasten.Loader of the data set, which tries threads, and more "
        "workers where samples wait: there are as many as cores"
    ),
    "device_transform": (
        "let the device compute what the data set computes of its tensors: give that as "
        "device_transform, and the data set as the bare tensors"
    ),
    "lasting": (
        "let worker processes last from epoch to epoch: num_workers=2, persistent_workers=True"
    ),
    "no workers": (
        "give the DataLoader num_workers=0, or Loader.from_dataloader(loader) in its place, which "
        f"keeps its results: {_WHOLE}"
    ),
    "num_workers=0": f"give the DataLoader num_workers=0: {_WHOLE}",
    "own loader": (
        "prepare batches beside the step: a hasten.Loader of the data set in the DataLoader's "
        "place, whose samples draw by seed, epoch and index and not between the loop's own draws"
    ),
    "room": "make room for workers and their batches: the plan says what is short",
    "rows": (
        "take a larger batch size, smaller rows (uint8 images that a device_transform makes "
        "float) or a cheaper device_transform if there is one: a batch is one indexed copy already"
    ),
    "source": (
        "move the data set's class to a file: its source cannot be read, so that it could not be "
        "seen whether it is whole tensors, which are batched by one indexed copy"
    ),
    "steady": "let a sample follow from its index alone, so that workers may make it",
    "stream": (
        "let more worker processes read the stream (num_workers), each the part that its __iter__ "
        "takes by torch.utils.data.get_worker_info"
    ),
    "take over": (
        "prepare batches beside the step: Loader.from_dataloader(loader) in the DataLoader's place "
        "keeps its results, or a hasten.Loader of the data set, where samples draw"
    ),
    "unshared": "open files and connections in the first sample, so that each worker has its own",
    "whole": f"leave num_workers out: {_WHOLE}",
    "workers": (
        "raise num_workers while cores are free, or give a hasten.Loader of the data set, which "
        "takes as many as help"
    ),
}
"""For each, what to do, in words."""

COMMANDS: dict[Remedy, str] = {
    "auto": "leave the plan to the feed: --num-workers auto, --plan auto",
    "whole": f"leave the workers to the feed (--num-workers auto): {_WHOLE}",
}
"""Of those, what options of ``hasten train`` do."""
