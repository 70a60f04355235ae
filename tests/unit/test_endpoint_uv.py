"""Packages that uv installs: which requirements are taken, and the commands."""

from __future__ import annotations

import sys
from pathlib import Path

from farcall_common.environments import Environment
from farcall_endpoint.config.settings import EnvironmentSettings
from farcall_endpoint.environments.runners.base import Start
from farcall_endpoint.environments.runners.prefixes import PrefixRunner
from farcall_endpoint.environments.runners.registry import runners_of
from farcall_endpoint.environments.runners.uv import UvRunner, _variables

CACHE = Path("/cache")


def packages(*requirements: str) -> Environment:
    return Environment.of({"type": "uv", "requirements": requirements})


def test_the_command_of_a_preparation() -> None:
    runner = UvRunner(index_url="https://mirror.example.org/simple", source_builds=True, readable=["/usr", "/opt/sw"])
    environment = packages("polars==1.*", "numpy")
    done = runner.prepare(environment, cache=CACHE)
    image = f"/cache/uv-{runner.digest(environment)}"
    assert done.image == image
    assert done.what == "uv is installing polars==1.* numpy"
    module = "farcall_endpoint.environments.runners.uv"
    options = ("--index", "https://mirror.example.org/simple", "--source-builds", "--confine")
    command = (sys.executable, "-P", "-m", module, image, *options, "--readable=/usr", "--readable=/opt/sw")
    assert done.commands == ((*command, "--", "polars==1.*", "numpy"),)
    assert UvRunner(confine=False).prepare(packages("a"), cache=CACHE).commands[0][5:] == ("--", "a")
    assert len(runner.prepare(packages(*["package"] * 50), cache=CACHE).what) < 110


def test_equal_requirements_have_one_environment() -> None:
    runner = UvRunner()
    assert runner.digest(packages("a", "b")) == runner.digest(packages("b", "a", "b"))
    digests = {
        runner.digest(packages("a")),
        runner.digest(packages("a==1")),
        UvRunner(source_builds=True).digest(packages("a")),
        UvRunner(index_url="https://example.org").digest(packages("a")),
    }
    assert len(digests) == 4


def test_a_worker_is_that_of_a_virtual_environment() -> None:
    start = Start(image="/cache/uv-1", command=("/cache/uv-1/bin/python", "boot.py"), variables={"A": "1"})
    assert UvRunner().command(start) == PrefixRunner("venv").command(start)
    assert UvRunner().stop(start) is None


def test_settings_reach_the_runner() -> None:
    settings = EnvironmentSettings(source_builds=True, index_url="/wheels")
    [command] = runners_of(settings, readable=["/usr"])["uv"].prepare(packages("a"), cache=CACHE).commands
    assert command[5:] == ("--index", "/wheels", "--source-builds", "--confine", "--readable=/usr", "--", "a")


def test_builds_get_no_password() -> None:
    environ = {
        "PATH": "/bin",
        "UV_DEFAULT_INDEX": "https://example.org/simple",
        "UV_INDEX": "https://me:secret@example.org/simple",
        "UV_INDEX_MINE_PASSWORD": "x",
        "https_proxy": "http://proxy:3128",
        "HTTPS_PROXY": "http://me:secret@proxy:3128",
        "AWS_SECRET_ACCESS_KEY": "x",
        "VIRTUAL_ENV": "/x",
    }
    kept = {"PATH", "UV_DEFAULT_INDEX", "https_proxy"}
    assert set(_variables(environ, builds=True)) == kept
    assert set(_variables(environ, builds=False)) == set(environ) - {"VIRTUAL_ENV"}


def test_uv_works_here() -> None:
    assert UvRunner().missing() == ""
