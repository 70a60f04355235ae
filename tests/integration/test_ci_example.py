"""The example for CI: its commands run the tests of its project on a local tier, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ci_example import INSTALL, RUN_TESTS, START_TIER, STOP_TIER, Runner, github_steps, gitlab_commands


def test_the_commands_of_the_example_run_its_tests(tmp_path: Path) -> None:
    """On LocalStack they are run by test_localstack_foreign.py."""
    home, steps = tmp_path / "home", github_steps("local")
    names = [name for name in steps if name != INSTALL]
    ends = [name for name in names if name.startswith("Stop")]
    runner = Runner(tmp_path, home=home)
    outputs = runner.run_steps(steps, names=[name for name in names if name not in ends], finally_=ends)
    assert "3 passed" in outputs[RUN_TESTS]
    assert "state\tready" in outputs["Show what went wrong"]
    assert not (home / "local").exists()


@pytest.mark.parametrize("job", ["local", "localstack"])
def test_both_ci_files_have_the_same_commands(job: str) -> None:
    steps = {name: commands for name, commands in github_steps(job).items() if name != "Show what went wrong"}
    assert list(steps)[1] == START_TIER
    assert list(steps)[-1] == STOP_TIER
    github = [line for commands in steps.values() for line in commands.splitlines()]
    github = [line.replace("sed 's/^export //' tier.env >> \"$GITHUB_ENV\"", ". ./tier.env") for line in github]
    # How each of them gets the sources, and finds the programs in later steps.
    assert [line for line in github if "GITHUB_PATH" not in line] == [
        line for line in gitlab_commands(job) if not line.startswith(("git clone", "export PATH"))
    ]
