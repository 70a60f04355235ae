"""Metadata of the published packages: one version, a licence, a description, and siblings of the same version."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import farcall

ROOT = Path(__file__).parents[2]
PUBLISHED = ("analytics", "common", "endpoint", "forwarder_fargate", "infra", "lambdas", "local", "sdk")


def _project(part: str) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / part / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def test_every_package_is_published_or_is_marked_as_private() -> None:
    private = {
        path.parent.name
        for path in ROOT.glob("*/pyproject.toml")
        if "Private :: Do Not Upload" in _project(path.parent.name).get("classifiers", [])
    }
    assert private == {path.parent.name for path in ROOT.glob("*/pyproject.toml")} - set(PUBLISHED)


def test_the_version_is_the_same_everywhere() -> None:
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert {_project(part)["version"] for part in PUBLISHED} == {workspace}
    assert farcall.__version__ == workspace
    chart = yaml.safe_load((ROOT / "endpoint" / "chart" / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (workspace, workspace)


@pytest.mark.parametrize("part", PUBLISHED)
def test_siblings_are_required_in_the_same_version(part: str) -> None:
    """Agent and manager refuse one another otherwise, and an upgrade of one package would leave the others old."""
    project = _project(part)
    requirements = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    siblings = [each for each in itertools.chain(*requirements) if each.startswith("farcall-")]
    assert siblings or part == "common"
    for sibling in siblings:
        assert re.fullmatch(rf"farcall-[a-z]+(\[[a-z0-9,]+\])?=={re.escape(project['version'])}", sibling)


def test_the_readme_shows_the_commands_of_the_gate() -> None:
    gate = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line for line in gate.splitlines() if re.fullmatch("make (demo|test)", line)]
    assert commands == ["make demo", "make test"]
    assert [line for line in commands if not re.search(rf"^{line}\b", readme, re.M)] == []


@pytest.mark.parametrize("part", PUBLISHED)
def test_a_package_has_licence_and_description(part: str) -> None:
    project = _project(part)
    assert (ROOT / part / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert project["readme"] == "README.md"
    # A package's page has no other files for a relative link.
    assert re.findall(r"\]\((?!https://)[^)]*\)", (ROOT / part / "README.md").read_text(encoding="utf-8")) == []
    assert project["authors"]
    assert project["keywords"]
    assert "Typing :: Typed" in project["classifiers"]
