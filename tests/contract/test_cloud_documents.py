"""The pages about deploying and operating name commands, settings and metrics that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from farcall_infra.cloud.cli import app
from farcall_infra.profiles import setting_names
from tests.contract.templates import Templates, resources

_WORKSPACE = Path(__file__).resolve().parents[2]
_PAGES = ("docs/deploy.md", "docs/operations.md", "infra/README.md")


@pytest.fixture(params=_PAGES)
def page(request: pytest.FixtureRequest) -> str:
    return (_WORKSPACE / str(request.param)).read_text(encoding="utf-8")


def _commands() -> Iterator[str]:
    for command in app.registered_commands:
        assert command.callback is not None
        yield command.name or command.callback.__name__


def test_commands_exist(page: str) -> None:
    named = set(re.findall(r"farcall\s+cloud\s+([a-z]+)", page))
    assert named <= set(_commands())


def test_every_command_is_explained() -> None:
    text = " ".join((_WORKSPACE / path).read_text(encoding="utf-8") for path in _PAGES)
    assert {name for name in _commands() if f"farcall cloud {name}" not in text} == set()


def test_settings_exist(page: str) -> None:
    sections = "|".join(sorted({setting.partition(".")[0] for setting in setting_names()}))
    named = set(re.findall(rf"(?:`|-c )((?:{sections})\.[a-z_]+)", page))
    assert named <= setting_names()


def test_files_exist(page: str, request: pytest.FixtureRequest) -> None:
    here = (_WORKSPACE / request.node.callspec.params["page"]).parent
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page):
        assert (here / link).exists(), link


def test_every_metric_is_explained(aws: Templates) -> None:
    text = (_WORKSPACE / "docs" / "operations.md").read_text(encoding="utf-8")
    for _, each in resources(aws, "AWS::Logs::MetricFilter"):
        (made,) = each["MetricTransformations"]
        assert f"| `{made['MetricName']}` |" in text
