"""Site build hooks: decisions in the navigation, the version in the footer, and links that work on the site."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

_LINK: Final = re.compile(r"\[(?P<text>[^]]+)\]\((?P<target>[^)#:\s]+)(?P<anchor>#[^)]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every decision into its section of the navigation, and the version into the footer."""
    config.copyright = f"Farcall {version('farcall')}, Apache-2.0"
    decisions = sorted(Path(config.docs_dir, "adr").glob("0*.md"))
    section: list[Any] = next(entry["Decisions"] for entry in config.nav or () if "Decisions" in entry)
    section.extend(f"adr/{path.name}" for path in decisions if f"adr/{path.name}" not in section)
    return config


def on_page_markdown(markdown: str, /, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Change links to a folder into links to its README, and links out of the site into their text."""
    docs = Path(config.docs_dir).resolve()
    here = (docs / page.file.src_uri).parent  # a page that is made here has no file

    def site_link(found: re.Match[str]) -> str:
        target = (here / found["target"]).resolve()
        if not target.is_relative_to(docs):
            return found["text"]
        if (target / "README.md").is_file():
            return f"[{found['text']}]({found['target'].rstrip('/')}/README.md{found['anchor'] or ''})"
        return found[0]

    return _LINK.sub(site_link, markdown)
