"""Commands that one process does: refused where a launcher has started several."""

from __future__ import annotations

from hasten.errors import UsageError


def refuse_several(command: str) -> None:
    """Refuse to do in each of several processes what one is to do.

    Raises:
        UsageError: a launcher started several; the first one tells it.
    """
    from hasten.train import world

    here = world.place()
    if here.size == 1:
        return
    error = UsageError(
        f"hasten {command} is done by one process, and a launcher has started {here.size}: start it"
        " without torchrun, or by srun --ntasks 1"
    )
    error.silent = here.rank != 0  # type: ignore[attr-defined]
    raise error
