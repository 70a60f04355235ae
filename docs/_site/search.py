"""Site build hook: ranks in the search, and the words that users of other systems look for."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any, Final

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

#: How much a match in a folder counts; in the others 1. Decisions are not searched.
_BOOSTS: Final = {"howto": 3.0, ".": 2.0, "endpoint": 1.5}
_NOT_SEARCHED: Final = "adr"
#: Words that a page answers under another name. A match counts more than one in the text.
WORDS: Final = {
    "installation.md": ("install", "pip", "environment variables", "precedence", "config.toml"),
    "troubleshooting.md": ("FAQ", "help"),
    "concepts/task.md": ("states",),
    "concepts/trust.md": ("pickle", "deserialization"),
    "deploy.md": ("AWS", "CDK", "terraform", "CloudFormation"),
    "endpoint/sites/README.md": ("templates", "PBS", "LSF", "HTCondor", "Kubernetes"),
    "howto/batches.md": ("map", "dependencies"),
    "howto/big-data.md": ("large files", "numpy", "payload"),
    "howto/objects.md": ("proxystore", "shared memory", "ray.put", "redis", "object store"),
    "howto/cluster.md": ("Slurm", "HPC", "sbatch"),
    "howto/data.md": ("S3", "staging", "data transfer", "inputs and outputs"),
    "howto/dead-letters.md": ("segfault", "poison"),
    "howto/engine.md": ("process pool", "multiprocessing"),
    "howto/failures.md": ("exceptions", "traceback"),
    "howto/globus.md": ("Globus Transfer", "collection", "data transfer"),
    "howto/gpus.md": ("GPU", "CUDA", "torch", "accelerator"),
    "howto/graphs.md": ("DAG", "workflow", "pipeline", "chain", "MapReduce", "fan-out", "nested"),
    "howto/memoization.md": ("cache", "caching"),
    "howto/network.md": ("proxy", "firewall", "ports", "certificate"),
    "howto/results.md": ("cancel", "async", "await", "timeout"),
    "howto/retries.md": ("retry", "retries", "timeout", "walltime", "OOM"),
    "howto/shell.md": ("bash", "subprocess", "MPI"),
    "howto/tokens.md": ("CI", "API key", "service account"),
    "howto/upgrading.md": ("upgrade", "update", "versions"),
    "howto/which-way.md": ("data transfer", "bytes"),
    "howto/waiting.md": ("pending", "stuck", "hangs", "offline"),
    "limits.md": ("quota", "rate limit", "429"),
}


def on_files(files: Files, /, **_: Any) -> None:
    """Refuse words of a page that is no longer there."""
    missing = [path for path in WORDS if files.get_file_from_path(path) is None]
    if missing:
        raise PluginError(f"docs/_site/search.py has words of pages that do not exist: {', '.join(missing)}")


def on_page_markdown(_: str, /, *, page: Page, **__: Any) -> None:
    """Rank a page, as the search plugin reads it."""
    path = PurePosixPath(page.file.src_uri)
    if path.parts[0] == _NOT_SEARCHED:
        page.meta["search"] = {"exclude": True}
    else:
        page.meta["search"] = {"boost": _BOOSTS.get(str(path.parent), 1.0)}
        page.meta["tags"] = list(WORDS.get(str(path), ()))
