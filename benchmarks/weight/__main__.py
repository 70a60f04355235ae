"""Weight of a call beside fixed commits, with a history: one row for each measurement.

    python -m benchmarks.weight --change "what changed" [--rounds 3] [--without-path] [--output FILE]

The engine takes turns with that of ``22b29d76``, before environments, graphs, latency targets and files; the whole path
takes turns with that of ``4478e583``. Their trees are made once, below ``.tools/weight``. The ratio of two trees in one
run hardly depends on the machine and its load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.report import new_report, parse_options, save
from benchmarks.weight.table import as_table

_ROOT: Final = Path(__file__).parents[2]
_OLD_TREES: Final = _ROOT / ".tools" / "weight"
_OLD_ENGINE: Final = "22b29d76"
_OLD_PATH: Final = "4478e583"
_DRIVER: Final = Path(__file__).parent / "driver.py"
#: The figures of the whole path, by their names in its benchmark.
_PATH_FIGURES: Final[Mapping[str, str]] = {
    "10,000 no-ops, end to end": "tasks_per_s",
    "10,000 no-ops, calls of submit()": "submits_per_s",
    "round trip, total, p50": "round_trip_ms",
}
_LIMIT_S: Final = 900

Figures = dict[str, float]


def main() -> None:
    """Measure, add a row, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--change", required=True, help="what changed since the row before, in a few words")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-path", action="store_true", help="measure the engine only")
    options = parse_options(parser, "weight.json")
    if not options.change:
        parser.error("--change is empty: say what changed, as in make bench-weight CHANGE='fewer records'")
    rows = json.loads(options.output.read_text())["rows"] if options.output.exists() else []
    row = {"commit": _commit(), "change": options.change, "engine": engine_in_turns(options.rounds)}
    if not options.without_path:
        row["path"] = path_in_turns(options.rounds)
    save(new_report(rows=[*rows, row]), options.output, as_table)


def engine_in_turns(rounds: int) -> dict[str, float]:
    """The engine in yardsticks and hops, and relative to the old one; medians of all rounds."""
    trees = {"new": _ROOT, "old": _tree(_OLD_ENGINE)}
    found: dict[str, list[Figures]] = {"new": [], "old": [], "yardstick": [], "hop": []}
    for _ in range(rounds):
        for name, tree in trees.items():
            found[name].append(_driven(tree, "engine"))
        for name in ("yardstick", "hop"):
            found[name].append(_driven(_ROOT, name))
    new, old, yardstick, hop = map(_medians, found.values())
    return {
        **{name: new[name] for name in ("client_us", "manager_us", "worker_us", "cpu_us", "wait_us")},
        "yardsticks": new["cpu_us"] / yardstick["cpu_us"],
        "hops": new["wait_us"] / hop["wait_us"],
        "cpu_ratio": new["cpu_us"] / old["cpu_us"],
        "wait_ratio": new["wait_us"] / old["wait_us"],
    }


def path_in_turns(rounds: int) -> dict[str, float]:
    """The whole path on local tiers, relative to the old one; medians of the ratios of each round."""
    old_tree = _tree(_OLD_PATH)
    ratios: dict[str, list[float]] = {name: [] for name in _PATH_FIGURES.values()}
    for _ in range(rounds):
        new, old = _path(_ROOT), _path(old_tree)
        for name, values in ratios.items():
            values.append(new[name] / old[name])
    return {f"{name}_ratio": statistics.median(values) for name, values in ratios.items()}


def _driven(tree: Path, what: str) -> Figures:
    command = [str(tree / ".venv/bin/python"), str(_DRIVER), what]
    done = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, check=True, timeout=_LIMIT_S)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def _path(tree: Path) -> Figures:
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "figures.json"
        command = [str(tree / ".venv/bin/python"), "-m", "benchmarks.end_to_end", "--output", str(output)]
        subprocess.run(command, cwd=tree, stdout=subprocess.DEVNULL, check=True, timeout=_LIMIT_S)
        figures: list[dict[str, Any]] = json.loads(output.read_text())["figures"]
    return {_PATH_FIGURES[each["name"]]: each["value"] for each in figures if each["name"] in _PATH_FIGURES}


def _medians(rounds: list[Figures]) -> Figures:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def _tree(commit: str) -> Path:
    """The tree of an old commit, with its own virtual environment."""
    tree = _OLD_TREES / commit
    if not (tree / ".made").exists():
        print(f"making the tree of {commit}", file=sys.stderr)
        if not tree.exists():
            _run("git", "clone", "--quiet", str(_ROOT), str(tree))
        _run("git", "-C", str(tree), "checkout", "--quiet", commit)
        _run("make", "-C", str(tree), "setup")
        (tree / ".made").touch()
    return tree


def _run(*command: str) -> None:
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def _commit() -> str:
    """The commit of this tree, with a plus sign if files differ from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=8"],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    return described.stdout.decode().strip()


if __name__ == "__main__":
    main()
