"""The functions of the project, called through the cloud tier."""

from __future__ import annotations

import pytest
from spectra import peak, smooth

import farcall

WAIT_S = 60.0  # for a call, on a slow CI machine


def test_a_peak_is_found(executor: farcall.Executor) -> None:
    assert executor.submit(peak, [1.0, 2.0, 3.0], [4.0, 9.0, 5.0]).result(timeout=WAIT_S) == 2.0


def test_a_spectrum_is_smoothed(executor: farcall.Executor) -> None:
    spectra = [[0.0, 3.0, 0.0], [3.0, 3.0, 3.0]]
    assert list(executor.map(smooth, spectra, timeout=WAIT_S)) == [[1.5, 1.0, 1.5], [3.0, 3.0, 3.0]]


def test_an_error_reaches_the_caller(executor: farcall.Executor) -> None:
    with pytest.raises(farcall.TaskFailed, match="1 energies, 0 counts"):
        executor.submit(peak, [1.0], []).result(timeout=WAIT_S)
