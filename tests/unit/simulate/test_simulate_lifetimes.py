"""Memory that is given back while another stream works on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hasten
from hasten.simulate import Hazard
from slow_device import SLOW


def reused(simulation: Any) -> list[Hazard]:
    return [e for e in simulation.events if isinstance(e, Hazard) and e.kind == "reused"]


def use_elsewhere(
    *, record: bool = False, wait: bool = False, synchronize: bool = False, next_on: str = "side"
) -> None:
    """A tensor of a side stream that the main one works on; then another one takes its memory."""
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    with torch.cuda.stream(side):
        tensor = torch.empty(100_000, device="cuda")
    main.wait_stream(side)
    view = tensor[10:]  # an address within it
    view.mul_(2)
    if record:
        view.record_stream(main)
    del tensor, view
    if wait:
        side.wait_stream(main)
    if synchronize:
        torch.cuda.synchronize()
    with torch.cuda.stream(side if next_on == "side" else main):
        torch.empty(50_000, device="cuda")


def test_memory_that_another_stream_still_works_on_is_not_for_the_next() -> None:
    with hasten.simulate(spec=SLOW) as simulation:
        use_elsewhere()
        [hazard] = reused(simulation)
        assert hazard.location is not None and hazard.noticed is not None
        assert hazard.location.line < hazard.noticed.line


@pytest.mark.parametrize(
    "safe", [{"record": True}, {"wait": True}, {"synchronize": True}, {"next_on": "main"}]
)
def test_it_is_where_that_is_told_or_waited_for_or_its_own(safe: dict[str, Any]) -> None:
    with hasten.simulate(spec=SLOW) as simulation:
        use_elsewhere(**safe)
        assert reused(simulation) == []


def test_a_larger_tensor_takes_other_memory() -> None:
    with hasten.simulate(spec=SLOW) as simulation:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            small = torch.empty(1000, device="cuda")
        for _ in range(10):
            small.mul_(2)
        del small
        with torch.cuda.stream(side):
            torch.empty(2000, device="cuda")
            assert reused(simulation) == []
            torch.empty(1000, device="cuda")
        assert len(reused(simulation)) == 1


def test_lists_of_tensors_and_copies_are_uses_too() -> None:
    with hasten.simulate(spec=SLOW) as simulation:
        side = torch.cuda.Stream()
        for use in (lambda a, b: torch.stack([a, b]), lambda a, b: a.to("cpu", non_blocking=True)):
            with torch.cuda.stream(side):
                a, b = torch.empty(10_000, device="cuda"), torch.empty(10_000, device="cuda")
            before = len(reused(simulation))
            found = [use(a, b) for _ in range(10)]
            del a, b
            with torch.cuda.stream(side):
                torch.empty(10_000, device="cuda")
            assert len(reused(simulation)) == before + 1
            torch.cuda.synchronize()
            del found


@pytest.mark.parametrize("where", ["cpu", "sparse"])
def test_record_stream_is_for_dense_tensors_of_a_device(where: str) -> None:
    with hasten.simulate():
        tensor = torch.eye(3)
        tensor = tensor if where == "cpu" else tensor.to_sparse().cuda()
        with pytest.raises(NotImplementedError, match="aten::record_stream"):
            tensor.record_stream(torch.cuda.current_stream())
