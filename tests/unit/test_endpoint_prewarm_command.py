"""``farcall-endpoint prewarm``: which environment is meant, and what the agent gets to read."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from farcall_common.environments import Environment
from farcall_endpoint.cli import app
from farcall_endpoint.config import Config, write_config
from farcall_endpoint.directory import EndpointDirectory

SCIENCE = Environment(type="apptainer", location="/images/science.sif", name="science", preload=("numpy",))
FRAMES = Environment(type="uv", requirements=("polars==1.*",))


class Shell:
    """The command line, on an endpoint whose agent has seen two environments."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.directory = EndpointDirectory.of(home, "lab")
        self.directory.create()
        write_config(self.directory.config_file, Config())
        known = [msgspec.to_builtins(each) for each in (SCIENCE, FRAMES)]
        self.directory.write_status({"connected": True, "known_environments": known})

    def run(self, *arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["--config-dir", str(self.home), "prewarm", "lab", *arguments])
        assert done.exit_code == code, done.output
        return " ".join(done.output.split())

    @property
    def wanted(self) -> list[tuple[Environment, int, str]]:
        return [(each.environment, each.count, each.node) for each in self.directory.read_prewarms()]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_environments_of_recent_tasks_go_by_name(shell: Shell) -> None:
    assert "4 workers of science are to be warm." in shell.run("science", "--count", "4")
    shell.run("uv:polars==1.*", "--node", "n3")
    assert shell.wanted == [(SCIENCE, 4, ""), (FRAMES, 1, "n3")]
    shell.run(SCIENCE.key, "--count", "2")
    assert shell.wanted == [(FRAMES, 1, "n3"), (SCIENCE, 2, "")]
    shell.run("science", "--count", "0")
    assert shell.wanted == [(FRAMES, 1, "n3")]
    assert "No workers of science are kept warm" in shell.run("science", "--count", "0", code=78)


def test_others_are_written_out(shell: Shell) -> None:
    shell.run("venv:/opt/envs/a")
    shell.run("docker:python:3.12-slim")
    shell.run("uv:polars==1.* numpy")
    assert [environment for environment, _, _ in shell.wanted] == [
        Environment(type="venv", location="/opt/envs/a"),
        Environment(type="docker", location="python:3.12-slim"),
        Environment(type="uv", requirements=("polars==1.*", "numpy")),
    ]


def test_an_unknown_environment_is_refused(shell: Shell) -> None:
    said = shell.run("sience", code=78)
    assert "There is no environment 'sience' among those of recent tasks." in said
    assert "Did you mean 'science'?" in said
    assert "There are: science, uv:polars==1.*." in shell.run("zzz", code=78)
    assert "must be an absolute path" in shell.run("venv:envs/a", code=78)
    assert "takes a location" in shell.run("docker:", code=78)
    assert shell.wanted == []
