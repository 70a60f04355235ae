"""Releases for the offline tier: a cloud assembly with other code."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from farcall_infra.bundles import content_digest


def with_new_code(assembly: Path, copy: Path) -> Path:
    """The assembly with a changed line in both bundles: other contents, other hashes."""
    shutil.copytree(assembly, copy, copy_function=os.link, ignore=shutil.ignore_patterns("*.zip"))
    for package, file, old, new in (
        ("farcall_lambdas", "version.py", 'API_VERSION: Final = "', 'API_VERSION: Final = "7.'),
        ("farcall_forwarder", "__main__.py", "import asyncio", "import asyncio  # changed"),
    ):
        (changed,) = copy.glob(f"asset.*/{package}/{file}")
        text = changed.read_text(encoding="utf-8")
        assert old in text
        bundle = changed.parents[1]
        contents = content_digest(bundle)
        shutil.rmtree(changed.parent / "__pycache__")  # byte code of the old line
        _rewrite(changed, text.replace(old, new, 1))
        digest = bundle.name.removeprefix("asset.")
        changes = {digest: digest[::-1], contents: content_digest(bundle)}
        bundle.rename(bundle.with_name(f"asset.{digest[::-1]}"))
        for document in copy.glob("*.json"):
            text = document.read_text(encoding="utf-8")
            for former, new in changes.items():
                text = text.replace(former, new)
            # CDK gives the version of a changed function another name.
            text = re.sub(r"(CurrentVersion[0-9A-F]{8})([0-9a-f]{32})", lambda found: found[1] + found[2][::-1], text)
            _rewrite(document, text)
    return copy


def _rewrite(link: Path, text: str) -> None:
    """Change the contents of a linked file without changing the original."""
    link.unlink()
    link.write_text(text, encoding="utf-8")
