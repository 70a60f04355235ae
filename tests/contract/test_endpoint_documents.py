"""What the administrator's guide says about codes is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import typer.main

from farcall_endpoint.app import cli
from farcall_endpoint.contracts import outcomes

_PAGES = Path(__file__).parents[2] / "docs" / "endpoint"
_NAMES = ("administrator", "scaling", "limits", "isolation", "files", "environments", "troubleshooting")
GUIDE = "".join((_PAGES / f"{name}.md").read_text(encoding="utf-8") for name in _NAMES)


def test_every_error_code_of_a_task_is_explained() -> None:
    codes = {each.code for each in vars(outcomes).values() if isinstance(each, outcomes.Outcome)}
    assert len(codes) >= 14
    assert sorted(code for code in codes if f"`{code}`" not in GUIDE) == []


def test_every_command_is_explained() -> None:
    group = typer.main.get_command(cli.app)
    names = set(getattr(group, "commands", {}))
    assert {"status", "diagnose", "enable-on-boot", "disable-on-boot"} <= names
    assert sorted(name for name in names - {"version"} if not re.search(rf"`{name}\b|, `{name}`", GUIDE)) == []


def test_links_resolve() -> None:
    for page in [*_PAGES.glob("*.md"), *_PAGES.glob("sites/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} points at {target}"
