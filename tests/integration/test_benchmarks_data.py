"""The data benchmarks run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_quick_round_of_objects_prints_all_figures() -> None:
    command = [sys.executable, "-m", "benchmarks.data", "objects", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(("| 100 MB", "| 1 MB"))]
    assert len(rows) == 29


def test_a_quick_round_of_files_prints_all_figures() -> None:
    command = [sys.executable, "-m", "benchmarks.data", "files", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stdout.splitlines() if line.startswith(("| one", "| the", "| tasks"))]) == 7


def test_a_quick_round_of_nodes_reads_source_and_endpoint_once() -> None:
    command = [sys.executable, "-m", "benchmarks.data", "nodes", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = dict(line.strip("| ").split(" | ")[:2] for line in done.stdout.splitlines() if line.startswith("| "))
    names = ("reads of the source", "reads of the endpoint's copy", "copies from node to node")
    assert [rows[name] for name in names] == ["1", "1", "7"]


def test_a_quick_round_of_communication_prints_all_figures() -> None:
    command = [sys.executable, "-m", "benchmarks.data", "communication", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [
        line for line in done.stdout.splitlines() if line.startswith(("| point", "| broadcast", "| all", "| input"))
    ]
    assert len(rows) == 4 + 4 + 3 + 2
    assert not [row for row in rows if "| - |" in row]


def test_an_unknown_subject_is_named() -> None:
    command = [sys.executable, "-m", "benchmarks.data", "objcts"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no subject objcts; there are" in done.stderr
