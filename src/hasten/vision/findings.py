"""What a comparison says, in sentences for a person."""

from __future__ import annotations

from hasten.vision.compared import Comparison, Row, as_fast, learns_less

_NAMED = 5


def findings(comparison: Comparison) -> list[str]:
    """What stands out, a sentence a line; the most important first."""
    fastest, first = comparison.fastest, comparison.first
    lines = []
    if fastest is not None and first is not None:
        lines.append(f"Fastest: {_speed(fastest, first)}.")
        if learns_less(fastest, first):
            lines.append(_no_gain(comparison, fastest, first))
        lines += _unsettled(comparison, fastest)
        lines += _how_measured(comparison)
        lines += _large_batches(comparison)
    lines += [f"Left out: {item.device}, which is not here." for item in comparison.left_out]
    lines += [f"Run {row.number} failed: {_first_line(row)}" for row in comparison.failed]
    return lines


def _speed(row: Row, first: Row) -> str:
    text = f"run {row.number} ({row.trial.label}), {row.images_per_s:,.0f} images/s"
    return text if row is first else f"{text}, {row.ratio:.2f} times run {first.number}"


def _no_gain(comparison: Comparison, fastest: Row, first: Row) -> str:
    text = (
        f"But it learns less: accuracy {fastest.accuracy:.2%}, where run {first.number} has"
        f" {first.accuracy:.2%} after as many epochs."
        if len(fastest.epochs) == len(first.epochs)
        else f"But it learned less: accuracy {fastest.accuracy:.2%} after {len(fastest.epochs)}"
        f" epochs, where run {first.number} has {first.accuracy:.2%} after {len(first.epochs)}."
    )
    best = comparison.best
    if best is None:
        return text
    if best is first:
        return f"{text} None that is faster learns as well as run {first.number}."
    return f"{text} The fastest that learns as well is {_speed(best, first)}."


def _unsettled(comparison: Comparison, fastest: Row) -> list[str]:
    near = [r.number for r in comparison.rows if r is not fastest and as_fast(r, fastest)]
    if not near:
        return []
    named = ", ".join(map(str, near[:_NAMED]))
    more = f" and {len(near) - _NAMED} more" if len(near) > _NAMED else ""
    verb = "is" if len(near) == 1 else "are"
    return [f"Run {named}{more} {verb} as fast within the spread of the repeats."]


def _how_measured(comparison: Comparison) -> list[str]:
    runs = [run for row in comparison.rows for run in row.runs]
    lines = []
    if all(len(run.epochs) == 1 for run in runs):
        lines.append(
            "Speeds are of the only epoch, which includes start-up (--epochs 2 leaves that out)."
        )
    elif any(len(run.epochs) == 1 for run in runs):
        lines.append("Speeds of runs of one epoch include start-up; the others' leave it out.")
    if all(len(row.runs) < 2 for row in comparison.rows):
        lines.append("Each was run once: small differences may be noise (--repeat 3 shows it).")
    return lines


def _large_batches(comparison: Comparison) -> list[str]:
    large = [
        (run.batch_size, run.train_images)
        for row in comparison.rows
        for run in row.runs[-1:]
        if run.batch_size > run.train_images
    ]
    if not large:
        return []
    sizes = ", ".join(dict.fromkeys(str(size) for size, _ in large))
    images = min(count for _, count in large)
    return [f"Batch {sizes} is more than the {images:,} training images: an epoch is one step."]


def _first_line(row: Row) -> str:
    return (row.failed or "").splitlines()[0]
