"""The example for CI: its commands, as the runners of GitHub and GitLab run them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

_EXAMPLE: Final = Path(__file__).resolve().parents[2] / "examples" / "ci"
INSTALL: Final = "Install"
START_TIER: Final = "Start the cloud tier"
RUN_TESTS: Final = "Run the tests"
#: The steps between start and end of the cloud tier.
WITH_A_TIER: Final = ("Start an endpoint", RUN_TESTS, "Show what went wrong", "Stop the endpoint")
STOP_TIER: Final = "Stop the cloud tier"
_STEP_TIMEOUT_S: Final = 300.0


def github_steps(job: str) -> dict[str, str]:
    """The commands of each step of a job, by the step's name."""
    workflow: Any = yaml.safe_load((_EXAMPLE / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))
    return {step["name"]: step["run"] for step in workflow["jobs"][job]["steps"] if "run" in step}


def gitlab_commands(job: str) -> list[str]:
    """The commands of a job, those after its end included."""
    jobs: Any = yaml.safe_load((_EXAMPLE / ".gitlab-ci.yml").read_text(encoding="utf-8"))
    parent = jobs[jobs[job]["extends"]]
    return [*parent["before_script"], *jobs[job]["script"], *jobs[job]["after_script"]]


class Runner:
    """Runs steps in a copy of the project, whose environment for Farcall is that of the tests."""

    def __init__(self, directory: Path, *, home: Path) -> None:
        self.project = directory / "project"
        shutil.copytree(_EXAMPLE, self.project)
        farcall = self.project / ".farcall"
        farcall.mkdir()
        (farcall / ".venv").symlink_to(sys.prefix)
        self._variables_file = directory / "github-env"
        self._variables_file.touch()
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FARCALL_"))}
        self._environment = ours | {
            "FARCALL_HOME": str(home),
            "PATH": f"{farcall / '.venv' / 'bin'}:{os.environ['PATH']}",
            "GITHUB_ENV": str(self._variables_file),
        }

    def run(self, commands: str) -> str:
        """Run the commands of a step and return their output. Variables that it exports are set for later steps."""
        done = subprocess.run(
            ["bash", "-e", "-c", commands],
            cwd=self.project,
            env=self._environment | self._variables(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_STEP_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout}"
        return done.stdout

    def run_steps(self, steps: Mapping[str, str], *, names: Iterable[str], finally_: Iterable[str]) -> dict[str, str]:
        """Run the steps ``names``, and those in ``finally_`` also after a failure; returns their outputs."""
        try:
            return {name: self.run(steps[name]) for name in names}
        finally:
            for name in finally_:
                self.run(steps[name])

    def _variables(self) -> dict[str, str]:
        lines = self._variables_file.read_text(encoding="utf-8").splitlines()
        return dict(line.split("=", 1) for line in lines)
