"""``farcall run`` and ``map`` of decorated functions, and arguments that a function does not take."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from farcall.testing import FakeCloud
from tests.unit.sdk_cli_runner import Farcall

SCRIPT = """
import farcall

@farcall.function(endpoint="{endpoint}", walltime_s=60, max_attempts=1)
def clean(path, *, mode="fast"):
    return path + mode

def plain(n):
    return n
"""


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path / "home"))
    for name in ("FARCALL_API_URL", "FARCALL_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FARCALL_ENDPOINT", "another")


@pytest.fixture
def script(cloud: FakeCloud, tmp_path: Path) -> str:
    path = tmp_path / "jobs.py"
    path.write_text(SCRIPT.format(endpoint=cloud.endpoint_id))
    return str(path)


@pytest.fixture
def submitted(cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float | None, int]]:
    """``walltime_s`` and ``max_attempts`` of each submit."""
    found, transport = list[tuple[float | None, int]](), cloud.transport

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/submit"):
            body = json.loads(request.content)
            found.append((body.get("walltime_s"), body["max_attempts"]))
        return transport.handle_request(request)

    monkeypatch.setattr(cloud, "transport", httpx.MockTransport(answer))
    return found


def test_the_endpoint_and_the_options_of_the_function_are_used(
    cloud: FakeCloud, script: str, submitted: list[tuple[float | None, int]]
) -> None:
    result = Farcall(cloud)("run", f"{script}:clean", "a", "--kwargs", '{"mode": "slow"}')
    assert (result.exit_code, result.stdout) == (0, "aslow\n"), result.output
    assert Farcall(cloud)("run", f"{script}:clean", "a", "--walltime", "5").stdout == "afast\n"
    assert Farcall(cloud)("map", f"{script}:clean", "a", "b", "--no-wait").exit_code == 0
    assert submitted == [(60, 1), (5, 1), (60, 1)]


def test_the_command_line_names_another_endpoint(cloud: FakeCloud, script: str) -> None:
    result = Farcall(cloud)("run", f"{script}:clean", "a", "-e", "nowhere")
    assert result.exit_code == 66
    assert "no endpoint named 'nowhere'" in result.stderr


@pytest.mark.parametrize("wait", ["--wait", "--no-wait"])
def test_wrong_arguments_are_refused_with_the_signature(
    cloud: FakeCloud, script: str, submitted: list[tuple[float | None, int]], wait: str
) -> None:
    result = Farcall(cloud)("run", f"{script}:plain", "-e", cloud.endpoint_id, wait)
    assert result.exit_code == 65
    assert "plain() missing 1 required positional argument: 'n'; it is called as plain(n)" in result.stderr
    result = Farcall(cloud)(
        "map", f"{script}:plain", "--unpack", "[1]", "[1, 2]", "-e", cloud.endpoint_id, wait, "--json"
    )
    assert result.exit_code == 65
    assert json.loads(result.stderr)["error"]["message"].startswith(
        "input 2: plain() takes 1 positional argument but 2"
    )
    assert submitted == []
