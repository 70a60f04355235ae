"""Report of a game day: a line with the figures of each event."""

from __future__ import annotations

import pytest

from tests.support.gameday import FIGURES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, figures in FIGURES.items():
        terminalreporter.write_line(f"{name}: {', '.join(f'{key} {value}' for key, value in figures.items())}")
