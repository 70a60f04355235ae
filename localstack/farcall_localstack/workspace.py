"""Paths in a checkout. The offline tier needs a checkout: it synthesises the app from its sources."""

from __future__ import annotations

from pathlib import Path
from typing import Final

WORKSPACE: Final = Path(__file__).resolve().parents[2]
PLUGIN: Final = WORKSPACE / "localstack" / "plugin"
CONSTRAINTS: Final = WORKSPACE / "localstack" / "constraints.txt"
# LocalStack's own Python environment: it pins versions that the project must not be pinned to.
ENVIRONMENT: Final = WORKSPACE / ".venv-localstack"
ASSEMBLIES: Final = WORKSPACE / "cdk.out" / "localstack"
# The inputs of a synthesised template.
SOURCES: Final = tuple(WORKSPACE / name for name in ("common", "forwarder_fargate", "infra", "lambdas", "uv.lock"))
