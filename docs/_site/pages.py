"""Site build hooks: decisions of the navigation only, the version in the footer, and links that work on the site."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

_LINK: Final = re.compile(r"\[(?P<text>[^]]+)\]\((?P<target>[^)#:\s]+)(?P<anchor>#[^)]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the version into the footer."""
    config.copyright = f"Farcall {version('farcall')}, Apache-2.0"
    return config


def on_files(files: Files, /, *, config: MkDocsConfig, **_: Any) -> None:
    """Leave decisions out that the navigation does not name."""
    named = next(section["Decisions"] for section in config.nav or () if "Decisions" in section)
    for file in list(files):
        if file.src_uri.startswith("adr/") and file.src_uri not in named:
            files.remove(file)


def on_page_markdown(markdown: str, /, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change links to a folder into links to its README, and links out of the site into their text."""
    docs = Path(config.docs_dir).resolve()
    here = (docs / page.file.src_uri).parent  # a page that is made here has no file

    def site_link(found: re.Match[str]) -> str:
        target = (here / found["target"]).resolve()
        is_left_out = target.parent == docs / "adr" and f"adr/{target.name}" not in files.src_uris
        if is_left_out or not target.is_relative_to(docs):
            return found["text"]
        if (target / "README.md").is_file():
            return f"[{found['text']}]({found['target'].rstrip('/')}/README.md{found['anchor'] or ''})"
        return found[0]

    return _LINK.sub(site_link, markdown)
