"""Several processes come to what one comes to, with the same global batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_cases
import torch

import warm
from hasten.train import checkpoint, weights

HERE = Path(__file__).parent


def launch(*command: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """Run a script in several processes, as people do."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    return warm.run(
        [sys.executable, *launcher, *command],
        capture_output=True,
        text=True,
        timeout=200,
        # A rank was once ended by SIGABRT on a busy machine: should one be again, it tells where.
        env=warm.forking_ranks(
            {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "HASTEN_CACHE_DIR": "off",
                "PYTHONFAULTHANDLER": "1",
            }
        ),
    )


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes has come to."""
    folder = tmp_path_factory.mktemp("ranks")
    assert rank_cases.journey(folder / "alone", stop=8)["stopped"] == 8
    assert rank_cases.journey(folder / "plain alone", stop=8, plain=True)["stopped"] == 8
    done = launch(str(HERE / "rank_cases.py"), str(folder))
    assert done.returncode == 0, done.stderr[-8000:]
    found = [torch.load(folder / f"rank-{rank}.pt") for rank in range(2)]
    return [rank | {"folder": folder} for rank in found]


@pytest.mark.parametrize("name", rank_cases.CASES)
def test_two_processes_come_to_what_one_comes_to(
    several: list[dict[str, Any]], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    alone = rank_cases.CASES[name]()
    found = [rank["cases"][name] for rank in several]
    for key, expected in alone.items():
        if key == "order":
            asked = [rank["order"] for rank in found]
            assert interleaved(asked, expected)
            continue
        for rank in found:
            rtol = 1e-6 if key == "losses" else 0.0  # sums are large
            torch.testing.assert_close(rank[key], expected, rtol=rtol, atol=1e-6)


def interleaved(asked: list[list[int]], order: list[int]) -> bool:
    """Whether the samples that two processes asked for make the order of one, batch by batch."""
    epochs = [order[start : start + 43] for start in range(0, len(order), 43)]
    expected: list[list[int]] = [[], []]
    for epoch in epochs:
        for start in range(0, 43, 8):
            batch = epoch[start : start + 8]
            half = (len(batch) + 1) // 2
            expected[0] += batch[:half]
            expected[1] += batch[half:]
    return asked == expected


@pytest.mark.parametrize("name", ["small", "deep", "norm", "fused", "made before", "stepped"])
def test_weights_in_parts_come_to_the_same(several: list[dict[str, Any]], name: str) -> None:
    alone = rank_cases.in_parts()[name]
    found = several[0]["parts"][name]
    for key, expected in alone.items():
        torch.testing.assert_close(found[key], expected, rtol=0, atol=1e-6)
    assert several[1]["parts"][name]["losses"] == found["losses"]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four processes has come to."""
    folder = tmp_path_factory.mktemp("four")
    done = launch(str(HERE / "rank_cases.py"), str(folder), "few", processes=4)
    assert done.returncode == 0, done.stderr[-8000:]
    found = [torch.load(folder / f"few-{rank}.pt") for rank in range(4)]
    return [rank | {"folder": folder} for rank in found]


def test_a_loss_that_one_process_lost_stops_all_and_is_told_by_each(
    four: list[dict[str, Any]],
) -> None:
    for where in ("nan", "nan unsaved"):
        told = [rank["agreed"][where] for rank in four]
        kinds = [kind for kind, _, _ in told]
        assert kinds == ["ElsewhereError"] * 3 + ["NonFiniteLoss"]
        assert all("the loss became nan at step 9" in text for _, text, _ in told)
        assert told[0][1].startswith("rank 3 failed: ")
        assert all(epoch == 1 for _, _, epoch in told)
    kept = sorted(path.name for path in (four[0]["folder"] / "nan/checkpoints").glob("step-*"))
    assert kept == ["step-00000006"]


def test_a_loss_that_is_no_mean_over_samples_is_told_by_the_first_process(
    four: list[dict[str, Any]],
) -> None:
    told = four[0]["agreed"]["said"]
    assert "give loss_over='nothing'" in told["sum"]
    assert "is no mean over samples" in told["one over another"]
    assert "loss_over=lambda" in told["one over another"]
    assert "is no mean over samples" not in told["mean"]
    assert all(not any(rank["agreed"]["said"].values()) for rank in four[1:])


def test_a_step_asks_the_others_for_nothing_but_its_gradients(four: list[dict[str, Any]]) -> None:
    for rank in four:
        few, many = rank["agreed"]["collectives"]
        assert few == many > 0  # 6 and 22 steps an epoch


def test_a_precision_is_chosen_by_one_while_norms_are_over_all(four: list[dict[str, Any]]) -> None:
    assert [rank["agreed"]["chosen"] for rank in four] == [6] * 4


def test_parameters_that_get_no_gradient_are_named_once(four: list[dict[str, Any]]) -> None:
    told = four[0]["agreed"]["unused"]
    assert told.count("unused.weight, unused.bias of Halves get no gradient") == 1


def test_memory_that_one_process_lacks_bounds_the_batch_of_all(four: list[dict[str, Any]]) -> None:
    assert [rank["agreed"]["memory"] for rank in four] == [(8, 4)] * 4


def test_the_first_process_says_the_batch_of_all_and_of_each(four: list[dict[str, Any]]) -> None:
    said = [rank["agreed"]["batch"] for rank in four]
    assert "Batch size: 8, 2 on each of 4 devices; learning rate 0.1\n" in said[0]
    assert said[1:] == [""] * 3


def test_figures_are_those_of_all_samples(four: list[dict[str, Any]]) -> None:
    import torchmetrics

    torch.manual_seed(1)
    metric = torchmetrics.F1Score("multiclass", num_classes=3, average="macro")
    points, labels = rank_cases.data()[:]
    expected = float(metric(rank_cases.mlp()(points), labels))
    assert [rank["agreed"]["metric"] for rank in four] == [pytest.approx(expected)] * 4
    assert all(rank["agreed"]["sums"] == [6.0, 4.0] for rank in four)


def test_processes_without_samples_take_the_step_and_count_nothing(
    four: list[dict[str, Any]],
) -> None:
    found = four[0]["thin"]
    for name, alone in rank_cases.thinly_spread().items():
        for key, expected in alone.items():  # a norm over three samples enlarges what is rounded
            torch.testing.assert_close(found[name][key], expected, rtol=0, atol=1e-5)


def test_a_signal_to_one_process_stops_all_at_the_same_step(several: list[dict[str, Any]]) -> None:
    for name in ("dropout stopped", "ddp stopped", "fsdp stopped"):
        one, other = (rank["journeys"][name] for rank in several)
        assert one == other
        assert 8 <= one["stopped"] < 24
        assert one["status"] == 75  # again, please: it was stopped from outside and saved


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_signal_in_validation_cuts_it_off_for_all_and_it_is_done_again(
    several: list[dict[str, Any]], name: str
) -> None:
    one, other = (rank["validating"][name] for rank in several)
    assert one["stopped"] == other["stopped"]
    assert one["stopped"]["status"] == 75
    assert (one["stopped"]["stopped"], one["stopped"]["epochs"]) == (12, 1)
    assert one["stopped"]["read"] < 30  # of 40 in two validations
    for found in (one, other):
        assert found["gone on"]["losses"] == found["undisturbed"]["losses"]
    for key, weight in one["undisturbed"]["state"].items():
        assert torch.equal(one["gone on"]["state"][key], weight)


def test_what_goes_on_with_as_many_processes_is_what_was_never_stopped_to_the_bit(
    several: list[dict[str, Any]],
) -> None:
    for rank in several:
        undisturbed, gone_on = rank["journeys"]["dropout"], rank["journeys"]["dropout gone on"]
        assert gone_on["losses"] == undisturbed["losses"]
        for name, weight in undisturbed["state"].items():
            assert torch.equal(gone_on["state"][name], weight)
        skipped = len(undisturbed["order"]) - len(gone_on["order"])
        assert gone_on["order"] == undisturbed["order"][skipped:]
        assert skipped > 0


@pytest.mark.parametrize(
    "name",
    [
        "ddp",
        "ddp to fsdp",
        "fsdp to ddp",
        "fsdp gone on",
        "fsdp damaged",
        "alone to ddp",
        "alone to fsdp",
    ],
)
def test_a_run_goes_on_by_another_strategy_and_other_processes(
    several: list[dict[str, Any]], name: str
) -> None:
    alone, found = rank_cases.journey(None), several[0]["journeys"][name]
    for key in ("state", "losses"):
        torch.testing.assert_close(found[key], alone[key], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["plain", "plain gone on", "plain, alone to ddp"])
def test_a_dataloader_is_fed_and_gone_on_with(several: list[dict[str, Any]], name: str) -> None:
    alone = rank_cases.journey(None, plain=True)
    for rank in several:
        found = rank["journeys"][name]
        assert found["feed"].startswith("gather, 1 thread - 43 samples in memory")
        for key in ("state", "losses"):
            torch.testing.assert_close(found[key], alone[key], rtol=0, atol=1e-6)


def test_one_process_goes_on_with_the_dataloader_of_several(several: list[dict[str, Any]]) -> None:
    assert several[0]["journeys"]["plain stopped"]["stopped"] >= 8
    alone = rank_cases.journey(None, plain=True)
    found = rank_cases.journey(several[0]["folder"] / "plain", plain=True, resume=True)
    for key in ("state", "losses"):
        torch.testing.assert_close(found[key], alone[key], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_one_process_goes_on_with_what_several_began(
    several: list[dict[str, Any]], name: str
) -> None:
    alone = rank_cases.journey(None)
    stopped = several[0]["journeys"][f"{name} stopped"]["stopped"]
    found = rank_cases.journey(several[0]["folder"] / name, resume=True)
    for key in ("state", "losses"):
        torch.testing.assert_close(found[key], alone[key], rtol=0, atol=1e-6)
    batches = stopped % 6 + stopped // 6 * 6
    samples = stopped // 6 * 43 + stopped % 6 * 8
    assert batches == stopped
    assert found["order"] == alone["order"][samples:]


def test_each_process_reads_and_checks_its_own_part(several: list[dict[str, Any]]) -> None:
    read = [rank["journeys"]["fsdp gone on"]["checked"] for rank in several]
    assert read == [{"part-00000.safetensors"}, {"part-00001.safetensors"}]
    brought = [rank["journeys"]["fsdp gone on"]["brought"] for rank in several]
    weights_of_all = 4 * ((6 * 8 + 8) + (8 * 3 + 3) + (3 + 3))
    assert sum(brought) == 3 * weights_of_all  # and two moments of AdamW
    assert brought[0] - brought[1] == 3 * 4 * 11  # the uneven row of 8 weights, and three vectors


def test_each_process_saves_its_own_part(several: list[dict[str, Any]]) -> None:
    newest, _ = checkpoint.newest(several[0]["folder"] / "c/checkpoints")
    assert newest is not None
    stored = checkpoint.load(newest, map_location="cpu", read_parts=False)
    assert [len(part.data) for part in stored.model["0.weight"].parts] == [4, 4]
    assert [len(part.data) for part in stored.model["3.weight"].parts] == [2, 1]
    moments = stored.training["optimizers"][0]["state"][0]["exp_avg"]
    assert [len(part.data) for part in moments.parts] == [4, 4]
    found, expected = weights.read(newest), several[0]["journeys"]["fsdp gone on"]["state"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("stream", "would give each of the 2 processes all samples"),
        ("dataloader stream", "would give each of the 2 processes all samples"),
        ("sampler", "leave the sampler out"),
        ("generator", "cannot be shared out among 2 processes"),
        ("single", "for one process, and there are 2"),
        ("taken over", "give the run the DataLoader itself"),
        ("dp", "for one process, and there are 2"),
        ("skip", 'use on_error="raise"'),
        ("loader sampler", "leave the sampler out"),
        ("by hand", "no loss of these batches came to run.backward"),
        ("two loops", "two loops over run.batches are under way at once"),
        ("rprop in parts", "Rprop cannot step weights in parts"),
        ("a number in parts", "scale of Scaled has none: make it a tensor of one number"),
    ],
)
def test_what_several_cannot_do_is_said(
    several: list[dict[str, Any]], name: str, word: str
) -> None:
    assert all(word in rank["refusals"][name] for rank in several)
