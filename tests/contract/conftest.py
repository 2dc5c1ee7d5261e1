"""Ranks of the contract tests use all cores: races between them are what these tests should find."""

from contextlib import nullcontext

import pytest

import support


@pytest.fixture(autouse=True)
def all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks that are threads run at the same time."""
    monkeypatch.setattr(support, "one_core", nullcontext)
