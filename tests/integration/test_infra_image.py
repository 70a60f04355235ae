"""The Dockerfile of the forwarder, tested without docker: its lines are parsed, and the commands that create files
run."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import uv

from farcall_infra.bundles import FORWARDER, HOST
from farcall_infra.ca_bundle import CA_BUNDLE_FILE
from farcall_infra.profiles import load_profile, profile_names
from tests.certificates import Authority
from tests.waiting import WAIT_S

WORKSPACE = Path(__file__).parents[2]
_DOCKERFILE = WORKSPACE / "forwarder_fargate" / "Dockerfile"
_KNOWN = {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "ENTRYPOINT"}


def _instructions() -> list[tuple[str, str]]:
    """The instructions and their arguments, in order; ours are on one line each."""
    lines = [line for line in _DOCKERFILE.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def _stages() -> list[list[tuple[str, str]]]:
    stages: list[list[tuple[str, str]]] = []
    for instruction in _instructions():
        if instruction[0] == "FROM":
            stages.append([])
        stages[-1].append(instruction)
    return stages


def test_both_stages_use_the_stock_image_by_digest() -> None:
    assert {word for word, _ in _instructions()} <= _KNOWN
    images = {shlex.split(rest)[0] for word, rest in _instructions() if word == "FROM"}
    assert images == {load_profile(name).forwarder.image for name in profile_names()}
    assert all("@sha256:" in image for image in images)


def test_the_image_starts_the_forwarder_with_its_code_on_the_path() -> None:
    _, final = _stages()
    assert final[1:] == [
        ("COPY", "--from=build /app /app"),
        ("ENV", "PYTHONPATH=/app PYTHONUNBUFFERED=1"),
        ("ENTRYPOINT", '["python", "-m", "farcall_forwarder"]'),
    ]


def test_uv_is_installed_with_the_hashes_of_a_clone() -> None:
    copied, installed = _stages()[0][1:3]
    assert copied == ("COPY", "uv-requirements.txt /tmp/")
    assert installed == ("RUN", "pip install --quiet --no-cache-dir --require-hashes -r /tmp/uv-requirements.txt")


@pytest.mark.slow
def test_the_build_commands_create_the_bundles_files(tmp_path: Path) -> None:
    build, _ = _stages()
    context, app, bundle = tmp_path / "context", tmp_path / "app", tmp_path / "bundle"
    context.mkdir()
    for name in ("pyproject.toml", "uv.lock"):
        shutil.copy(WORKSPACE / name, context)
    for project in WORKSPACE.glob("*/pyproject.toml"):
        sources = project.parent.name in ("common", "forwarder_fargate")
        target = context / project.parent.name
        if sources:
            shutil.copytree(project.parent, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.mkdir()
            shutil.copy(project, target)
    authorities = Authority().write(context / CA_BUNDLE_FILE).read_text(encoding="utf-8")
    path = os.pathsep.join([str(Path(uv.find_uv_bin()).parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    commands = [rest for word, rest in build if word == "RUN"]
    assert commands[0].startswith("pip install")  # uv, which is installed here
    for command in commands[1:]:
        local = command.replace("/app", str(app))
        subprocess.run(
            ["sh", "-ec", local], check=True, cwd=context, env={**os.environ, "PATH": path}, timeout=3 * WAIT_S
        )
    dataclasses.replace(FORWARDER, texts=((CA_BUNDLE_FILE, authorities),)).build(bundle, platform=HOST)
    assert (app / CA_BUNDLE_FILE).read_text(encoding="utf-8") == authorities
    assert _files(app) == _files(bundle)


def _files(root: Path) -> set[str]:
    """Names of all files, without those that differ between installations."""
    return {
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name not in ("RECORD", ".lock")
    }
