"""Evaluation counts each sample once and leaves model and generators as they were."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from train_helpers import QUIET, batches, loader, mlp, points, trainer

import hasten
from hasten.errors import DataError
from hasten.train import evaluation
from hasten.train.evaluation import Evaluation, evaluate, is_classification
from hasten.train.source import count, split

cross_entropy = nn.CrossEntropyLoss()


def run() -> hasten.Run:
    return hasten.Run(**QUIET)


class Given(nn.Module):
    """Gives out its input: the scores are in the data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_each_sample_counts_once_whatever_the_batches():
    model = mlp().eval()
    data, labels = points(45)[:]
    with torch.no_grad():
        outputs = model(data)
        loss = cross_entropy(outputs, labels).item()
    right = (outputs.argmax(1) == labels).double().mean().item()
    for sizes in ([45], [16, 16, 13], [1] * 45, [44, 1]):
        found = evaluate(run(), model, cross_entropy, batches(sizes, seed=2), {})
        assert found.samples == 45
        assert found.loss == pytest.approx(loss, rel=1e-5)
        assert found.accuracy == right
        table = found.confusion
        assert table is not None and sum(map(sum, table)) == 45
        for true in range(3):
            for predicted in range(3):
                both = (labels == true) & (outputs.argmax(1) == predicted)
                assert table[true][predicted] == both.sum()


def test_modes_are_put_back_module_by_module():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    model.train()
    model[1].eval()
    seen: list[bool] = []
    model[2].register_forward_hook(lambda module, args, out: seen.append(module.training))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    evaluate(run(), model, cross_entropy, batches([8, 8]), {})
    assert seen == [False, False]
    assert [module.training for module in model] == [True, False, True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_modes_are_put_back_after_an_error():
    model = mlp().train()

    def fail(outputs: Any, labels: Any) -> torch.Tensor:
        raise KeyError("in the loss")

    with pytest.raises(KeyError):
        evaluate(run(), model, fail, batches([8]), {})
    assert all(module.training for module in model.modules())


def test_no_generator_moves():
    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            random.random(), np.random.rand()
            return x[:, :3] + torch.randn(len(x), 3)

    running = run()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    evaluate(running, Noisy(), cross_entropy, DataLoader(points(), 8, shuffle=True), {})
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])


def test_no_gradient_is_made_and_batches_can_be_trained_on_after():
    given = batches([8])
    model = mlp()
    evaluate(run(), model, cross_entropy, given, {})
    assert all(parameter.grad is None for parameter in model.parameters())
    cross_entropy(model(given[0][0]), given[0][1]).backward()  # no inference tensor among them


def test_labels_that_are_no_class_are_not_counted():
    scores = torch.eye(3)[[0, 1, 2, 0, 1]]
    labels = torch.tensor([0, 1, -100, 1, -100])
    found = evaluate(run(), Given(), cross_entropy, [(scores, labels)], {})
    assert found.accuracy == 2 / 3 and found.confusion == [[1, 0, 0], [1, 1, 0], [0, 0, 0]]
    none = [(scores, torch.full((5,), -100))]
    assert evaluate(run(), Given(), lambda out, y: out.sum(), none, {}).accuracy is None


def test_very_many_classes_have_an_accuracy_and_no_table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evaluation, "MOST_CLASSES", 2)
    scores, labels = torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, 1, 1, -1])
    found = evaluate(run(), Given(), lambda out, y: out.sum(), [(scores, labels)], {})
    assert found.accuracy == 2 / 3 and found.confusion is None


def test_a_loss_that_is_not_finite_is_reported_not_raised():
    scores = torch.full((4, 3), float("nan"))
    found = evaluate(run(), Given(), cross_entropy, [(scores, torch.zeros(4).long())], {})
    assert found.loss != found.loss
    training = trainer(nn.Linear(6, 3))
    result = training.fit(
        batches([8]), [(torch.full((4, 6), torch.inf), torch.zeros(4).long())], epochs=1
    )
    assert result.history[0].to_json()["val_loss"] is None


def test_no_batch_is_an_error():
    with pytest.raises(DataError, match="gives no batch: is it empty"):
        evaluate(run(), mlp(), cross_entropy, [], {})


def test_figures_for_the_record():
    assert Evaluation(loss=1.0, samples=2).figures() == {"val_loss": 1.0}
    full = Evaluation(loss=1.0, samples=2, accuracy=0.5, metrics={"f1": 0.3})
    assert full.figures() == {"val_loss": 1.0, "val_accuracy": 0.5, "f1": 0.3}


@pytest.mark.parametrize(
    ("outputs", "labels", "expected"),
    [
        (torch.ones(4, 3), torch.ones(4).long(), True),
        (torch.ones(4, 3), torch.ones(4, dtype=torch.uint8), True),
        (torch.ones(4, 1), torch.ones(4).long(), False),
        (torch.ones(4, 3), torch.ones(4), False),
        (torch.ones(4, 3), torch.ones(4).bool(), False),
        (torch.ones(4, 3), torch.ones(4, 3).long(), False),
        (torch.ones(4, 3, 2), torch.ones(4, 2).long(), False),
        ({"out": torch.ones(4, 3)}, torch.ones(4).long(), False),
        (torch.ones(4, 3), [1, 2, 3, 0], False),
    ],
)
def test_what_classes_are(outputs: Any, labels: Any, expected: bool):
    assert is_classification(outputs, labels) is expected


def test_the_training_data_itself_can_be_evaluated_on_between_epochs():
    shared = loader()
    result = trainer().fit(shared, shared, epochs=3)
    apart = trainer().fit(loader(), loader(), epochs=3)
    assert [r.loss for r in result.history] == [r.loss for r in apart.history]
    assert [r.val_loss for r in result.history] == pytest.approx(
        [r.val_loss for r in apart.history]
    )


# --- what a batch is --------------------------------------------------------------------------


def packed() -> Any:
    return nn.utils.rnn.pack_sequence([torch.ones(5, 2), torch.ones(3, 2)])


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.ones(5, 2), 5),
        (torch.tensor(3.0), 1),
        ((torch.ones(5, 2), torch.ones(9)), 5),
        ([[torch.ones(4), torch.ones(5)], torch.ones(9)], 4),
        ({"x": torch.ones(6, 2), "positions": torch.ones(512)}, 6),
        ({"name": "abc", "n": torch.tensor(2), "x": torch.ones(6)}, 6),
        ({"words": ["a", "b"], "n": 3}, 2),
        ((["one", "two", "three"], torch.ones(3)), 3),
        ((packed(), torch.ones(2)), 2),
        ((np.ones((7, 2)), torch.ones(7)), 7),
        ([], 0),
        ("word", 1),
        (None, 1),
    ],
)
def test_count(batch: Any, samples: int):
    assert count(batch) == samples


def test_split():
    x, y, z = torch.ones(1), torch.ones(2), torch.ones(3)
    assert split((x, y)) == (x, y)
    assert split([x, y]) == (x, y)
    assert split((x, y, z)) == ((x, y), z)
    for name in ("labels", "label", "targets", "target"):
        assert split({"a": x, name: y}) == ({"a": x}, y)
    assert split({"target": x, "labels": y}) == ({"target": x}, y)


@pytest.mark.parametrize(
    ("batch", "kind"),
    [(torch.ones(3), "Tensor"), ([torch.ones(3)], "list"), ({"x": 1}, "dict"), (None, "NoneType")],
)
def test_split_refuses_what_has_no_labels(batch: Any, kind: str):
    with pytest.raises(DataError, match=f"this one is a {kind}: use hasten.Run"):
        split(batch)


def test_tensor_datasets_of_three_parts():
    x, y = points(16)[:]
    given = DataLoader(TensorDataset(x[:, :3], x[:, 3:], y), batch_size=8)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(torch.cat([a, b], 1))
            return out

    assert trainer(Two()).fit(given, given, epochs=1).val_accuracy is not None
