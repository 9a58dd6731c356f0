from __future__ import annotations

import dataclasses
import json
from typing import get_args

import pytest

from hasten.observe.remedies import ADVICE, Remedy
from hasten.observe.timeline import PHASES, PhaseTime, StepSummary
from hasten.observe.verdict import Verdict, judge, render, why_unlikely


def summary(
    steps: int = 100,
    seconds: float = 10.0,
    device: dict[str, float] | None = None,
    behind: float | None = None,
    **spent: float,
) -> StepSummary:
    return StepSummary(
        steps=steps,
        samples=64 * steps,
        seconds=seconds,
        phases={
            name: PhaseTime(
                median_s=spent.get(name, 0.0) / max(steps, 1), total_s=spent.get(name, 0)
            )
            for name in PHASES
        },
        device=device,
        device_steps=12 if device else 0,
        device_behind=behind,
    )


def test_waiting_is_named_with_its_share_and_amdahls_bound():
    verdict = judge(
        summary(wait=5.0, forward=2.0, backward=3.0), plan="inline - chosen by hand", device="CPU"
    )
    assert verdict.bound_by == "waiting for data"
    assert verdict.share == 0.5
    assert verdict.expected_gain == pytest.approx(2.0)
    assert "Loader.from_dataloader" in verdict.advice  # no plan of the feed was told
    assert any("wait 50%" in line for line in verdict.evidence)
    assert "feed: inline - chosen by hand" in verdict.evidence
    assert "device: CPU" in verdict.evidence


@pytest.mark.parametrize("remedy", get_args(Remedy))
def test_advice_on_waiting_is_the_remedy_that_the_plan_names(remedy: Remedy):
    """And not what its line begins with."""
    waiting = summary(wait=8.0, forward=2.0)
    for line in ("processes, 2 processes - 3 ms a sample", "inline - 3 ms a sample", None):
        assert judge(waiting, plan=line, remedy=remedy).advice == ADVICE[remedy]
    others = [words for name, words in ADVICE.items() if name != remedy]
    assert ADVICE[remedy] not in others


def test_there_are_words_for_each_remedy():
    assert set(ADVICE) == set(get_args(Remedy))
    loader = judge(summary(wait=8.0, forward=2.0), plan="IterableWrapper, as given").advice
    assert "hasten.Loader of the data set" in loader


def test_copying_and_the_rest_are_named():
    copying = judge(summary(copy=3.0, forward=7.0))
    assert (copying.bound_by, copying.share) == ("copying", 0.3)
    rest = judge(summary(other=4.0, forward=6.0))
    assert rest.bound_by == "logging/other"
    assert ".item()" in rest.advice


def test_small_costs_leave_compute():
    verdict = judge(
        summary(wait=0.5, copy=0.5, forward=3.0, backward=5.0, optimizer=1.0),
        saturation=0.973,
        precision="float32",
    )
    assert verdict.bound_by == "compute"
    assert verdict.share == pytest.approx(0.9)
    assert verdict.expected_gain == pytest.approx(1 / 0.55)
    assert verdict.advice == 'make the step cheaper: precision="auto"'
    assert "saturation 97%" in verdict.evidence


def test_a_saturation_that_the_verdict_contradicts_is_no_bare_figure():
    """As a newcomer saw it: bound by compute, 99 % of the time, beside a saturation of 1 %."""
    busy = summary(wait=0.1, forward=4.0, backward=5.0, optimizer=0.9)
    told = judge(busy, saturation=0.01, plan="gather, 1 thread - in memory").evidence
    assert (
        "saturation: not to be told, for computing took 99.00 ms a step, and 1.00 ms alone after"
        " the training: other programs had the cores"
    ) in told
    assert not any("saturation 1%" in line for line in told)
    shared = judge(busy, saturation=0.3, feed_workers=2).evidence
    assert any("other programs, or the feed's workers, had the cores" in line for line in shared)
    assert "saturation 60%" in judge(busy, saturation=0.6).evidence


def test_what_only_a_few_steps_took_is_not_said_to_be_of_other_programs():
    cold = dataclasses.replace(
        summary(forward=10.0),
        phases={name: PhaseTime(median_s=0.001, total_s=0.0) for name in PHASES}
        | {"forward": PhaseTime(median_s=0.001, total_s=10.0)},
    )
    assert why_unlikely(cold, 0.05).endswith(
        "a few steps, as the first ones, took most of the time"
    )
    assert "saturation: not to be told, for computing took 100.00 ms" in " ".join(
        judge(cold, saturation=0.05).evidence
    )


def test_what_is_lost_by_waiting_or_on_an_accelerator_is_a_saturation():
    assert not why_unlikely(summary(wait=9.5, forward=0.5), 0.05)
    device = {"wait": 0.0, "copy": 0.0, "forward": 0.05, "backward": 0.05, "optimizer": 0.0}
    slow = summary(device=device, behind=0.0, forward=9.0)
    assert not why_unlikely(slow, 0.1)
    assert "saturation 10%" in judge(slow, saturation=0.1).evidence


def test_advice_on_compute_depends_on_precision_and_size():
    busy = summary(forward=5.0, backward=5.0)
    assert "compile=True" in judge(busy, precision="bfloat16").advice
    assert "auto" in judge(busy, precision="float32").advice
    assert "auto" not in judge(busy, precision="float32", precision_measured=True).advice
    tiny = summary(seconds=0.05, forward=0.05)
    assert "batch size 128" in judge(tiny, batch_size=64).advice


def test_a_script_is_told_its_arguments_and_the_command_its_options():
    busy, tiny = summary(forward=5.0), summary(steps=10_000, forward=5.0)
    for size in (None, 64):
        for made in (busy, tiny):
            for precision in ("float32", "bfloat16"):
                script = judge(made, precision=precision, batch_size=size).advice
                assert "--" not in script
    assert judge(busy, precision="bfloat16").advice.startswith(
        "make the step cheaper: torch.compile (compile=True)"
    )
    assert "--" not in "".join(ADVICE.values())
    told = judge(busy, precision="float32", command=True).advice
    assert told == "make the step cheaper: --precision auto"
    assert "--compile" in judge(busy, precision="bfloat16", command=True).advice
    assert judge(tiny, batch_size=64, command=True).advice.endswith("--batch-size 128")
    waiting = summary(wait=8.0, forward=2.0)
    assert "--num-workers auto" in judge(waiting, remedy="auto", command=True).advice
    assert judge(waiting, remedy="cheaper", command=True).advice == ADVICE["cheaper"]


def test_a_device_that_starves_for_launches_is_told_from_one_that_is_busy():
    device = {"wait": 0.002, "copy": 0.0, "forward": 0.03, "backward": 0.06, "optimizer": 0.008}
    launches = {"forward": 3.0, "backward": 5.0, "optimizer": 1.0}
    starving = judge(summary(device=device, behind=0.05, **launches), batch_size=32)
    assert starving.bound_by == "the host (launching work)"
    assert starving.share == pytest.approx(0.9)
    assert "batch size 64" in starving.advice
    assert any("at the end of 5% of 12 sampled steps" in line for line in starving.evidence)
    assert judge(summary(device=device, behind=0.95, **launches)).bound_by == "compute"
    # A host that is idle most of the time cannot be what the device waits for.
    assert judge(summary(device=device, behind=0.05, forward=0.5)).bound_by == "compute"


def test_the_devices_clock_counts_where_there_is_one():
    device = {"wait": 0.06, "copy": 0.0, "forward": 0.02, "backward": 0.02, "optimizer": 0.0}
    verdict = judge(summary(device=device, behind=0.0, forward=9.0, wait=1.0))
    assert verdict.bound_by == "waiting for data"
    assert verdict.share == pytest.approx(0.6)


@pytest.mark.parametrize("steps", [0, 2])
def test_too_few_steps_say_so(steps: int):
    verdict = judge(summary(steps=steps, wait=5.0))
    assert verdict.bound_by == "too short to tell"
    assert verdict.expected_gain == 1.0
    assert render(verdict) == (
        f"Verdict: too short to tell ({steps} steps were timed); "
        "run at least 3 steps, better an epoch."
    )


def test_everything_waiting_has_a_finite_bound():
    assert judge(summary(wait=10.0)).expected_gain == pytest.approx(100)


def test_json_round_trip_and_its_errors():
    verdict = judge(summary(wait=5.0, forward=5.0))
    data = json.loads(json.dumps(verdict.to_json(), allow_nan=False))
    assert Verdict.from_json(data | {"new": 1}) == verdict
    with pytest.raises(ValueError, match="'the moon'"):
        Verdict.from_json(data | {"bound_by": "the moon"})
    del data["advice"]
    with pytest.raises(ValueError, match="'advice'"):
        Verdict.from_json(data)


def test_rendering():
    verdict = Verdict(
        bound_by="copying", share=0.25, evidence=("one", "two"), advice="copy less",
        expected_gain=4 / 3,
    )  # fmt: skip
    assert render(verdict).splitlines() == [
        "Verdict: bound by copying, 25% of the time.",
        "  one",
        "  two",
        "  To change: copy less (at most 1.33x).",
    ]
