"""What every test of training begins with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No choice of precision remembered from elsewhere, and the same initial weights each time."""
    monkeypatch.setenv("HASTEN_CACHE_DIR", str(tmp_path / "cache"))
    torch.manual_seed(0)
