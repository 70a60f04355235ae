"""TaPS' command line with our plugins: ``python -m benchmarks.taps.run --app cholesky --engine.executor farcall …``."""

from __future__ import annotations

import sys

from taps.run.main import main

import benchmarks.taps.plugins  # noqa: F401 - it registers them

if __name__ == "__main__":
    sys.exit(main())
