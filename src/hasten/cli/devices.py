"""``hasten devices``: what is here, and how fast it is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hasten.cli import output

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hasten.devices import DeviceInfo, Rates
    from hasten.devices.describing import Environment

_FORMATS = ("float16", "bfloat16", "float8", "tf32")


def devices(
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure rates too: products, copies, transfers.")
    ] = False,
    budget_s: Annotated[
        float, typer.Option("--budget-s", min=0.1, help="Seconds to measure each device for.")
    ] = 20.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on standard output.")
    ] = False,
) -> None:
    """Table the devices here: memory, number formats, cores, and what cannot be used and why.

    Example: hasten devices --measure
    """
    from hasten.devices import advice, describe
    from hasten.devices.describing import environment

    console = output.console(as_json)
    found, torch, hints = describe(), environment(), [*advice(), *_variable()]
    _print_devices(console, found, torch)
    for info in found:
        if info.problem:
            console.print(f"{info.device} does not work: {info.problem}", markup=False)
    for hint in hints:
        console.print(f"Not used: {hint}", markup=False)
    rates = _measured(console, found, budget_s) if measure else {}
    if as_json:
        output.print_json(
            {
                "devices": [_json(info, rates.get(info.device)) for info in found],
                "torch": torch.to_json(),
                "advice": hints,
            }
        )


def _variable() -> list[str]:
    """What is wrong with HASTEN_DEVICE, which nothing else of this command asks."""
    from hasten import device
    from hasten.devices.selection import VARIABLE
    from hasten.errors import UsageError

    if not os.environ.get(VARIABLE):
        return []
    try:
        device("auto")
    except UsageError as error:
        return [str(error)]
    return []


def _json(info: DeviceInfo, rates: Rates | None) -> dict[str, Any]:
    return {
        **info.to_json(),
        "memory_bytes": info.memory_total_bytes,
        "rates": None if rates is None else rates.to_json(),
    }


def _measured(console: Console, found: list[DeviceInfo], budget_s: float) -> dict[str, Rates]:
    """Rates by device; the CPU is measured first, for the others to be compared with."""
    from hasten.devices import measure

    rates: dict[str, Rates] = {}
    for info in reversed(found):
        if info.problem is None:
            console.print(f"Measuring {info.device}, {budget_s:g} s at most …", markup=False)
            rates[info.device] = measure(info.device, cpu=rates.get("cpu"), budget_s=budget_s)
            _print_rates(console, rates[info.device])
    return rates


def _table(console: Console, title: str, *columns: str, words: bool = False) -> Table:
    """A table with lines on a terminal, in plain columns elsewhere; numbers stand to the right."""
    from rich import box
    from rich.table import Table

    style = box.ROUNDED if console.is_terminal else None
    table = Table(
        title=title, title_justify="left", box=style, pad_edge=False, min_width=len(title)
    )
    for place, column in enumerate(columns):
        justify: Literal["left", "right"] = "left" if words or place == 0 else "right"
        table.add_column(column, justify=justify, overflow="fold")
    return table


def _print_devices(console: Console, found: list[DeviceInfo], torch: Environment) -> None:
    driver = f", driver {torch.driver} (CUDA {torch.driver_cuda})" if torch.driver else ""
    title = f"PyTorch {torch.torch}, built for {torch.build}{driver}"
    columns = ("device", "name", "memory", "computes with", "fast in", "emulates")
    table = _table(console, title, *columns, words=True)
    for info in found:
        table.add_row(
            info.device,
            info.name,
            f"{_gib(info.memory_total_bytes)}, {_gib(info.memory_free_bytes)} free",
            _processors(info),
            ", ".join(name for name in _FORMATS if info.dtypes[name] == "fast") or "-",
            ", ".join(name for name in _FORMATS if info.dtypes[name] == "works") or "-",
        )
    console.print(table)


def _print_rates(console: Console, rates: Rates) -> None:
    names = rates.dtypes()
    title = f"{rates.device}: matrix products, TFLOP/s"
    title += " (and times the CPU's)" if any(rate.ratio for rate in rates.matmul) else ""
    table = _table(console, title, "size", *names)
    found = {(rate.size, rate.dtype): rate for rate in rates.matmul}
    for size in sorted({rate.size for rate in rates.matmul}):
        cells = [found.get((size, name)) for name in names]
        table.add_row(
            str(size),
            *(_rate(cell.tflop_per_s, cell.ratio) if cell is not None else "-" for cell in cells),
        )
    console.print(table)
    for conv in rates.convolution:
        speed = _rate(conv.images_per_s, conv.ratio)
        line = f"Convolution in {conv.dtype}: {speed} images/s, {conv.gflop_per_s:,.0f} GFLOP/s"
        console.print(line, markup=False)
    if rates.copy_gb_per_s is not None:
        speed = _rate(rates.copy_gb_per_s, rates.copy_ratio)
        console.print(f"Copy within the memory: {speed} GB/s, read and written", markup=False)
    if rates.transfers:
        console.print(_transfer_table(console, rates))
    for line in rates.to_json()["summary"]:
        console.print(line, markup=False)
    for line in rates.left_out:
        console.print(f"Not measured: {line}", markup=False)


def _transfer_table(console: Console, rates: Rates) -> Table:
    size = rates.transfers[0].bytes / 2**20
    title = f"{rates.device}: {size:.0f} MiB from host memory"
    table = _table(console, title, "memory", "non_blocking", "ms", "host waits, ms", "GB/s")
    for way in rates.transfers:
        table.add_row(
            way.source,
            "yes" if way.non_blocking else "no",
            f"{way.seconds * 1e3:.3g}",
            f"{way.host_seconds * 1e3:.3g}",
            f"{way.gb_per_s:.3g}",
        )
    return table


def _processors(info: DeviceInfo) -> str:
    if info.cores is not None:
        return f"{info.cores} cores, {info.threads} threads"
    parts = [f"{info.multiprocessors} processors"] if info.multiprocessors else []
    return (
        ", ".join([*parts, *([f"capability {info.capability}"] if info.capability else [])]) or "-"
    )


def _rate(value: float, ratio: float | None) -> str:
    text = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return text if ratio is None else f"{text} ({ratio:.3g}×)"


def _gib(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / 2**30:.1f} GiB"
