"""Slurm's commands for tests: each job is a process of this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

_COMMANDS: Final = {
    "sbatch": """
import os, pathlib, subprocess, sys
jobs = pathlib.Path(__file__).parent / "jobs"
jobs.mkdir(exist_ok=True)
with open(os.devnull, "r+b") as nothing:
    files = {"stdin": nothing, "stdout": nothing, "stderr": nothing}
    job = subprocess.Popen(["bash", sys.argv[-1]], start_new_session=True, **files)
(jobs / str(job.pid)).touch()
print("Submitted batch job", job.pid)
""",
    "squeue": """
import pathlib, sys
for job in sys.argv[-1].partition("=")[2].split(","):
    try:
        is_over = pathlib.Path(f"/proc/{job}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        is_over = True
    print(f"{job}|{'COMPLETED' if is_over else 'RUNNING'}|None")
""",
    "scancel": """
import contextlib, os, signal, sys
for job in sys.argv[1:]:
    if job.isdigit():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(job), signal.SIGTERM)
""",
}


def install_scheduler(directory: Path) -> Path:
    """Write the commands into a new directory, for ``PATH``."""
    directory.mkdir()
    for name, code in _COMMANDS.items():
        (directory / name).write_text(f"#!{sys.executable}\n{code}")
        (directory / name).chmod(0o755)
    return directory
