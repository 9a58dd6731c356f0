"""Where host tensors were made, by their memory."""

from __future__ import annotations

import pytest
import torch

from hasten.script.rehearsal import origins as module
from hasten.script.rehearsal.origins import Origins
from hasten.script.rehearsal.places import Territory


def test_memory_that_was_given_back_is_another_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "address", lambda tensor: 64)  # as an allocator may give it again
    origins = Origins(Territory())
    with origins:
        made = torch.zeros(100)
    part = made[1:]  # made where nobody looked
    known = origins.behind(part)
    assert known is not None and known.how == "torch.zeros"
    assert known is origins.of(made)
    del made
    assert origins.behind(part) is known, "the memory is still that"
    del part
    assert origins.behind(torch.ones(100)) is None
