"""`hasten train`: train an image classifier."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from hasten.cli.output import people_stream, print_json, tell
from hasten.errors import Interrupted, UsageError

Text = Annotated[str | None, typer.Option()]


def train(
    context: typer.Context,
    data: Annotated[
        str | None,
        typer.Argument(
            help="digits (the default), fashion-mnist, or a folder with one sub-folder a class."
        ),
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="Where Fashion-MNIST's files are or are downloaded to.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="small (the default), lesson, resnet18, resnet34, resnet50, timm:NAME,"
            " torchvision:NAME, or path/to/file.py:factory."
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data. (default: 10)")] = None,
    batch_size: Annotated[
        str | None,
        typer.Option(
            help="Images a step on all devices together, or auto: what fits, the rest"
            " accumulated. (default: 128)"
        ),
    ] = None,
    batch_size_per_device: Annotated[
        int | None, typer.Option(help="Images a step on each device, in place of --batch-size.")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Highest learning rate. (default: 0.003; sgd: 0.09)")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="adamw, adam or sgd. (default: adamw)")
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Default: 0.01.")] = None,
    schedule: Annotated[
        str | None, typer.Option(help="onecycle, cosine or constant. (default: onecycle)")
    ] = None,
    label_smoothing: Annotated[float | None, typer.Option(help="Default: 0.")] = None,
    accumulate: Annotated[
        int | None, typer.Option(help="Batches before each optimizer step. (default: 1)")
    ] = None,
    clip_norm: Annotated[
        float | None, typer.Option(help="Largest norm of the gradients. (default: none)")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="auto, cpu, cuda, cuda:1, mps, xpu … (default: auto, or HASTEN_DEVICE)"),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(help="Train on so many devices of this machine, a process on each."),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="How devices share the work: auto, ddp, fsdp, dp, single. (default: auto)"
        ),
    ] = None,
    sync_batchnorm: Annotated[
        bool | None,
        typer.Option(
            "--sync-batchnorm/--no-sync-batchnorm",
            help="Batch norms over the batch of all devices. (default: no)",
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="auto, float32, bfloat16 or float16. (default: auto: measured)"),
    ] = None,
    channels_last: Annotated[
        str | None, typer.Option(help="auto, on or off. (default: auto: measured)")
    ] = None,
    compile: Annotated[  # noqa: A002  (the option's name)
        bool | None, typer.Option("--compile/--no-compile", help="Compile the model. (default: no)")
    ] = None,
    num_workers: Annotated[
        str | None, typer.Option(help="Worker processes that load data, or auto. (default: auto)")
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            help="How batches are made: auto, resident, gather, threads, processes, inline."
            " (default: auto)"
        ),
    ] = None,
    augment: Annotated[
        str | None, typer.Option(help="auto, light, strong or none. (default: auto)")
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            help="Keep decoded copies of a folder's images, no larger than needed: none, ram or"
            " disk. (default: none)"
        ),
    ] = None,
    cache_bytes: Annotated[
        str | None,
        typer.Option(help="Room for the copies: 500MB, 20GB … (default: half of what is free)"),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option("--normalize/--no-normalize", help="Normalise images. (default: yes)"),
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(help="Side of the images in pixels. (default: from the data)")
    ] = None,
    val_fraction: Annotated[
        float | None, typer.Option(help="Share held out where data has no val part. (default: 0.2)")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Default: 0.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run's folder. (default: data-model-time)")
    ] = None,
    runs: Annotated[str, typer.Option(help="Folder that runs are made in.")] = "runs",
    resume: Annotated[
        str | None,
        typer.Option(help="Go on with the run in this folder, with its own settings."),
    ] = None,
    checkpoint_every: Annotated[
        str | None,
        typer.Option(
            help="'500 steps', '10 min', '2 epochs' or 'never' within epochs. (default: 10 min)"
        ),
    ] = None,
    keep: Annotated[
        int | None, typer.Option(help="Newest checkpoints kept, beside the best. (default: 2)")
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(help="End after so many epochs without a better one. (default: never)"),
    ] = None,
    log_every: Annotated[
        int | None, typer.Option(help="Batches between log points. (default: 50)")
    ] = None,
    hang_after_s: Annotated[
        float | None,
        typer.Option(
            help="Seconds without a finished batch after which it is told where the run hangs; 0"
            " for never. (default: 600)"
        ),
    ] = None,
    hang_exits: Annotated[
        bool | None,
        typer.Option(
            "--hang-exits/--no-hang-exits",
            help="End with status 75 when it hangs, for a launcher to start it anew. (default: no)",
        ),
    ] = None,
    progress: Annotated[str, typer.Option(help="auto, bar, plain or off.")] = "auto",
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard's event files.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, last, on standard output.")
    ] = False,
) -> None:
    """Train an image classifier on the best device there is.

    Examples: `hasten train`, `hasten train fashion-mnist --epochs 3`,
    `hasten train photos/ --model resnet18`, `hasten train --resume runs/NAME`,
    `hasten train photos/ --devices 4`.
    """
    from hasten.train import launch, strategies
    from hasten.train import world as worlds
    from hasten.train.folder import holds_run
    from hasten.vision import recipe
    from hasten.vision.data.copies import bytes_of
    from hasten.vision.settings import TrainSettings, new_folder, resumed

    given = {
        key: value
        for key, value in context.params.items()
        if value is not None and key in TrainSettings.__dataclass_fields__
    }
    here = worlds.place()
    if batch_size_per_device is not None:
        given["batch_size"] = _global_batch(batch_size_per_device, batch_size, devices or here.size)
    for key in ("batch_size", "num_workers"):
        if key in given:
            given[key] = number_or_auto(given[key], "--" + key.replace("_", "-"))
    if cache_bytes is not None:
        given["cache_bytes"] = bytes_of(cache_bytes, "--cache-bytes")
    stream = people_stream(json)
    # Of several processes the first one speaks for all.
    main = here.rank == 0

    def say(text: str) -> None:
        if main:
            tell(text, stream)

    if resume is not None:
        if name is not None:
            raise UsageError("--name is for a new run; --resume goes on with the one it names")
        folder = _folder(resume, "--resume", "the folder of a run, runs/NAME")
        settings = resumed(folder, given, say)
    else:
        settings = TrainSettings(**given)
        place = _folder(runs, "--runs", "the folder that runs are made in")
        folder = new_folder(place, name, settings)
    if devices is not None and launch.STORE not in os.environ:
        if here.launched:
            error = UsageError(
                "--devices starts processes, and a launcher has done so: leave it out"
            )
            error.silent = not main  # type: ignore[attr-defined]
            raise error
        launch.check(devices, worlds.device_for(settings.device))
        strategies.check(settings.strategy, devices)
        shared = launch.sharing(devices, worlds.device_for(settings.device))
        if shared:
            say(shared)
        if devices > 1:
            names = [] if resume is not None or name is not None else ["--name", folder.name]
            raise typer.Exit(launch.launch([*context.obj, *names], devices, folder))
    # One name for all: it may hold the time.
    folder = worlds.join(worlds.device_for(settings.device)).first(folder)
    again = worlds.restarted() and holds_run(folder)  # what a process that died had begun
    around = recipe.Surroundings(
        folder=folder,
        resume=resume is not None or again,
        progress=progress,
        stream=stream,
        sinks=_sinks(folder, tensorboard and main),
        say=say,
    )
    try:
        trained = recipe.train(settings, around)
    except KeyboardInterrupt as error:  # typer would end the command without a word
        raise Interrupted(
            "\n".join(["stopped by Ctrl-C", *getattr(error, "__notes__", [])])
        ) from None
    if not main:
        return
    report(trained, folder, stream)
    if json:
        print_json(as_json(trained, settings.model))


def _global_batch(each: int, together: str | None, devices: int) -> int:
    if together is not None:
        raise UsageError("give --batch-size, of all devices together, or --batch-size-per-device")
    if each < 1:
        raise UsageError(f"--batch-size-per-device is {each}: at least 1")
    return each * devices


def _folder(text: str, option: str, what: str) -> Path:
    if not text:
        raise UsageError(f"{option} is an empty name; give {what}")
    return Path(text)


def number_or_auto(text: Any, option: str) -> int | str:
    """A whole number, or ``auto``.

    Raises:
        UsageError: it is neither.
    """
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{option} is a whole number or auto, not {text!r}") from None


def _sinks(folder: Path, tensorboard: bool) -> tuple[Any, ...]:
    if not tensorboard:
        return ()
    from hasten.observe.tensorboard import TensorBoardSink

    return (TensorBoardSink(folder / "tensorboard"),)


def report(trained: Any, folder: Path, stream: Any) -> None:
    """Tell a person what came of it."""
    from hasten.observe.verdict import render

    result = trained.result

    def say(text: str) -> None:
        tell(text, stream)

    if result.val_accuracy is not None:
        say(f"Validation accuracy: {result.val_accuracy:.2%}{best(result.history)}")
    if result.verdict is not None:
        say(render(result.verdict))
    problems = trained.data.problems.summary()
    if problems:
        say(problems)
    for line in trained.skipped[:5]:
        say(f"Skipped sample {line}")
    say(f"Run: {folder} (report.html, model.safetensors, checkpoints/)")


def best(history: Any) -> str:
    """A word on the best epoch, where the last was not it."""
    known = [epoch for epoch in history if epoch.val_accuracy is not None]
    top = max(known, key=lambda epoch: epoch.val_accuracy)
    if top.val_accuracy <= known[-1].val_accuracy:
        return ""
    return f" (best: {top.val_accuracy:.2%} in epoch {top.epoch}, which hasten evaluate takes)"


def as_json(trained: Any, model: str) -> dict[str, Any]:
    """The run for machines."""
    result = trained.result
    fields = ("epoch", "loss", "val_loss", "val_accuracy", "seconds", "images_per_s")
    return {
        "run": str(result.folder),
        "device": str(result.device),
        "model": model,
        "epochs": len(result.history),
        "history": [{name: getattr(e, name) for name in fields} for e in result.history],
        "val_accuracy": result.val_accuracy,
        "saturation": result.saturation,
        "feed": result.feed,
        "seconds": result.seconds,
        "resumed_from": str(result.resumed_from) if result.resumed_from else None,
        "precision": result.precision.to_json(),
        "batch_size": trained.batch_size,
        "verdict": result.verdict.to_json() if result.verdict else None,
        "checkpoint": str(result.checkpoint) if result.checkpoint else None,
        "report": str(result.report) if result.report else None,
        "skipped": list(trained.data.problems.files()) + trained.skipped,
    }
