"""Chaos test, scaled down: the phases that take seconds. `make test-chaos` runs all of them in full."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import run_phases, table


@pytest.mark.parametrize("name", ["kills", "network", "answers"])
def test_nothing_is_lost_and_nothing_starts_twice(name: str, tmp_path: Path) -> None:
    [result] = run_phases([name], directory=tmp_path, tasks=600, short=True)
    assert not result.broken, table([result])
