"""Cloud assembly on disk: its stacks in order, and their assets."""

from __future__ import annotations

import dataclasses
import graphlib
import json
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ACCOUNT: Final = "000000000000"
REGION: Final = "us-east-1"


@dataclasses.dataclass(frozen=True)
class Stack:
    """One stack: its name in CloudFormation, and the paths of its template and of its list of assets."""

    artifact: str
    name: str
    template: Path
    assets: Path
    dependencies: tuple[str, ...]


def stack_names(assembly: Path) -> tuple[str, ...]:
    """The names of the assembly's stacks in the order in which they are created."""
    return tuple(stack.name for stack in in_order(assembly))


def in_order(assembly: Path) -> Iterator[Stack]:
    """The assembly's stacks, dependencies first."""
    artifacts = json.loads((assembly / "manifest.json").read_text(encoding="utf-8"))["artifacts"]
    stacks = {
        key: Stack(
            artifact=key,
            name=artifact["properties"].get("stackName", key),
            template=assembly / artifact["properties"]["templateFile"],
            assets=assembly / f"{key}.assets.json",
            dependencies=tuple(artifact.get("dependencies", ())),
        )
        for key, artifact in artifacts.items()
        if artifact["type"] == "aws:cloudformation:stack"
    }
    graph = {key: [name for name in stack.dependencies if name in stacks] for key, stack in stacks.items()}
    for key in graphlib.TopologicalSorter(graph).static_order():
        yield stacks[key]


def assets(assembly: Path, stack: Stack) -> Iterator[tuple[Path, str, str]]:
    """The assets of a stack: a file or directory, its bucket and its key. The template itself is passed inline."""
    files = json.loads(stack.assets.read_text(encoding="utf-8"))["files"]
    for file in files.values():
        source = assembly / file["source"]["path"]
        if source != stack.template:
            destination = next(iter(file["destinations"].values()))
            yield source, _resolved(destination["bucketName"]), destination["objectKey"]


def is_whole(assembly: Path) -> bool:
    """Whether the assembly has all files that a deployment needs."""
    try:
        return all(
            source.exists() or _archive(source).exists()
            for stack in in_order(assembly)
            for source, _, _ in assets(assembly, stack)
        )
    except (OSError, ValueError, KeyError):
        return False


def _resolved(name: str) -> str:
    return name.replace("${AWS::AccountId}", ACCOUNT).replace("${AWS::Region}", REGION)


def zipped(directory: Path) -> Path:
    """The directory as a zip file next to it, created once per assembly."""
    archive = _archive(directory)
    if not archive.exists():
        with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
            draft = Path(temporary) / archive.name
            with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as zipped:
                for path in sorted(directory.rglob("*")):
                    if path.is_file():
                        zipped.write(path, path.relative_to(directory))
            draft.replace(archive)
    return archive


def _archive(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.zip")
