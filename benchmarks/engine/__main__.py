"""``python -m benchmarks.engine``: rounds of all contestants in turn; medians, spread and goals into ``results/``.

Each peer has an environment of its own, made by uv on first use from ``peers/<name>.txt``. A round in which others took
more than 15 % of the machine while the clock ran is dropped, unless none is left.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.engine.contestants import CONTESTANTS
from benchmarks.engine.plot import draw
from benchmarks.engine.table import as_table
from benchmarks.machine import facts

_HERE = Path(__file__).parent
_REPOSITORY = _HERE.parents[1]
_ENVIRONMENTS = _HERE / ".venv-peers"
_LIMIT_S = 300


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=10_000, help="no-ops at once")
    parser.add_argument("--output", type=Path, default=_HERE.parent / "results" / "engine.json")
    options = parser.parse_args()
    report: dict[str, Any] = {
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": facts(),
        "tasks": options.tasks,
        "rounds": {name: [] for name in options.only},
    }
    for _ in range(options.rounds):
        for name in options.only:
            figures = _run(name, options.tasks)
            if figures is not None:
                report["rounds"][name].append(figures)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    draw(report, options.output.with_suffix(".png"))
    print(as_table(report))


def _run(name: str, tasks: int) -> dict[str, Any] | None:
    """One round of one contestant; None, and a line on standard error, if it failed."""
    python = _interpreter(CONTESTANTS[name][0])
    command = [python, "-m", "benchmarks.engine.driver", name, str(tasks)]
    path = os.pathsep.join(
        [str(Path(python).parent), os.environ.get("PATH", os.defpath)]
    )  # Parsl looks for its own there
    environment = {
        **os.environ,
        "PYTHONPATH": str(_REPOSITORY),
        "PATH": path,
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    for variable in ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"):
        environment.pop(variable, None)
    try:
        with tempfile.TemporaryDirectory() as directory:  # some write logs where they are
            ended = subprocess.run(
                command, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True, timeout=_LIMIT_S, check=True
            )
        figures: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return None
    print(f"{name}: {figures['noops']['per_s']:,.0f} no-ops/s", file=sys.stderr)
    return figures


def _interpreter(peer: str | None) -> str:
    if peer is None:
        return sys.executable
    environment = _ENVIRONMENTS / peer
    python = environment / "bin" / "python"
    if not (environment / ".made").exists():
        uv = shutil.which("uv") or str(_REPOSITORY / ".tools" / "bin" / "uv")
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(environment)], check=True)
        requirements = str(_HERE / "peers" / f"{peer}.txt")
        subprocess.run([uv, "pip", "install", "--quiet", "--python", str(python), "-r", requirements], check=True)
        (environment / ".made").touch()
    return str(python)


if __name__ == "__main__":
    main()
