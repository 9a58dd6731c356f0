"""The states of the global generators: saved, compared and put back, whoever set them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from hasten.feed import randomness


def test_the_half_of_a_pair_of_normals_that_was_put_back_is_seen() -> None:
    """The generator's own memory does not tell of it: it is the same with and without."""
    np.random.seed(3)
    np.random.standard_normal()
    with_half = np.random.get_state()
    np.random.standard_normal()
    without = randomness.save()
    np.random.set_state(with_half)
    assert randomness.touched(without) == {"numpy"}
    saved = randomness.save()
    expected = np.random.standard_normal(3).tolist()
    randomness.restore(saved)
    assert np.random.standard_normal(3).tolist() == expected


def test_without_knowing_where_the_half_lies_states_are_compared_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert randomness.half_place() is not None  # else this would be tried by the test above
    monkeypatch.setattr(randomness, "half_place", lambda: None)
    monkeypatch.setattr(randomness, "_numpy", randomness._NumpyState())
    test_the_half_of_a_pair_of_normals_that_was_put_back_is_seen()


def test_each_draw_of_each_generator_is_seen_and_can_be_undone() -> None:
    draws = {
        "torch": lambda: torch.rand(1).item(),
        "random": random.random,
        "numpy": np.random.rand,
    }
    for name, draw in draws.items():
        before = randomness.save()
        assert randomness.touched(before) == frozenset()
        first = draw()
        assert randomness.touched(before) == {name}
        assert draw() != first
        randomness.restore(before)
        assert randomness.touched(before) == frozenset()
        assert draw() == first


def test_the_half_of_a_pair_of_python_s_normals_is_seen() -> None:
    random.seed(3)
    random.gauss(0, 1)
    with_half = randomness.save()
    second = random.gauss(0, 1)  # which draws nothing
    assert randomness.touched(with_half) == {"random"}
    randomness.restore(with_half)
    assert random.gauss(0, 1) == second


def test_python_s_generator_is_asked_where_its_words_are_not_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert randomness._python._start, "found in CPython: else nothing is known of its speed"
    asked = randomness._PythonState()
    asked._start = 0
    monkeypatch.setattr(randomness, "_python", asked)
    test_each_draw_of_each_generator_is_seen_and_can_be_undone()
    test_the_half_of_a_pair_of_python_s_normals_is_seen()


def _draws() -> list[Any]:
    normal = [random.gauss(0, 1), float(np.random.standard_normal()), float(torch.randn(()))]
    return [*normal, random.random(), float(np.random.random()), float(torch.rand(()))]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("halves", [0, 1])
def test_an_image_that_is_put_back_is_all_of_the_states(
    known: bool, halves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:  # of another interpreter, say
        monkeypatch.setattr(randomness._python, "_writable", False)
        monkeypatch.setattr(randomness._numpy, "_sought", True)
        monkeypatch.setattr(randomness._numpy, "_half", None)
    before = randomness.save()
    try:
        for _ in range(700):  # past a round of words
            random.random()
        for _ in range(halves):
            _draws()
        kept, saved = randomness.image(), randomness.save()
        wanted = [_draws() for _ in range(3)]
        assert randomness.touched(saved) == randomness.ALL
        randomness.put(kept)
        assert not randomness.touched(saved)
        assert [_draws() for _ in range(3)] == wanted
        randomness.seed(5)
        randomness.put(kept)
        assert [_draws() for _ in range(3)] == wanted
    finally:
        randomness.restore(before)


def test_an_image_is_put_back_in_another_generator_of_numpy_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, own = randomness.save(), np.random.get_bit_generator()
    try:
        np.random.standard_normal()
        kept = randomness.image()
        wanted = _draws()
        np.random.set_bit_generator(np.random.MT19937(3))
        randomness.put(kept)
        assert _draws() == wanted
        np.random.set_bit_generator(np.random.PCG64(3))
        pcg = randomness.image()
        other = _draws()
        randomness.put(pcg)
        assert _draws() == other
    finally:
        np.random.set_bit_generator(own)
        randomness.restore(before)
