"""``__all__`` stands in packages only: a module's public names are those without an underscore."""

from __future__ import annotations

from tests.unit.product import PACKAGES, ROOT


def test_only_packages_list_their_names() -> None:
    listing = {path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "__all__" in path.read_text()}
    assert {path.name for path in listing} == {"__init__.py"}
