"""Precision and layout: what can be chosen, what is, and that choosing leaves no trace."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train_helpers import assert_same, batches, loader, losses, mlp, state, told, trainer

import hasten
from hasten.devices import runtime
from hasten.errors import UsageError
from hasten.train import precision, probe, remembered
from hasten.train.precision import Precision, by_rule, candidates, check, fastest, undisturbed
from hasten.train.settings import RunSettings

CPU = torch.device("cpu")
PLAIN = Precision(name="float32")
HALF = Precision(name="bfloat16")
LAST = Precision(name="float32", channels_last=True)
BOTH = Precision(name="bfloat16", channels_last=True)


Times = Callable[[int], float]


def scripted(**times: Times) -> tuple[list[Precision], Callable[[Precision], float], list[str]]:
    """Choices by the names of their step's seconds in each round (0 warms up), and the order."""
    ways = {"plain": PLAIN, "last": LAST, "half": HALF, "both": BOTH}
    choices = [way for name, way in ways.items() if name in times]
    order: list[str] = []

    def time_step(choice: Precision) -> float:
        name = next(name for name, way in ways.items() if way == choice)
        order.append(name)
        return times[name](order.count(name) - 1)

    return choices, time_step, order


def steady(seconds: float) -> Times:
    return lambda number: seconds


def disturbed(seconds: float, at: dict[int, float]) -> Times:
    """Longer by a factor in some rounds."""
    return lambda number: seconds * at.get(number, 1.0)


# --- the fastest ------------------------------------------------------------------------------


def test_the_fastest_wins_and_says_by_how_much():
    # 8 rounds of 7 s each are far beyond the budget: the fewest are taken.
    choices, time_step, order = scripted(plain=steady(4), half=steady(1), last=steady(2))
    chosen, sure = fastest(choices, time_step)
    assert (chosen.name, chosen.channels_last, sure) == ("bfloat16", False, True)
    assert chosen.reason == (
        "auto measured 3 ways, 8 steps each: 4.00 times the speed of plain float32"
        " in forward and backward"
    )
    rounds = [order[at : at + 3] for at in range(0, len(order), 3)]
    assert len(rounds) == 9 and all(set(names) == {"plain", "half", "last"} for names in rounds)
    assert len({tuple(names) for names in rounds}) > 3  # nothing always follows the same


@pytest.mark.parametrize(
    ("each", "says"), [(0.3, []), (1.0, ["measures 2 ways to compute, 8 steps each: some 16 s"])]
)
def test_what_takes_long_is_said_before(each: float, says: list[str]):
    choices, time_step, order = scripted(plain=steady(each), half=steady(each))
    told: list[tuple[str, int]] = []
    fastest(choices, time_step, lambda text: told.append((text, len(order))))
    assert [text in line for text, (line, _) in zip(says, told, strict=True)] == [True] * len(says)
    assert all(steps == 2 for _, steps in told), "after the steps that warm up"


def test_more_is_measured_where_steps_are_short_and_never_for_long():
    choices, time_step, order = scripted(plain=steady(0.001), half=steady(0.001))
    assert "31 steps each" in fastest(choices, time_step)[0].reason
    choices, time_step, order = scripted(plain=steady(0.0625), half=steady(0.0625))
    assert "16 steps each" in fastest(choices, time_step)[0].reason
    assert len(order) == 2 * 17


@pytest.mark.parametrize(
    ("half", "name"), [(0.95, "float32"), (0.90, "bfloat16"), (2.0, "float32")]
)
def test_a_gain_below_the_margin_is_noise(half: float, name: str):
    choices, time_step, _ = scripted(plain=steady(1.0), half=steady(half))
    chosen, sure = fastest(choices, time_step)
    assert chosen.name == name and sure
    if name == "float32":
        assert "none is 1.10 times the speed of plain float32" in chosen.reason


def test_a_slow_stretch_under_one_of_them_gives_no_gain():
    """As a newcomer saw it: 5.75 times the speed, for another program ran beside the plain one."""
    slow = {number: 6.0 for number in range(1, 9) if number != 4}
    choices, time_step, _ = scripted(plain=disturbed(1.0, slow), last=steady(1.0))
    chosen, sure = fastest(choices, time_step)
    assert chosen.name == "float32" and not chosen.channels_last  # the shortest times are equal
    assert not sure and "too uneven to tell" in chosen.reason


def test_one_disturbed_step_of_either_side_changes_nothing():
    for at in range(1, 9):
        for plain, half in ((9.0, 1.0), (1.0, 9.0)):
            choices, time_step, _ = scripted(
                plain=disturbed(2.0, {at: plain}), half=disturbed(1.0, {at: half})
            )
            chosen, sure = fastest(choices, time_step)
            assert chosen.name == "bfloat16" and sure and "2.00 times" in chosen.reason
            choices, time_step, _ = scripted(
                plain=disturbed(1.0, {at: plain}), half=disturbed(1.0, {at: half})
            )
            chosen, sure = fastest(choices, time_step)
            assert chosen.name == "float32" and sure and "none is 1.10 times" in chosen.reason


def test_what_is_too_uneven_to_tell_leaves_the_plain_one_and_says_so():
    chance = random.Random(5)
    choices, time_step, _ = scripted(
        plain=lambda number: chance.uniform(1, 4), half=lambda number: chance.uniform(1, 4)
    )
    chosen, sure = fastest(choices, time_step)
    assert (chosen.name, sure) == ("float32", False)
    assert chosen.reason.startswith(
        "auto measured 2 ways, 8 steps each, too uneven to tell (bfloat16: 0."
    )
    assert chosen.reason.endswith(
        " times the speed of plain float32); plain stays and is not remembered"
    )


def test_load_from_outside_seldom_makes_a_choice_between_equals():
    """Steps that are cut off at random, as on cores that others use: of 300 measurements of four
    equal ways hardly one in 25 finds a difference, and none finds a large one."""
    chance = random.Random(0)
    wrong = []
    for _ in range(300):
        noise = lambda number: 1 + chance.expovariate(1.0)  # noqa: E731
        choices, time_step, _ = scripted(plain=noise, last=noise, half=noise, both=noise)
        chosen, _ = fastest(choices, time_step)
        wrong += [chosen] if (chosen.name, chosen.channels_last) != ("float32", False) else []
    assert len(wrong) <= 12
    assert not any(" 2." in w.reason or " 5." in w.reason for w in wrong)


def test_of_ways_that_are_alike_the_plainer_one_is_taken():
    choices, time_step, _ = scripted(
        plain=steady(3.0), last=steady(2.9), half=steady(1.05), both=steady(1.0)
    )
    chosen, sure = fastest(choices, time_step)
    assert (chosen.name, chosen.channels_last, sure) == ("bfloat16", False, True)
    assert "2.86 times" in chosen.reason


def test_what_is_taken_is_not_sure_while_another_may_be_faster_still():
    uneven = {number: 0.2 if number % 2 else 1.2 for number in range(1, 9)}
    choices, time_step, _ = scripted(
        plain=steady(2.0), last=steady(1.0), half=disturbed(1.0, uneven)
    )
    chosen, sure = fastest(choices, time_step)
    assert (chosen.name, chosen.channels_last, sure) == ("float32", True, False)
    assert chosen.reason.endswith("(not remembered: bfloat16 may be faster still)")


def test_one_choice_is_not_measured():
    def never(choice: Precision) -> float:
        raise AssertionError("measured")

    assert fastest([BOTH], never) == (BOTH, True)


def test_a_choice_that_cannot_run_is_never_taken():
    choices, time_step, order = scripted(plain=steady(1.0), half=steady(math.inf))
    chosen, sure = fastest(choices, time_step)
    assert chosen.name == "float32" and sure
    assert order.count("half") == 1


def test_a_clock_that_stands_still_divides_nothing():
    choices, time_step, _ = scripted(plain=steady(0.0), half=steady(0.0))
    assert fastest(choices, time_step)[0].name == "float32"


# --- what there is ----------------------------------------------------------------------------


def test_candidates_are_the_plain_step_first(monkeypatch: pytest.MonkeyPatch):
    images, rows = nn.Conv2d(1, 1, 3), nn.Linear(1, 1)
    monkeypatch.setattr(runtime, "fast_dtypes", lambda device: (torch.bfloat16, torch.float16))
    assert candidates("auto", CPU, images, "auto") == [PLAIN, LAST, HALF, BOTH]
    assert candidates("auto", CPU, images, False) == [PLAIN, HALF]
    assert candidates("auto", CPU, images, True) == [LAST, BOTH]
    assert candidates("auto", CPU, rows, "auto") == [PLAIN, HALF]
    assert candidates("float16", CPU, rows, "auto") == [Precision(name="float16")]
    assert candidates("bfloat16", CPU, images, "auto") == [HALF, BOTH]
    monkeypatch.setattr(runtime, "fast_dtypes", lambda device: ())
    assert candidates("auto", CPU, rows, "auto") == [PLAIN]


def test_without_measuring_the_host_computes_in_float32(monkeypatch: pytest.MonkeyPatch):
    assert by_rule("auto", CPU).name == "float32"
    assert by_rule("bfloat16", CPU, channels_last=True) == BOTH
    monkeypatch.setattr(runtime, "is_host", lambda device: False)
    monkeypatch.setattr(runtime, "fast_dtypes", lambda device: (torch.bfloat16,))
    chosen = by_rule("auto", CPU)
    assert chosen.name == "bfloat16" and "computes bfloat16 in hardware" in chosen.reason
    monkeypatch.setattr(runtime, "fast_dtypes", lambda device: ())
    assert by_rule("auto", CPU).name == "float32"


def test_what_a_device_cannot_do_is_refused_with_what_it_can(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runtime, "autocast_dtypes", lambda device: (torch.float16,))
    with pytest.raises(
        UsageError, match="cpu cannot compute in bfloat16; it can in float32, float16"
    ):
        check("bfloat16", CPU)
    with pytest.raises(UsageError, match="unknown precision 'double'"):
        check("double", CPU)
    with pytest.raises(UsageError, match="unknown precision"):
        Precision(name="auto")


def test_json_and_back():
    for choice in (PLAIN, BOTH, Precision(name="float16", reason="ä")):
        assert Precision.from_json(json.loads(json.dumps(choice.to_json()))) == choice
    assert str(BOTH) == "bfloat16, channels last"
    assert str(Precision(name="float32", reason="why")) == "float32 - why"


# --- choosing leaves no trace -----------------------------------------------------------------


class Buffered(nn.Module):
    """Puts a new tensor in its buffer's place at each pass, as some averages do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.register_buffer("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + x.shape[0]
        out: torch.Tensor = self.layer(x)
        return out


def test_undisturbed_puts_all_back():
    model, other = nn.Sequential(Buffered(), nn.BatchNorm1d(3)), nn.Linear(6, 1)
    model[1].eval()
    kept = [p.grad for p in (*model.parameters(), *other.parameters())]
    weight = other.weight
    weight.grad = torch.full_like(weight, 7.0)
    gradient, buffer = weight.grad, model[0].seen
    statistics = model[1].running_mean.clone()
    with undisturbed(model, other):
        model.train()
        x = torch.randn(8, 6)
        (model(x).sum() + other(x).sum()).backward()
        assert model[0].seen.item() == 8 and weight.grad is not gradient
        assert not torch.equal(model[1].running_mean, statistics)
    assert model[0].seen is buffer and buffer.item() == 0
    assert torch.equal(model[1].running_mean, statistics)
    assert weight.grad is gradient and gradient[0, 0] == 7
    assert [p.grad for p in model.parameters()] == kept[:4]
    assert model[0].training and not model[1].training


def pictures(count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(4, 2, 8, 8), torch.tensor([0, 1, 2, 1])) for _ in range(count)]


def cnn() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(4 * 36, 3),
    )


@pytest.fixture
def fast_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "fast_dtypes", lambda device: (torch.bfloat16,))


def timed_as(monkeypatch: pytest.MonkeyPatch, seconds: dict[tuple[str, bool], float]) -> list[Any]:
    """Steps are taken in earnest and said to have lasted as given."""
    real, asked = probe.time_step, []

    def time_step(run: Any, training: Any, batch: Any, choice: Precision) -> float:
        real(run, training, batch, choice)
        asked.append((choice.name, choice.channels_last))
        return seconds[choice.name, choice.channels_last]

    monkeypatch.setattr(probe, "time_step", time_step)
    return asked


EVEN = {
    ("float32", False): 1.0,
    ("float32", True): 1.0,
    ("bfloat16", False): 1.0,
    ("bfloat16", True): 1.0,
}


def test_auto_that_keeps_float32_trains_as_float32(
    monkeypatch: pytest.MonkeyPatch, fast_bfloat16: None
):
    given = pictures()
    expected = trainer(cnn())
    whole = expected.fit(given, epochs=2)
    asked = timed_as(monkeypatch, EVEN)
    stream, options = told(precision="auto", channels_last="auto")
    training = trainer(cnn(), **options)
    result = training.fit(given, epochs=2)
    assert len(set(asked)) == 4
    assert_same(state(training.model), state(expected.model))
    assert losses(result) == losses(whole)
    assert "Precision: float32 - auto measured 4 ways" in stream.getvalue()


def test_auto_takes_what_is_faster(monkeypatch: pytest.MonkeyPatch, fast_bfloat16: None):
    timed_as(monkeypatch, EVEN | {("bfloat16", True): 0.4})
    training = trainer(cnn(), precision="auto", channels_last="auto")
    result = training.fit(pictures(), epochs=1)
    assert (result.precision.name, result.precision.channels_last) == ("bfloat16", True)
    weight = training.model[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert all(p.dtype == torch.float32 for p in training.model.parameters())


def test_a_choice_is_remembered_so_that_two_runs_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast_bfloat16: None
):
    monkeypatch.setenv("HASTEN_CACHE_DIR", str(tmp_path))
    given = pictures()
    timed_as(monkeypatch, EVEN | {("bfloat16", False): 0.5})
    first = trainer(cnn(), precision="auto", channels_last="auto")
    first.fit(given, epochs=2)
    asked = timed_as(monkeypatch, EVEN)  # would choose otherwise
    second = trainer(cnn(), precision="auto", channels_last="auto")
    result = second.fit(given, epochs=2)
    assert result.precision.name == "bfloat16"
    (file,) = (tmp_path / "precision").iterdir()
    assert result.precision.reason.endswith(f" (remembered; to measure anew, delete {file})")
    assert set(asked) <= {("bfloat16", False)}  # the saturation is measured at the end
    assert_same(state(first.model), state(second.model))


def test_what_was_too_uneven_to_tell_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast_bfloat16: None
):
    monkeypatch.setenv("HASTEN_CACHE_DIR", str(tmp_path))
    chance = random.Random(5)
    monkeypatch.setattr(probe, "time_step", lambda *_: chance.uniform(1, 4))
    stream, options = told(precision="auto", channels_last=False)
    result = trainer(cnn(), **options).fit(pictures(1), epochs=1)
    assert result.precision.name == "float32"
    assert (
        "Precision: float32 - auto measured 2 ways, 8 steps each, too uneven" in stream.getvalue()
    )
    assert not (tmp_path / "precision").exists()
    timed_as(monkeypatch, EVEN | {("bfloat16", False): 0.5})
    again = trainer(cnn(), precision="auto", channels_last=False).fit(pictures(1), epochs=1)
    assert again.precision.name == "bfloat16"


class OnlyFloat32(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        if out.dtype != torch.float32:
            raise RuntimeError('"some_kernel" not implemented for BFloat16')
        return out


def test_an_operator_without_bfloat16_leaves_float32(fast_bfloat16: None):
    result = trainer(OnlyFloat32(), precision="auto").fit(loader(), epochs=1)
    assert result.precision.name == "float32"


def test_bfloat16_that_was_asked_for_and_cannot_be_says_which_operator_lacks_it():
    class Pictured(OnlyFloat32):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Conv2d(2, 1, 8), nn.Flatten())  # type: ignore[assignment]

    with pytest.raises(RuntimeError, match="not implemented for BFloat16"):
        trainer(Pictured(), precision="bfloat16", channels_last="auto").fit(pictures(), epochs=1)


def test_an_error_of_the_model_itself_is_not_swallowed(fast_bfloat16: None):
    class Broken(OnlyFloat32):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("the model is wrong")

    with pytest.raises(RuntimeError, match="the model is wrong"):
        trainer(Broken(), precision="auto").fit(loader(), epochs=1)


def test_a_resumed_run_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast_bfloat16: None
):
    monkeypatch.setenv("HASTEN_CACHE_DIR", "off")
    timed_as(monkeypatch, EVEN | {("bfloat16", False): 0.5})
    trainer(cnn(), precision="auto", folder=tmp_path / "run").fit(pictures(), epochs=1)
    asked = timed_as(monkeypatch, EVEN)
    again = trainer(cnn(), precision="auto", folder=tmp_path / "run", resume=True)
    assert again.fit(pictures(), epochs=2).precision.name == "bfloat16"
    assert set(asked) <= {("bfloat16", False)}


# --- remembering ------------------------------------------------------------------------------


def key(**changes: Any) -> str:
    settings = RunSettings(**changes.pop("settings", {}))
    facts: dict[str, Any] = {
        "modules": [mlp()],
        "batch": batches([8])[0],
        "settings": settings,
        "choices": [PLAIN, HALF],
    } | changes
    return remembered.key(CPU, **facts)


def test_what_a_choice_depends_on():
    assert key() == key()
    others = [
        key(modules=[nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))]),
        key(modules=[nn.Sequential(*list(mlp())[:2], nn.GELU(), *list(mlp())[3:])]),
        key(modules=[mlp(), nn.CrossEntropyLoss(weight=torch.ones(3))]),
        key(batch=batches([9])[0]),
        key(choices=[PLAIN, LAST]),
        key(settings={"compile": True}),
    ]
    assert len({key(), *others}) == len(others) + 1


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"name": "float64", "channels_last": false}', '{"name": 3}']
)
def test_a_broken_memory_is_no_memory(content: str):
    remembered.keep("a", HALF)
    place = remembered.folder()
    assert place is not None
    assert remembered.recall("a", [PLAIN, HALF]) is not None
    (place / "precision" / "a.json").write_text(content)
    assert remembered.recall("a", [PLAIN, HALF]) is None


def test_only_what_there_is_to_choose_from_is_believed():
    remembered.keep("a", Precision(name="float16"))
    assert remembered.recall("a", [PLAIN, HALF]) is None


def test_where_nothing_can_be_kept_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HASTEN_CACHE_DIR", str(tmp_path / "file" / "below"))
    remembered.keep("a", HALF)
    assert remembered.recall("a", [HALF]) is None
    monkeypatch.setenv("HASTEN_CACHE_DIR", "off")
    remembered.keep("a", HALF)
    assert remembered.folder() is None and remembered.recall("a", [HALF]) is None
    monkeypatch.delenv("HASTEN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert remembered.folder() == tmp_path / "xdg" / "hasten"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert remembered.folder() == tmp_path / ".cache" / "hasten"


# --- training at half precision ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_half_precision_learns_and_keeps_float32_weights(name: str, tmp_path: Path):
    training = trainer(precision=name, folder=tmp_path / "run")
    result = training.fit(loader(), loader(), epochs=6)
    assert result.history[-1].loss < result.history[0].loss
    assert {p.dtype for p in training.model.parameters()} == {torch.float32}
    assert result.precision.name == name
    assert training.run is not None
    assert (training.run.scaler is not None) == (name == "float16")


class Overflows(nn.Module):
    """Its gradient is past float16's range at the first scale of the scaler."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x * 50)
        return out


def test_float16_skips_steps_that_overflow_and_goes_on():
    model = Overflows()
    before = model.layer.weight.detach().clone()
    training = trainer(model, precision="float16", optimizer=lambda p: torch.optim.SGD(p, lr=1e-4))
    training.fit(batches([8]), epochs=1)
    run = training.run
    assert run is not None and run.scaler is not None
    assert torch.equal(model.layer.weight, before)
    assert run.scaler.get_scale() == 2.0**15  # halved once
    assert run.global_step == 1
    training.fit(batches([8] * 12), epochs=1)
    assert not torch.equal(model.layer.weight, before)


def test_clipping_sees_the_gradients_without_their_scale():
    models = []
    for name in ("float32", "float16"):
        training = trainer(
            nn.Linear(6, 3, bias=False) if not models else models[0],
            precision=name,
            clip_norm=1e-3,
            optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
        )
        before = training.model.weight.detach().clone()
        training.fit(batches([8]), epochs=1)
        assert (training.model.weight - before).norm().item() == pytest.approx(1e-3, rel=0.02)
        models.append(training.model)


def test_evaluation_computes_at_the_runs_precision():
    seen: list[torch.dtype] = []

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x)
            seen.append(out.dtype)
            return out

    trainer(Watching(), precision="bfloat16").evaluate(batches([4, 4]))
    assert seen == [torch.bfloat16] * 2


def test_unknown_words_are_refused_at_once() -> None:
    for options in ({"precision": "half"}, {"channels_last": "maybe"}):
        with pytest.raises(UsageError, match=next(iter(options))):
            hasten.Run(progress="off", device="cpu", **options)  # type: ignore[arg-type]
    assert precision.WORTH > 1


@pytest.fixture(autouse=True)
def autocast_is_left_off() -> Iterator[None]:
    yield
    assert not torch.is_autocast_enabled("cpu")
