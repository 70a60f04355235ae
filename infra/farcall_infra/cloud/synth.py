"""Synthesis of a deployment's templates in a separate process: without bundles, checks and an account."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farcall_common.errors import ConfigurationError
from farcall_infra.bundles import WORKSPACE


def synthesized_templates(context: Mapping[str, str]) -> Mapping[str, Mapping[str, Any]]:
    """The templates by stack, for ``context`` on top of that in ``cdk.json``.

    :raises ConfigurationError: if the app does not synthesise.
    """
    committed = json.loads((WORKSPACE / "cdk.json").read_text(encoding="utf-8"))["context"]
    with tempfile.TemporaryDirectory(prefix="farcall-synth-") as directory:
        environment = {
            **os.environ,
            "CDK_OUTDIR": directory,
            "CDK_CONTEXT_JSON": json.dumps({**committed, **context, "aws:cdk:bundling-stacks": []}),
            "CDK_VALIDATION": "false",  # cdk-nag runs in the deployment; these templates are only read
        }
        done = subprocess.run(
            [sys.executable, "-m", "farcall_infra"], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise ConfigurationError(f"the app does not synthesise: {done.stderr.strip()[-2000:]}")
        return {
            path.name.removesuffix(".template.json"): json.loads(path.read_text(encoding="utf-8"))
            for path in sorted(Path(directory).glob("*.template.json"))
        }
