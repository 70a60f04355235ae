"""``farcall-endpoint`` as a user types it."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from farcall_common.errors import ForwarderWaking
from farcall_endpoint.services.daemon import wait_for_start
from farcall_endpoint.services.directory import EndpointDirectory
from tests.support.endpoint import FakeCloud, wait_gone
from tests.support.endpoint.endpoint_command import PROGRAM, EndpointCommand
from tests.support.endpoint.fake_http import ENDPOINT_ID
from tests.waiting import WAIT_S, wait_until


class Shell(EndpointCommand):
    """Runs commands against a home directory and a fake cloud."""

    def __init__(self, home: Path, cloud: FakeCloud) -> None:
        self.home = home
        self.cloud = cloud
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("FARCALL_")},
            "FARCALL_HOME": str(home),
            "FARCALL_API_URL": cloud.http.url,
            "FARCALL_TOKEN": "test",
            "COLUMNS": "200",
        }
        super().__init__(environment, home)

    def directory(self, name: str = "default") -> EndpointDirectory:
        return EndpointDirectory.of(self.home, name)

    def pid(self, name: str = "default") -> int:
        agent = self.directory(name).read_agent()
        assert agent is not None
        return agent.pid


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    cloud = FakeCloud()
    shell = Shell(tmp_path, cloud)
    try:
        yield shell
    finally:
        for path in (tmp_path / "endpoints").glob("*"):
            agent = EndpointDirectory(path).read_agent()
            process = agent.find() if agent else None
            if process is not None:
                family = [process, *process.children(recursive=True)]
                process.kill()
                wait_gone(family)
        cloud.close()


def test_endpoint_lifecycle(shell: Shell) -> None:
    assert "Configured default" in shell.ok("configure", "--display-name", "My laptop", "--max-workers", "1")
    secret = shell.directory().path / "curve.secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(shell.directory().config_file.stat().st_mode) == 0o600
    assert "display_name: My laptop" in shell.directory().config_file.read_text()
    assert "Initialized" in shell.ok("list")

    assert "is connected" in shell.ok("start", "--detach")
    endpoint_id = shell.directory().read_endpoint_id()
    assert endpoint_id
    assert endpoint_id in shell.ok("list")
    assert "Running" in shell.ok("list")
    assert shell.cloud.end(shell.cloud.submit(abs, -5)).value == 5
    wait_until(lambda: json.loads(shell.ok("status", "--json"))["managers"] == 1)
    facts = json.loads(shell.ok("status", "--json"))
    assert facts["status"] == "Running"
    assert facts["pid"] == shell.pid()
    assert "Running" in shell.ok("status")
    family = psutil.Process(shell.pid()).children(recursive=True)
    assert len(family) >= 3

    assert "is connected" in shell.ok("restart")
    assert shell.directory().read_endpoint_id() == endpoint_id
    assert shell.cloud.http.requests.count("POST /v3/endpoints") == 1

    assert "Stopped default" in shell.ok("stop")
    assert "was not running" in shell.ok("stop")
    assert "Stopped" in shell.ok("list")
    assert shell.run("status").returncode == 1
    wait_gone(family)

    assert shell.run("delete").returncode != 0, "it needs a confirmation"
    assert "Deleted default" in shell.ok("delete", "--yes")
    assert f"DELETE /v2/endpoints/{endpoint_id}" in shell.cloud.http.requests
    assert not shell.directory().path.exists()


def test_a_second_start_names_the_process_that_runs(shell: Shell) -> None:
    shell.ok("configure", "lab", "--max-workers", "1")
    shell.ok("start", "lab", "--detach")
    for arguments in (["start", "lab", "--detach"], ["start", "lab"]):
        second = shell.run(*arguments)
        assert second.returncode == os.EX_CANTCREAT
        assert f"process {shell.pid('lab')}" in second.stderr
    refused = shell.run("delete", "lab", "--yes")
    assert f"process {shell.pid('lab')}" in refused.stderr
    assert "Running" in shell.ok("list")
    assert "Deleted" in shell.ok("delete", "lab", "--yes", "--force")


def test_an_agent_whose_files_were_removed_is_shown_refuses_a_second_and_is_stopped(shell: Shell) -> None:
    shell.ok("configure", "--max-workers", "1")
    shell.ok("start", "--detach")
    directory = shell.directory()
    process = psutil.Process(shell.pid())
    for path in (directory.pid_file, *directory.path.glob("spool.sqlite3*")):
        path.unlink()
    facts = json.loads(shell.ok("status", "--json"))
    assert (facts["status"], facts["pid"]) == ("Running", process.pid)
    for arguments in (["start", "--detach"], ["start"], ["start", "--new-spool"]):
        second = shell.run(*arguments)
        assert second.returncode == os.EX_CANTCREAT
        assert f"process {process.pid}" in second.stderr
    assert "Running" in shell.ok("list")
    assert "Stopped default" in shell.ok("stop")
    wait_gone([process])
    assert "was not running" in shell.ok("stop")
    assert "Stopped" in shell.ok("list")
    assert "is connected" in shell.ok("start", "--detach")


def test_a_crash_is_reported_and_the_next_start_works(shell: Shell) -> None:
    shell.ok("configure", "--max-workers", "1")
    shell.ok("start", "--detach")
    process = psutil.Process(shell.pid())
    family = process.children(recursive=True)
    process.kill()
    wait_gone(family)
    listed = shell.ok("list")
    assert "Disconnected" in listed
    assert f"process {process.pid} died" in listed
    assert "was not running" in shell.ok("stop")
    assert "Stopped" in shell.ok("list")
    assert "is connected" in shell.ok("start", "--detach")


def test_a_reused_process_id_is_not_taken_for_the_agent(shell: Shell) -> None:
    shell.ok("configure", "--max-workers", "1")
    directory = shell.directory()
    me = psutil.Process()
    lie = {"pid": me.pid, "started_at": me.create_time() - 1000, "hostname": socket.gethostname()}
    directory.pid_file.write_text(json.dumps(lie))
    assert "Disconnected" in shell.ok("list")
    assert "was not running" in shell.ok("stop"), "and this test lives on"


def test_a_start_that_fails_says_why(shell: Shell) -> None:
    assert "farcall-endpoint configure" in shell.run("start").stderr
    assert shell.run("start").returncode == os.EX_CONFIG
    shell.ok("configure", "--max-workers", "1")

    shell.cloud.http.failing = 401
    for arguments in (["start"], ["start", "--detach"]):
        refused = shell.run(*arguments)
        assert refused.returncode == os.EX_NOPERM
        assert "HTTP 401" in refused.stderr
    shell.cloud.http.failing = None

    unreachable = shell.run("start", "--detach", FARCALL_API_URL="http://127.0.0.1:9")
    assert unreachable.returncode == os.EX_UNAVAILABLE
    assert "http://127.0.0.1:9" in unreachable.stderr

    unknown = shell.run("start", "--detach", FARCALL_API_URL="")
    assert unknown.returncode == os.EX_CONFIG
    assert "farcall local up" in unknown.stderr

    config = shell.directory().config_file
    config.write_text("engine:\n  max_workers_per_nod: 3\n")
    wrong = shell.run("start", "--detach")
    assert wrong.returncode == os.EX_CONFIG
    assert "max_workers_per_nod" in wrong.stderr
    assert shell.directory().read_agent() is None


def test_an_endpoint_that_cannot_connect_in_time_keeps_trying(shell: Shell) -> None:
    shell.ok("configure", "--max-workers", "1")
    shell.cloud.offline()
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` may have started the tests
    try:
        late = shell.run("start", "--detach", "--timeout", "5")
    finally:
        signal.signal(signal.SIGHUP, inherited)
    assert late.returncode == os.EX_UNAVAILABLE
    assert f"process {shell.pid()} runs on" in late.stderr
    assert "--timeout" in late.stderr
    wait_until(lambda: "NO_FORWARDER" in shell.ok("list"))
    shell.cloud.online()
    wait_until(lambda: "Running" in shell.ok("list"))
    psutil.Process(shell.pid()).send_signal(signal.SIGHUP)
    wait_until(lambda: "Stopped" in shell.ok("list"))


def test_an_agent_that_still_loads_is_waited_for() -> None:
    readable, writable = os.pipe()
    loads = "import os, sys, time\nwhile time.process_time() < 4: pass\nos.write(int(sys.argv[1]), b'x')"
    with os.fdopen(readable, "rb") as ready:
        process = subprocess.Popen([sys.executable, "-c", loads, str(writable)], pass_fds=(writable,))
        os.close(writable)
        assert wait_for_start(ready, process.pid, is_up=lambda: False, timeout_s=3.0)
        process.wait()
    readable, writable = os.pipe()
    with os.fdopen(readable, "rb") as ready, subprocess.Popen(["sleep", f"{WAIT_S:g}"], pass_fds=(writable,)) as stuck:
        os.close(writable)
        assert not wait_for_start(ready, stuck.pid, is_up=lambda: False, timeout_s=0.5)
        stuck.kill()


def test_a_start_without_standard_streams_returns(shell: Shell) -> None:
    shell.ok("configure", "--max-workers", "1")
    command = ["sh", "-c", 'exec "$0" start --detach <&- >&- 2>&-', PROGRAM]
    subprocess.run(command, env=shell.environment, check=True, timeout=WAIT_S)
    assert "Running" in shell.ok("list")
    assert shell.cloud.end(shell.cloud.submit(abs, -5)).value == 5


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_a_start_that_is_interrupted_leaves_nothing(shell: Shell, number: signal.Signals, status: int) -> None:
    shell.ok("configure", "--max-workers", "1")
    shell.cloud.offline()
    command = [PROGRAM, "start", "--detach"]
    starting = subprocess.Popen(command, env=shell.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until(lambda: shell.directory().read_agent() is not None)
    agent = psutil.Process(shell.pid())
    starting.send_signal(number)
    starting.communicate(timeout=WAIT_S)
    assert starting.returncode == status
    wait_gone([agent])


def test_a_starting_forwarder_is_reported_once(shell: Shell) -> None:
    shell.ok("configure", "--max-workers", "1")
    here, asked = shell.cloud.http.connect, list[None]()

    def connect(body: dict[str, Any]) -> dict[str, Any]:
        asked.append(None)
        waking = ForwarderWaking("it sleeps", retry_after_s=0.1).record.to_json()
        return here(body) if len(asked) > 3 else {"http_status_code": 503, **waking}

    shell.cloud.http.connect = connect
    shell.ok("start", "--detach")
    log = shell.directory().log_file.read_text()
    assert log.count("is being woken, which takes about a minute") == 1
    assert log.count("FORWARDER_WAKING") == 1
    assert log.count("The forwarder is awake") == 1


def test_agent_reports_the_share_of_a_worker(shell: Shell) -> None:
    shell.ok("configure", "--max-workers", "1")
    config = shell.directory().path / "config.yaml"
    config.write_text("engine:\n  cores_per_worker: 0.5\n  max_workers_per_node: 1\n")
    here, shares = shell.cloud.http.connect, list[Any]()

    def connect(body: dict[str, Any]) -> dict[str, Any]:
        shares.append(body["worker_share"])
        return here(body)

    shell.cloud.http.connect = connect
    shell.ok("start", "--detach")
    cores = len(os.sched_getaffinity(0))
    assert shares[0] == {"cores": 0.5, "gpus": 0, "node_cores": cores, "node_gpus": 0, "account": ""}


def test_a_refused_endpoint_is_reported_at_start(shell: Shell) -> None:
    shell.ok("configure", "--max-workers", "1")
    shell.cloud.refusal = {"code": "ENDPOINT_IN_USE", "message": "another agent runs", "fault": "caller"}
    refused = shell.run("start", "--detach", "--timeout", f"{WAIT_S:g}")  # it waits for the end of the other one
    assert refused.returncode == os.EX_CANTCREAT
    assert "another agent runs" in refused.stderr


def test_an_old_copy_of_a_spool_is_refused_as_unusable_data(shell: Shell) -> None:
    shell.ok("configure", "--max-workers", "1")
    shell.cloud.refusal = {"code": "SPOOL_OUTDATED", "message": "the spool is an old copy", "fault": "caller"}
    refused = shell.run("start", "--detach")
    assert refused.returncode == os.EX_DATAERR
    assert "the spool is an old copy" in refused.stderr
    foreground = shell.run("start")
    assert foreground.returncode == os.EX_DATAERR


def test_foreground_start_ends_on_ctrl_c(shell: Shell) -> None:
    shell.ok("configure", "--max-workers", "1")
    command = [PROGRAM, "start"]
    process = subprocess.Popen(
        command, env=shell.environment, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    shell.cloud.wait_connected()
    assert shell.pid() == process.pid
    wait_until(lambda: len(psutil.Process(process.pid).children(recursive=True)) >= 3)
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    _, log = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert "has ended" in log
    wait_gone(family)


def test_adopting_a_registration(shell: Shell) -> None:
    shell.ok("configure", "--max-workers", "1")
    assert shell.run("start", "--endpoint-uuid", "nonsense").returncode == os.EX_CONFIG
    shell.ok("start", "--detach", "--endpoint-uuid", ENDPOINT_ID)
    assert "POST /v3/endpoints" not in shell.cloud.http.requests
    assert shell.cloud.hellos[0].endpoint_id == ENDPOINT_ID


def test_small_commands(shell: Shell) -> None:
    assert f"python {platform.python_version()}\n" in shell.ok("version")
    assert shell.ok("-V").startswith("farcall-endpoint ")
    assert shell.ok("list") == shell.ok("ls") == ""
    assert json.loads(shell.ok("list", "--json")) == []
    assert "not a valid endpoint name" in shell.run("configure", "../elsewhere").stderr
    shell.ok("configure", "one")
    assert "already configured" in shell.run("configure", "one").stderr
    assert shell.ok("list") == "-\tInitialized\tone\t\n"
    assert "status\tInitialized\n" in shell.run("status", "one").stdout
    assert [each["name"] for each in json.loads(shell.ok("list", "--json"))] == ["one"]
    completed = shell.ok(
        _FARCALL_ENDPOINT_COMPLETE="complete_bash", COMP_WORDS="farcall-endpoint start o", COMP_CWORD="2"
    )
    assert completed.split() == ["one"]
    elsewhere = shell.home / "elsewhere"
    shell.ok("--config-dir", str(elsewhere), "configure", "two")
    assert (elsewhere / "endpoints" / "two" / "config.yaml").exists()


def test_an_endpoint_that_can_run_nothing_is_blocked(shell: Shell, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: no hours are left' >&2; exit 1\n")
    (tools / "sbatch").chmod(0o755)
    path = {"PATH": f"{tools}:{os.environ['PATH']}"}
    listed = [line.split("\t") for line in shell.ok("configure", "--template", "list").splitlines()]
    assert "slurm-cpu" in [name for name, _ in listed]
    assert shell.run("configure", "lab", "--template", "slurm-cpu", "--set", "queue=x").returncode == os.EX_CONFIG
    said = shell.ok("configure", "lab", "--template", "slurm-cpu", "--set", "account=us", "--set", "init_blocks=1")
    assert "Review in " in said
    assert "partition, scheduler_options, worker_init" in said
    config = shell.directory("lab").config_file
    config.write_text(config.read_text().replace("engine:\n", "engine:\n  max_block_failures: 1\n", 1))
    shell.ok("start", "lab", "--detach", **path)
    wait_until(lambda: shell.run("status", "lab").returncode == 3)
    shown = shell.run("status", "lab").stdout.splitlines()
    assert "status\tBlocked" in shown
    assert any("no hours are left" in line for line in shown if line.startswith("note\t"))
    assert "\tBlocked\tlab\t" in shell.ok("list")
    shell.cloud.wait_for(lambda: "no hours are left" in str(shell.cloud.reports[-1].detail))


def test_a_watched_status_ends_with_ctrl_c(shell: Shell) -> None:
    shell.ok("configure", "--max-workers", "1")
    command = [PROGRAM, "status", "--watch"]
    watching = subprocess.Popen(command, env=shell.environment, stdout=subprocess.PIPE, text=True)
    try:
        assert watching.stdout is not None
        assert "status\tInitialized\n" in iter(watching.stdout.readline, "")
        shell.ok("start", "--detach")
        assert "status\tRunning\n" in iter(watching.stdout.readline, "")
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=WAIT_S)
        assert watching.returncode == 130
    finally:
        watching.kill()
        watching.wait()


def test_a_secret_key_that_others_may_read_is_refused(shell: Shell) -> None:
    shell.ok("configure")
    (shell.directory().path / "curve.secret").chmod(0o644)
    refused = shell.run("start", "--detach")
    assert refused.returncode == os.EX_CONFIG
    assert "chmod 600" in refused.stderr


def test_later_starts_need_no_login(shell: Shell) -> None:
    shell.ok("configure")
    shell.ok("start", "--detach")
    shell.ok("stop")
    secret = shell.directory().path / "credential.secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    no_login = {"FARCALL_API_URL": "", "FARCALL_TOKEN": ""}

    assert "is connected" in shell.ok("start", "--detach", **no_login)
    assert shell.cloud.end(shell.cloud.submit(abs, -5)).value == 5
    shell.ok("stop")
    assert shell.cloud.http.requests.count(f"POST /v3/endpoints/{ENDPOINT_ID}/credential") == 1

    assert "is not set" in shell.run("revoke-credential", "default", **no_login).stderr, "this needs the login"
    shell.ok("revoke-credential", "default")
    shell.ok("revoke-credential", ENDPOINT_ID)
    assert shell.cloud.http.requests.count(f"DELETE /v3/endpoints/{ENDPOINT_ID}/credential") == 2
    secret.unlink()
    refused = shell.run("start", **no_login)
    assert refused.returncode == 78, refused.stderr
    assert "is not set" in refused.stderr
