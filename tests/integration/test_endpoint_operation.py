"""What an administrator does with an endpoint besides starting it: look, diagnose, start at boot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support.endpoint import running_endpoint
from tests.support.endpoint.endpoint_command import PROGRAM, EndpointCommand
from tests.waiting import WAIT_S, wait_until

SYSTEMCTL = """\
#!/bin/sh
echo "$@" >> "$SYSTEMCTL_LOG"
[ -z "$SYSTEMCTL_FAILS" ] || { echo "Failed to connect to bus: No medium found" >&2; exit 1; }
"""


class Shell(EndpointCommand):
    """Commands in a home of their own, with a systemctl that only writes down what it is asked."""

    def __init__(self, tmp_path: Path) -> None:
        self.home = tmp_path / "farcall home 100%"
        self.asked = tmp_path / "systemctl.log"
        tools = tmp_path / "tools"
        tools.mkdir()
        (tools / "systemctl").write_text(SYSTEMCTL)
        (tools / "systemctl").chmod(0o755)
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("FARCALL_", "XDG_"))},
            "HOME": str(tmp_path),
            "FARCALL_HOME": str(self.home),
            "PATH": f"{tools}:{os.environ['PATH']}",
            "SYSTEMCTL_LOG": str(self.asked),
            "COLUMNS": "200",
        }
        super().__init__(environment, tmp_path)
        self.unit = tmp_path / ".config" / "systemd" / "user" / "farcall-endpoint-lab.service"


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    shell = Shell(tmp_path)
    shell.ok("configure", "lab", "--max-workers", "1")
    return shell


def test_start_at_boot_can_be_enabled_and_disabled(shell: Shell) -> None:
    refused = shell.run("enable-on-boot", "lab", FARCALL_API_URL="https://x", FARCALL_TOKEN="plant")
    assert refused.returncode == os.EX_CONFIG, "variables of this login are not there at boot"
    assert "config.toml" in refused.stderr
    (shell.home / "config.toml").write_text('[default]\napi_url = "http://127.0.0.1:9"\ntoken = "plant"\n')

    said = shell.ok("enable-on-boot", "lab", HTTPS_PROXY="http://u:plant@proxy", NO_PROXY="localhost")
    assert "loginctl enable-linger" in said
    text = shell.unit.read_text()
    assert "plant" not in text
    assert f'ExecStart="{sys.executable}" "-P" "-m" "farcall_endpoint.agent" "lab" "--home" ' in text
    assert 'Environment="NO_PROXY=localhost"' in text
    assert "Delegate=yes\n" in text, "functions get CPU shares in groups of its own"
    assert shell.asked.read_text().splitlines() == [
        "--user daemon-reload",
        "--user enable farcall-endpoint-lab.service",
    ]
    assert "RestartPreventExitStatus=78 73 77 65 66\n" in text, "an old copy of a spool stays one"
    if shutil.which("systemd-analyze"):
        verified = subprocess.run(
            ["systemd-analyze", "verify", "--user", "--recursive-errors=no", str(shell.unit)],
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_S,
        )
        assert shell.unit.name not in verified.stderr, verified.stderr

    assert "Removed" in shell.ok("disable-on-boot", "lab")
    assert not shell.unit.exists()
    assert "was not started at boot" in shell.ok("disable-on-boot", "lab")


def test_without_a_usable_systemd_the_command_to_run_is_printed(shell: Shell) -> None:
    (shell.home / "config.toml").write_text('[default]\napi_url = "http://127.0.0.1:9"\ntoken = "plant"\n')
    said = shell.ok("enable-on-boot", "lab", SYSTEMCTL_FAILS="1")
    assert shell.unit.exists()
    assert "Failed to connect to bus: No medium found" in said
    assert "systemctl --user enable farcall-endpoint-lab.service" in said
    missing = shell.ok("enable-on-boot", "lab", PATH="/nowhere")
    assert "no systemctl" in missing
    assert "Deleted lab" in shell.ok("delete", "lab", "--yes")
    assert not shell.unit.exists(), "a deleted endpoint is not started at boot"


def test_diagnose_of_an_endpoint_that_never_ran(shell: Shell) -> None:
    said = shell.ok("diagnose", "lab", "--no-network")
    assert "config.yaml is good" in said
    (archive,) = shell.home.parent.glob("farcall-diagnose-lab-*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"findings.txt", "versions.json", "config.yaml"} <= names
    refused = shell.run("diagnose", "lab", "--no-network", "--output", str(archive))
    assert refused.returncode == os.EX_CONFIG
    assert "File exists" in refused.stderr


def test_status_and_diagnose_of_an_endpoint_that_runs(tmp_path: Path) -> None:
    with running_endpoint(tmp_path / "home", workers=1) as endpoint:
        arguments = [PROGRAM, "-c", str(endpoint.home), "status", "test", "--json"]
        wait_until(lambda: endpoint.directory.read_status().get("workers") == 1)
        facts = json.loads(subprocess.run(arguments, capture_output=True, check=True, timeout=WAIT_S).stdout)
        assert facts["status"] == "Running"
        assert endpoint.agent is not None
        assert facts["pid"] == endpoint.agent.pid
        assert facts["workers"] == 1
        assert [block["state"] for block in facts["blocks"]] == ["running"]

        output = tmp_path / "report"
        arguments = [PROGRAM, "-c", str(endpoint.home), "diagnose", "test", "--output", str(output)]
        said = subprocess.run(
            arguments, env=endpoint.environment, capture_output=True, text=True, check=True, timeout=60
        ).stdout
        assert "its port is open" in said
        assert "the endpoint is Running" in said
        processes = json.loads((output / "processes.json").read_text())
        assert any("farcall_endpoint.manager" in process["command"] for process in processes)
        spool = json.loads((output / "spool.json").read_text())
        assert spool["bytes"] > 0
        assert "the running agent holds it" in spool["note"], "no other process may lock it"
        assert list((output / "logs").glob("manager-*.log")), "the manager writes its own log"
        secret = (endpoint.directory.path / "curve.secret").read_text().strip()
        assert not any(secret in path.read_text() for path in output.rglob("*") if path.is_file())
