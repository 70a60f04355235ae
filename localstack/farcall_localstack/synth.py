"""Synthesis of the offline tier's cloud assembly, cached per state of the sources."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from farcall_common.errors import ConfigurationError
from farcall_localstack.assembly import is_whole
from farcall_localstack.environment import ASSEMBLIES, WORKSPACE, locked

_SOURCES: Final = tuple(WORKSPACE / name for name in ("common", "forwarder_fargate", "infra", "lambdas", "uv.lock"))
_KEPT: Final = 5  # assemblies: tests use three profiles and a second deployment at once; one older is kept
#: A setting with the path of a file, whose contents go into the bundles.
_FILE_SETTING: Final = "database.authorities"
_IN_USE_S: Final = 900.0  # a deployment of an assembly may take so long


def ensure_assembly(
    *,
    name: str = "farcall",
    profile: str = "lab",
    target: str = "localstack",
    settings: Mapping[str, str] | None = None,
    directory: Path = ASSEMBLIES,
) -> Path:
    """The directory of an assembly for ``-c target=…``, from an earlier run if no source has changed.

    ``settings`` override the profile's values, by ``section.key``.

    :raises ConfigurationError: if the app does not synthesise.
    """
    context = {"name": name, "profile": profile, "target": target, **(settings or {})}
    if file := context.get(_FILE_SETTING):
        context[_FILE_SETTING] = str(Path(file).resolve())  # the app runs in the workspace
    assembly = directory / _digest(context)
    with locked(directory / "synth"):
        if not is_whole(assembly):
            _remove(assembly)
            with tempfile.TemporaryDirectory(dir=directory) as temporary:
                fresh = Path(temporary) / "cdk.out"
                _synthesize(fresh, context)
                _link_archives(fresh, directory)
                fresh.rename(assembly)
            _remove_old(directory)
        os.utime(assembly)
    return assembly


def _synthesize(out: Path, context: dict[str, str]) -> None:
    """Run the app as the CDK command line does: two variables pass the output directory and the context."""
    environment = {
        **os.environ,
        "CDK_OUTDIR": str(out),
        "CDK_CONTEXT_JSON": json.dumps(context),
        "CDK_VALIDATION": "false",  # the contract tests validate the templates; here it would only cost time
    }
    done = subprocess.run(
        [sys.executable, "-m", "farcall_infra"], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ConfigurationError(
            f"synth failed: {done.stderr.strip()[-4000:]}",
            hint="New bundles need a network, or uv's cache, and free disk space.",
        )


def _link_archives(assembly: Path, directory: Path) -> None:
    """Link zip files of other assemblies: their names are hashes of their contents."""
    for bundle in assembly.glob("asset.*"):
        for archive in directory.glob(f"*/{bundle.name}.zip"):
            os.link(archive, assembly / archive.name)
            break


def _digest(context: dict[str, str]) -> str:
    digest = hashlib.sha256(f"{sys.version}\n{json.dumps(context, sort_keys=True)}".encode())
    file = Path(context.get(_FILE_SETTING, ""))
    if file.is_file():  # for any other path the app reports an error
        digest.update(file.read_bytes())
    for path in _source_files():
        digest.update(f"\n{path.relative_to(WORKSPACE)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _source_files() -> Iterator[Path]:
    for source in _SOURCES:
        candidates = sorted(source.rglob("*")) if source.is_dir() else [source]
        for path in candidates:
            generated = any(part == "__pycache__" or part.endswith(".egg-info") for part in path.parts)
            if path.is_file() and not generated:
                yield path


def _remove_old(directory: Path) -> None:
    assemblies = [path for path in directory.iterdir() if (path / "manifest.json").exists()]
    assemblies.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for old in assemblies[_KEPT:]:
        if time.time() - old.stat().st_mtime > _IN_USE_S:
            _remove(old)


def _remove(assembly: Path) -> None:
    """Remove an assembly atomically: rename it first, so that no other process sees a part of it."""
    if assembly.exists():
        with tempfile.TemporaryDirectory(dir=assembly.parent) as temporary:
            assembly.rename(Path(temporary) / assembly.name)
