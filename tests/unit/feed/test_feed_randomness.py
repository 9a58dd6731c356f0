"""The states of the global generators: saved, compared and put back, whoever set them."""

from __future__ import annotations

import numpy as np
import pytest

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
