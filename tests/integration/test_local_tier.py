"""The whole local tier: start, use, faults, stop and restart, and its command line."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from typer.testing import CliRunner

import farcall
from farcall_common.errors import ConfigurationError, Unauthenticated
from farcall_endpoint.services.directory import EndpointDirectory
from farcall_local.cli import app
from farcall_local.control import is_up, launch, wipe
from farcall_local.endpoint import LocalEndpoint
from farcall_local.process import free_port, listen
from farcall_local.state import TierState
from farcall_local.tier import LocalTier
from tests.support.endpoint.endpoint_command import EndpointCommand
from tests.support.spans import spans
from tests.waiting import WAIT_S, wait_until

__all__ = ["spans"]


def greet() -> str:
    return "hello"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "tier"
    wipe(tmp_path / "tier")


def test_a_tier_survives_killed_parts_and_a_restart(directory: Path) -> None:
    with LocalTier(directory, users=("ada", "grace")) as tier:
        pids = {name: process.pid for name, process in tier.state.processes.items()}
        assert set(pids) == {"postgres", "valkey", "blobs", "api", "forwarder"}
        url = tier.api_url
        with farcall.Client(url, tier.tokens["ada"]) as ada, farcall.Client(url, tier.tokens["grace"]) as grace:
            function_id = ada.register_function(greet)
            assert [each["function_uuid"] for each in grace.get_functions()] == []

            killed = tier.kill("api")
            assert tier.wait_up("api", other_than=killed) != killed
            assert ada.get_function(function_id)["function_uuid"] == function_id, "the API came back at its address"
            assert tier.api_url == url
            assert tier.state.processes["api"].restarts == 1
            assert tier.state.processes["api"].last_status == -signal.SIGKILL

        with pytest.raises(ConfigurationError, match="already running"):
            launch(directory)
    assert not any(pid is not None and psutil.pid_exists(pid) for pid in pids.values())
    assert tier.state.phase == "stopped"

    with LocalTier(directory) as again, farcall.Client(again.api_url, again.tokens["ada"]) as ada:
        assert again.api_url == url
        assert ada.get_function(function_id)["function_uuid"] == function_id


def test_an_endpoint_needs_its_owners_token_once_and_its_credential_can_be_revoked(
    directory: Path, tmp_path: Path
) -> None:
    with LocalTier(directory, users=("ada",)) as tier:
        home = tmp_path / "home"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FARCALL_")}
        shell = EndpointCommand(environment | {"FARCALL_HOME": str(home), "COLUMNS": "200"}, tmp_path)
        login = {"FARCALL_API_URL": tier.api_url, "FARCALL_TOKEN": tier.tokens["ada"]}
        endpoint = EndpointDirectory.of(home, "default")
        shell.ok("configure", "--max-workers", "1")
        shell.ok("start", "--detach", **login)
        shell.ok("stop")

        assert "is connected" in shell.ok("start", "--detach")
        agent = endpoint.read_agent()
        try:
            endpoint_id, credential = endpoint.read_endpoint_id(), endpoint.read_credential()
            assert agent
            assert endpoint_id
            assert credential
            with (
                farcall.Client(tier.api_url, tier.tokens["ada"]) as ada,
                farcall.Executor(endpoint_id, client=ada) as executor,
            ):
                assert executor.submit(greet).result(WAIT_S) == "hello"
            whoami = httpx.get(f"{tier.api_url}/v3/whoami", headers={"Authorization": f"Bearer {credential.token}"})
            assert (whoami.status_code, whoami.json()["code"]) == (403, "FORBIDDEN")

            shell.ok("revoke-credential", endpoint_id, **login)
            wait_until(lambda: agent.find() is None)
            assert "revoked or replaced" in endpoint.log_file.read_text()
            refused = shell.run("start", "--detach")
            assert (refused.returncode, "there is no login" in refused.stderr) == (77, True), refused.stderr
            assert "is connected" in shell.ok("start", "--detach", **login)
        finally:
            shell.run("stop")
        assert endpoint.read_credential() != credential


def wait_for_file(path: str) -> None:
    import pathlib
    import time

    while not pathlib.Path(path).exists():
        time.sleep(0.01)


def test_status_and_why_follow_an_endpoint_from_its_start_to_its_stop(directory: Path, tmp_path: Path) -> None:
    with LocalTier(directory, users=("ada",)) as tier, farcall.Client(tier.api_url, tier.tokens["ada"]) as ada:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FARCALL_")}
        login = {"FARCALL_API_URL": tier.api_url, "FARCALL_TOKEN": tier.tokens["ada"]}
        shell = EndpointCommand({**environment, "FARCALL_HOME": str(tmp_path / "home"), **login}, tmp_path)
        shell.ok("configure", "--max-workers", "1")
        shell.ok("start", "--detach")
        go = tmp_path / "go"
        try:
            endpoint_id = EndpointDirectory.of(tmp_path / "home", "default").read_endpoint_id()
            assert endpoint_id

            def numbers(*names: str) -> list[int]:
                details = ada.get_endpoint_status(endpoint_id)["details"]
                return [details.get(name) for name in names]

            of_workers = ("managers", "total_workers", "idle_workers", "blocks", "pending_blocks")
            wait_until(lambda: numbers(*of_workers) == [1, 1, 1, 1, 0], "workers")
            status = ada.get_endpoint_status(endpoint_id)
            assert status["age_s"] < WAIT_S
            assert status["reported_at"] > 0
            batch = ada.create_batch()
            for _ in range(2):
                batch.add(ada.register_function(wait_for_file), (str(go),))
            ada.batch_run(endpoint_id, batch)
            wait_until(lambda: numbers("idle_workers", "outstanding_tasks") == [0, 2], "a busy worker")
            last = batch.task_ids[-1]
            wait_until(lambda: "its worker is busy (as of " in str(ada.why(last)), "the reason")
            why = ada.why(last)
            assert why.workers is not None
            assert why.workers.startswith("0 of 1 idle, as of ")
            go.touch()
            wait_until(lambda: numbers("idle_workers", "outstanding_tasks") == [1, 0], "an idle worker")
        finally:
            go.touch()
            shell.run("stop")
        wait_until(lambda: ada.get_endpoint_status(endpoint_id)["status"] == "offline", "the end")
        assert "age_s" not in ada.get_endpoint_status(endpoint_id), "it has no numbers"


def test_a_service_account_runs_an_endpoint_and_a_limited_token_its_tasks(directory: Path, tmp_path: Path) -> None:
    with LocalTier(directory, users=("ada",)) as tier, farcall.Client(tier.api_url, tier.tokens["ada"]) as ada:
        account_id = ada.create_account("cluster")["account_id"]
        scopes = ["endpoints:register", "endpoints:connect", "endpoints:read", "endpoints:manage"]
        operator = ada.create_token("operator", scopes=scopes, account_id=account_id)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FARCALL_")}
        login = {"FARCALL_API_URL": tier.api_url, "FARCALL_TOKEN": operator["token"]}
        home = {"FARCALL_HOME": str(tmp_path / "home"), "COLUMNS": "200"}
        shell = EndpointCommand({**environment, **home, **login}, tmp_path)
        shell.ok("configure", "--max-workers", "1")
        shell.ok("start", "--detach")
        try:
            endpoint_id = EndpointDirectory.of(tmp_path / "home", "default").read_endpoint_id()
            assert endpoint_id
            scopes = ["functions:write", "tasks:submit", "tasks:read", "endpoints:read"]
            ci = ada.create_token("ci", scopes=scopes, endpoints=[endpoint_id], account_id=account_id)
            with (
                farcall.Client(tier.api_url, ci["token"]) as client,
                farcall.Executor(endpoint_id, client=client) as executor,
            ):
                assert executor.submit(greet).result(WAIT_S) == "hello"
                assert client.whoami()["identity_id"] == account_id
                with pytest.raises(farcall.Forbidden, match="lacks the scope endpoints:manage"):
                    client.delete_endpoint(endpoint_id)
                ada.delete_account(account_id)
                wait_until(lambda: not _is_admitted(client), "the end of the token")
        finally:
            shell.run("stop")


def _is_admitted(client: farcall.Client) -> bool:
    try:
        client.whoami()
    except Unauthenticated:
        return False
    return True


def test_a_tier_keeps_running_if_its_state_cannot_be_written(directory: Path) -> None:
    with LocalTier(directory) as tier:
        state, path = tier.state, directory / "state.json"
        killed = state.processes["forwarder"].pid
        path.unlink()
        path.mkdir()  # no file can replace it, as on a full disk
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        log = directory / "logs" / "supervisor.log"
        wait_until(lambda: "forwarder ended" in log.read_text())
        path.rmdir()
        wait_until(path.exists)
        assert tier.wait_up("forwarder", other_than=killed) != killed
        assert tier.state.processes["forwarder"].restarts == 1
        assert tier.state.processes["api"] == state.processes["api"]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's orphan signal is Linux's")
def test_no_process_outlives_a_killed_supervisor(directory: Path) -> None:
    supervisor = launch(directory)
    state = TierState.read(directory)
    assert state is not None
    family = [psutil.Process(process.pid) for process in state.processes.values()]
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait()
    _, alive = psutil.wait_procs(family, timeout=WAIT_S)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_a_tier_ends_with_the_program_that_entered_it(directory: Path) -> None:
    script = (
        "from pathlib import Path; from farcall_local.tier import LocalTier; import os, signal\n"
        f"with LocalTier(Path({str(directory)!r})) as tier:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=WAIT_S)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: not is_up(directory), "the end of the tier, whose program has ended")
    state = TierState.read(directory)
    assert state is not None
    assert state.phase == "stopped"


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path))
    monkeypatch.delenv("FARCALL_API_URL", raising=False)
    monkeypatch.delenv("FARCALL_TOKEN", raising=False)
    monkeypatch.setenv("FARCALL_LOCAL_MAX_LOG_BYTES", "100")
    command = CliRunner()

    assert command.invoke(app, ["status"]).exit_code == 3
    assert command.invoke(app, ["down"]).exit_code == 0
    try:
        came_up = command.invoke(app, ["up"])
        assert came_up.exit_code == 0, came_up.output
        assert "already running" in command.invoke(app, ["up"]).output
        refused = command.invoke(app, ["up", "--port", str(free_port())])
        assert isinstance(refused.exception, ConfigurationError), refused.output
        assert "its port cannot change" in str(refused.exception)
        status = json.loads(command.invoke(app, ["status", "--json"]).output)
        assert status["running"]
        assert status["phase"] == "ready"
        assert "token" not in status
        shown = command.invoke(app, ["status"]).output
        assert f"state\tready\naddress\t{status['api_url']}\n" in shown
        assert f"\napi\t{status['processes']['api']['pid']}\t0\n" in shown
        with farcall.Client() as client:  # config.toml points at the tier
            assert client.api_url == status["api_url"]
            client.register_function(greet)
        logs = tmp_path / "local" / "logs"
        deadline = time.monotonic() + WAIT_S
        while not list(logs.glob("*.log.1")):
            assert time.monotonic() < deadline, "the logs grow without bound"
            time.sleep(0.02)
        config = tmp_path / "config.toml"
        config.write_text(config.read_text() + 'endpoint = "mine"\n')
        assert json.loads(command.invoke(app, ["down", "--json"]).output)["was_running"]
        port = free_port()
        with listen(port):
            taken = command.invoke(app, ["up", "--port", str(port)])
        assert isinstance(taken.exception, ConfigurationError), taken.output
        assert f"Port {port} cannot be used: Address already in use." in str(taken.exception)
        came_up = command.invoke(app, ["up", "--json", "--port", str(port)])
        status = json.loads(came_up.output)
        assert status.keys() == {"api_url", "was_running", "directory"}
        assert status["api_url"] == f"http://127.0.0.1:{port}"
        stored = {"api_url": status["api_url"], "endpoint": "mine"}
        assert tomllib.loads(config.read_text())["default"].items() > stored.items()
    finally:
        assert command.invoke(app, ["down", "--wipe"]).exit_code == 0
    assert not (tmp_path / "local").exists()
    with pytest.raises(httpx.ConnectError):
        httpx.get(status["api_url"], trust_env=False)
    assert os.stat(tmp_path / "config.toml").st_mode & 0o077 == 0  # noqa: PTH116 - its mode alone


def span_above() -> str:
    import os

    return os.environ.get("TRACEPARENT", "")


def test_one_trace_and_one_request_are_in_the_logs_of_every_part(
    directory: Path, tmp_path: Path, spans: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="farcall")
    with LocalTier(directory, users=("ada",)) as tier, farcall.Client(tier.api_url, tier.tokens["ada"]) as ada:
        environment = {"FARCALL_API_URL": tier.api_url, "FARCALL_TOKEN": tier.tokens["ada"]}
        with (
            LocalEndpoint("traced", home=tmp_path / "home", environment=environment) as endpoint,
            farcall.Executor(endpoint.endpoint_id, client=ada) as executor,
        ):
            task_id = ada.run(endpoint_id=endpoint.endpoint_id, function_id=ada.register_function(span_above))
            assert ada.get_result(task_id, wait_s=WAIT_S) == ""  # no span is current
            with trace.get_tracer("test").start_as_current_span("experiment") as experiment:
                above = executor.submit(span_above).result(WAIT_S)
            [manager_log] = (endpoint.directory / "logs").glob("manager-*.log")
            endpoint_logs = [log.read_text(encoding="utf-8") for log in (endpoint.log_path, manager_log)]
        trace_id = f"{experiment.get_span_context().trace_id:032x}"
        assert above.split("-")[1] == trace_id  # in the worker
        assert [text.count(trace_id) for text in endpoint_logs] == [1, 1]
        assert [text.count(" of the traces ") for text in endpoint_logs] == [1, 1], "a task without a span has no line"
        [sent] = [line for line in _lines(tier.log_path("forwarder")) if "trace_ids" in line]
        assert (sent["message"], sent["trace_ids"], sent["tasks"]) == ("tasks sent", trace_id, 1)

        api = _lines(tier.log_path("api"))
        untraced, accepted = (line for line in api if line["message"] == "tasks accepted")
        assert "trace_ids" not in untraced
        assert accepted["trace_ids"] == trace_id
        assert accepted["request_id"] != untraced["request_id"]
        assert f"/submit: request {accepted['correlation_id']}" in caplog.text


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
