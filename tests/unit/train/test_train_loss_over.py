"""What a loss is a mean over, and what comes of pieces of a batch then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from train_helpers import QUIET, assert_same, batches, mlp, state

import hasten
from hasten.errors import UsageError
from hasten.train import loss_over

LABELS = torch.tensor([0, 2, 1, 2])
WEIGHT = torch.tensor([1.0, 10.0, 100.0])


@pytest.mark.parametrize(
    ("loss", "labels", "expected"),
    [
        (nn.CrossEntropyLoss(), LABELS, "samples"),
        (nn.CrossEntropyLoss(reduction="sum"), LABELS, "nothing"),
        (nn.MSELoss(reduction="sum"), LABELS.float(), "nothing"),
        (nn.MSELoss(), LABELS.float(), "samples"),
        (nn.CrossEntropyLoss(weight=WEIGHT), LABELS, 211.0),
        (nn.NLLLoss(weight=WEIGHT, ignore_index=2), LABELS, 11.0),
        (nn.CrossEntropyLoss(ignore_index=2), LABELS, 2),
        (nn.CrossEntropyLoss(), torch.tensor([[0, -100], [-100, -100]]), 1),
        (nn.CrossEntropyLoss(weight=WEIGHT), torch.tensor([[0, -100], [1, 1]]), 21.0),
        (nn.CrossEntropyLoss(weight=WEIGHT), torch.rand(4, 3), "samples"),  # shares of classes
        (nn.functional.cross_entropy, LABELS, "samples"),
    ],
)
def test_torch_s_own_losses_tell(loss: Any, labels: torch.Tensor, expected: Any) -> None:
    assert loss_over.of("auto", loss, None, labels) == expected


def test_what_is_given_goes_before() -> None:
    loss = nn.CrossEntropyLoss(weight=WEIGHT)
    assert loss_over.of("samples", loss, None, LABELS) == "samples"
    assert loss_over.of(lambda outputs, labels: len(labels) * 3, loss, None, LABELS) == 12


@pytest.mark.parametrize("given", ["tokens", None, 3])
def test_what_says_nothing_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="loss_over="):
        hasten.Trainer(mlp(), loss=nn.CrossEntropyLoss(), loss_over=given)


def test_a_word_that_says_nothing_is_refused_in_a_loop_of_ones_own() -> None:
    model = nn.Linear(6, 3)
    run = hasten.Run(**QUIET)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="over='tokens'"):
        for _ in run.epochs(1):
            for x, _ in run.batches(batches([4])):
                run.backward(model(x).sum(), over="tokens")  # type: ignore[arg-type]


def weighted() -> nn.Module:
    return nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 7.0]))


def trained(given: Any, accumulate: int) -> tuple[nn.Module, hasten.Result]:
    torch.manual_seed(1)
    model = nn.Linear(6, 3)
    made = hasten.Trainer(
        model,
        loss=weighted(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        accumulate=accumulate,
        **QUIET,
    )
    return model, made.fit(given, given, epochs=2)


def test_accumulated_pieces_come_to_what_the_whole_batch_comes_to() -> None:
    pieces = batches([4, 7, 1, 4, 7, 1])
    wholes = [
        tuple(torch.cat(parts) for parts in zip(*pieces[i : i + 3], strict=True)) for i in (0, 3)
    ]
    small, result = trained(pieces, 3)
    large, expected = trained(wholes, 1)
    for name, weight in state(large).items():
        torch.testing.assert_close(state(small)[name], weight, rtol=0, atol=1e-6)
    for one, other in zip(result.history, expected.history, strict=True):
        assert one.val_loss == pytest.approx(other.val_loss)
    everything = [torch.cat(parts) for parts in zip(*pieces, strict=True)]
    with torch.no_grad():
        whole = weighted()(small(everything[0]), everything[1])
    assert result.history[-1].val_loss == pytest.approx(float(whole))


def test_one_batch_a_step_is_left_as_it_is() -> None:
    given = batches([8, 8, 3])
    found, _ = trained(given, 1)
    torch.manual_seed(1)
    plain = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in given:
            weighted()(plain(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(state(found), state(plain))


def test_a_batch_with_nothing_to_count_changes_nothing_and_is_no_bad_loss() -> None:
    model = nn.Linear(6, 3)
    run = hasten.Run(accumulate=2, **QUIET)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = state(model)
    nothing = [(torch.zeros(4, 6), torch.full((4,), -100))] * 2
    loss = nn.CrossEntropyLoss()
    for _ in run.epochs(1):
        for x, y in run.batches(nothing):
            run.backward(loss(model(x), y), over=(y >= 0).sum())
            run.step(optimizer)
    assert_same(state(model), before)
    assert run.global_step == 1
