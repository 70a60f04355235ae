"""Site build hook: the scripts that the theme would fetch from another host are files of the site.

``make docs`` installs them in the versions of ``browser/package-lock.json``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

_INSTALLED: Final = Path(__file__).parents[2] / ".tools" / "site" / "node_modules"
_DIAGRAMS: Final = "assets/scripts/mermaid.js"
#: Files of packages, by their path on the site; the configuration names the one for the search.
_SCRIPTS: Final = {
    _DIAGRAMS: "@mermaid-js/tiny/dist/mermaid.tiny.js",
    "assets/scripts/mermaid.LICENSE": "@mermaid-js/tiny/LICENSE",
    "assets/scripts/iframe-worker.js": "iframe-worker/shim/index.js",
    "assets/scripts/iframe-worker.LICENSE": "iframe-worker/LICENSE",
}


def on_files(files: Files, /, *, config: MkDocsConfig) -> Files:
    """Add the scripts."""
    for path, name in _SCRIPTS.items():
        installed = _INSTALLED / name
        if not installed.is_file():
            raise PluginError(f"{installed} is missing: `make docs` installs it and builds the site")
        files.append(File.generated(config, path, abs_src_path=str(installed)))
    return files


def on_post_page(output: str, /, *, page: Page, **_: Any) -> str:
    """Load the script for diagrams on pages that have one: it has 2.5 MB."""
    if 'class="mermaid"' not in output:
        return output
    script = f'<script src="{get_relative_url(_DIAGRAMS, page.url)}"></script>'
    return output.replace("</head>", f"{script}</head>", 1)
