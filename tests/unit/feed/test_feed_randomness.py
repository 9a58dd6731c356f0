"""The states of the global generators: saved, compared and put back, whoever set them."""

from __future__ import annotations

import random

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
