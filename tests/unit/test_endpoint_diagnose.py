"""A report for a bug has everything but secrets."""

from __future__ import annotations

import json
import os
import re
import stat
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from farcall_common.environments import TYPES
from farcall_common.event_log import EventLog, read_events
from farcall_endpoint.agent.core.connection import ApiAnswered, ConnectionLost, Event, for_log
from farcall_endpoint.config.reader import read_config
from farcall_endpoint.config.schema import Config
from farcall_endpoint.config.template import write_config
from farcall_endpoint.diagnose import Report, Scrubber, gather
from farcall_endpoint.diagnose.environments import environments, findings, read_tried
from farcall_endpoint.diagnose.network import check_port, last_address
from farcall_endpoint.services.directory import EndpointDirectory
from tests.support.packages import make_wheel

KNOWN = "kx9-known-secret-42"


@pytest.mark.parametrize(
    "text",
    [
        f"a line with {KNOWN} in it",
        "FARCALL_TOKEN=plant-1",
        "export MY_API_KEY='plant-1 with space'",
        'password: "plant-1 \\" with quote"',
        "  db_password: plant-1",
        '{"aws_secret_access_key": "plant-1"}',
        "--auth-token plant-1",
        "Authorization: Bearer plant-1",
        "authorization=Basic plant-1plant-1",
        "got header Bearer plant-1-abcdef",
        "postgresql://me:plant-1@db.example.org:5432/x",
        "https://plant-1@example.org/x",
        "http://me:p@plant-1@proxy:3128",
        "GET https://bucket/key?X-Amz-Credential=plant-1&X-Amz-Date=2026&X-Amz-Signature=plant-1",
        "AWS_SESSION_TOKEN plant-1".replace(" ", " = "),
        "-----BEGIN RSA PRIVATE KEY-----\nplant-1\nplant-1\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nplant-1 and the file ends",
        "cookie: session=plant-1",
        "connect ticket='plant-1'",
    ],
)
def test_secrets_are_removed(text: str) -> None:
    cleaned = Scrubber([KNOWN]).clean(f"before\n{text}\nafter")
    assert "plant-1" not in cleaned
    assert KNOWN not in cleaned
    assert "<removed>" in cleaned
    assert cleaned.startswith("before\n")


@pytest.mark.parametrize(
    "token", ["eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln", "AKIAIOSFODNN7EXAMPLE", "ghp_0123456789abcdef"]
)
def test_tokens_are_recognised_by_their_format(token: str) -> None:
    assert token not in Scrubber([]).clean(f"it was {token}, I think")


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-21 04:55:01,123 INFO    agent[12] connecting to tcp://10.0.0.7:443",
        "engine:\n  max_workers_per_node: 4\n  provider:\n    type: SlurmProvider\n    account: abc",
        "the API does not accept the token",
        "worker 3 ended: killed by signal 9",
        "http://127.0.0.1:8000/v2/endpoints/11111111-2222-4333-8444-555555555555/status",
        "me@example.org ran it",
    ],
)
def test_harmless_text_is_kept(text: str) -> None:
    assert Scrubber([KNOWN]).clean(text) == text


def test_variables_with_secret_names_lose_their_values() -> None:
    environ = {
        "GITHUB_PAT": "x1",
        "MY_KEY": "x2",
        "DB_PASSWORD": "x3",
        "PATH": "/bin",
        "KEYBOARD": "de",
        "AUTHOR": "me",
    }
    assert Scrubber([]).clean_environment(environ) == {
        "GITHUB_PAT": "<removed>",
        "MY_KEY": "<removed>",
        "DB_PASSWORD": "<removed>",
        "PATH": "/bin",
        "KEYBOARD": "de",
        "AUTHOR": "me",
    }


def test_secrets_are_found_in_json_escapes_and_short_ones_are_skipped() -> None:
    scrubber = Scrubber(['quo"te\\d', "abc"])
    assert scrubber.clean(r'{"x": "quo\"te\\d"}') == '{"x": "<removed>"}'
    assert scrubber.clean("abcdef") == "abcdef"


def test_long_lines_are_redacted_in_linear_time() -> None:
    started_at = time.monotonic()
    Scrubber(["secret-secret"]).clean("a" * 300_000 + "." * 300_000 + "tokentoken" * 30_000)
    assert time.monotonic() - started_at < 60


def test_addresses_of_forwarders_are_found_and_tried() -> None:
    log = "INFO agent[1] connecting to tcp://one:1\nINFO agent[1] connecting to tcp://two:443\n"
    assert last_address(log) == "tcp://two:443"
    assert last_address("") is None
    assert check_port("tcp://127.0.0.1:9").good is False
    assert check_port("nonsense").good is None


# -- the whole report --------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> Path:
    directory = EndpointDirectory.of(tmp_path, "lab")
    directory.create()
    write_config(directory.config_file, Config())
    (tmp_path / "config.toml").write_text(
        '[default]\napi_url = "http://u:plant-2@127.0.0.1:9"\ntoken = "plant-token"\n'
    )
    return tmp_path


def texts(report: Report) -> str:
    return "\n".join([*report.files, *report.files.values(), *(finding.text for finding in report.findings)])


def test_reports_contain_no_planted_secret(home: Path) -> None:
    directory = EndpointDirectory.of(home, "lab")
    secret = (directory.path / "curve.secret").read_text().strip()
    directory.config_file.write_text(
        "engine:\n  provider:\n    type: SlurmProvider\n    worker_init: |\n      export DB_PASSWORD=plant-3\n"
        "      curl https://me:plant-4@example.org/\n"
    )
    directory.log_dir.mkdir()
    spoken = f"the key is {secret}, the token plant-token, the other plant-env-5 and plant-env-6\n"
    for path in (directory.log_file, directory.console_file, directory.log_dir / "manager-n1-7.log"):
        path.write_text(spoken)
    (directory.path / "client.keys").write_text("plant-key-file-7 plant-key-file-8\n")
    directory.write_status({"connected": False, "connection_problem": "refused: Bearer plant-9-abc"})
    environ = {
        "PATH": os.environ["PATH"],
        "FARCALL_TOKEN": "plant-env-5",
        "SLURM_JWT_TOKEN": "plant-env-6",
        "MY_OWN_VARIABLE": "plant-not-asked-for",
        "HTTPS_PROXY": "http://u:plant-10@proxy:3128",
    }
    report = gather(directory, home=home, environ=environ, with_environments=False)
    everything = texts(report)
    assert "plant-" not in everything
    assert secret not in everything
    assert "MY_OWN_VARIABLE" not in everything
    assert "SLURM_JWT_TOKEN" in report.files["environment.json"]
    assert "export DB_PASSWORD=<removed>" in report.files["config.yaml"]
    assert "the key is <removed>" in report.files["logs/manager-n1-7.log"]


def test_disks_of_the_files_of_tasks(home: Path) -> None:
    directory = EndpointDirectory.of(home, "lab")
    options: dict[str, Any] = {"home": home, "environ": {}, "with_network": False, "with_environments": False}
    working_dir = directory.path / read_config(directory.config_file).engine.working_dir
    working_dir.mkdir()
    report = gather(directory, **options)
    assert [each["path"] for each in json.loads(report.files["disk.json"]) if each["name"] == "working_dir"] == [
        str(working_dir)
    ]
    assert "different file systems" not in report.files["findings.txt"]
    working_dir.rmdir()
    working_dir.symlink_to("/proc")
    assert "different file systems" in gather(directory, **options).files["findings.txt"]


def test_report_has_the_requested_parts(home: Path) -> None:
    directory = EndpointDirectory.of(home, "lab")
    directory.log_file.write_text("INFO connecting to tcp://127.0.0.1:9\n")
    tools = home / "tools"
    tools.mkdir()
    (tools / "sbatch").touch(mode=0o755)
    report = gather(directory, home=home, environ={"PATH": str(tools)})
    assert {name.partition("/")[0] for name in report.files} == {
        "config.yaml",
        "disk.json",
        "environment.json",
        "environments.json",
        "files.json",
        "findings.txt",
        "logs",
        "machine.json",
        "network.json",
        "processes.json",
        "readable.json",
        "schedulers.json",
        "spool.json",
        "status.json",
        "valkey.json",
        "versions.json",
    }
    assert str(tools / "sbatch") in report.files["schedulers.json"]
    assert '"farcall-endpoint"' in report.files["versions.json"]
    assert "free_bytes" in report.files["disk.json"]
    assert '"path": "curve.secret"' in report.files["files.json"]
    said = report.files["findings.txt"]
    assert "BAD  the API at http://<removed>@127.0.0.1:9: cannot be reached" in said
    assert "BAD  the forwarder at tcp://127.0.0.1:9: cannot be reached: Connection refused" in said
    assert "good  config.yaml is good" in said
    assert re.search("good  environments that work on this machine: .*conda, uv, venv", said)
    assert re.search("-  environments whose programs are not installed: .*singularity", said)
    assert (
        "network.json"
        not in gather(directory, home=home, environ={}, with_network=False, with_environments=False).files
    )


def test_event_logs_are_in_a_report_and_can_still_be_read(home: Path) -> None:
    directory = EndpointDirectory.of(home, "lab")
    lost = ConnectionLost(f"https://bucket/key?X-Amz-Signature={KNOWN} password: plant-1")
    log = EventLog[Event, float](for_log)
    log.add([ApiAnswered((), "the-ticket", 60.0), lost], 1.0)
    directory.write_events("connection", log.to_json())
    report = gather(directory, home=home, environ={}, with_network=False, with_environments=False)
    assert "events-tasks.jsonl" not in report.files
    text = report.files["events-connection.jsonl"]
    assert not any(secret in text for secret in (KNOWN, "plant-1", "the-ticket"))
    [(now, [answered, failed])] = read_events(text.encode(), {kind.__name__: kind for kind in Event.__subclasses__()})
    assert now == 1.0
    assert answered == ApiAnswered((), "", 60.0)
    assert isinstance(failed, ConnectionLost)
    assert "<removed>" in failed.reason


def test_failed_part_is_reported_in_its_place(home: Path) -> None:
    directory = EndpointDirectory.of(home, "lab")
    directory.config_file.write_text("engine:\n  prefetch: many\n")
    directory.spool_file.write_bytes(b"this is no database" * 100)
    (directory.path / "curve.secret").chmod(0o644)
    report = gather(directory, home=home, environ={}, with_network=False, with_environments=False)
    assert "could not be determined" in report.files["spool.json"]
    bad = [finding.text for finding in report.findings if finding.good is False]
    assert any("config.yaml:2:13: engine.prefetch must be" in text for text in bad)
    assert any("chmod 600" in text for text in bad)


def test_unreadable_files_do_not_end_a_report(home: Path) -> None:
    directory = EndpointDirectory.of(home, "lab")
    directory.events_file("tasks").write_text("[" * 100_000)
    directory.log_dir.mkdir(exist_ok=True)
    (directory.log_dir / "removed.log").symlink_to("removed-meanwhile")
    report = gather(directory, home=home, environ={}, with_network=False, with_environments=False)
    assert "could not be determined" in report.files["events-tasks.jsonl"]
    assert report.files["logs/removed.log"] == ""
    assert any("removed.log cannot be read" in finding.text for finding in report.findings)


def test_directories_of_binds_that_do_not_exist_are_found(home: Path) -> None:
    directory = EndpointDirectory.of(home, "lab")
    directory.config_file.write_text("engine: {environments: {binds: [/nowhere/data]}}")
    report = gather(directory, home=home, environ={}, with_network=False, with_environments=False)
    bad = [finding.text for finding in report.findings if finding.good is False]
    assert any("config.yaml:1:33: engine.environments.binds: /nowhere/data does not exist" in text for text in bad)


def test_a_report_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        Report({"a.txt": "a", "b" * 300: "too long a name"}, ()).write_directory(tmp_path / "r")
    assert list(tmp_path.iterdir()) == []


def test_report_is_readable_by_its_owner_only(home: Path, tmp_path: Path) -> None:
    report = Report({"a.txt": "ä", "logs/b.log": "x"}, ())
    archive, directory = tmp_path / "r.tar.gz", tmp_path / "r"
    report.write_archive(archive)
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    with tarfile.open(archive) as opened:
        assert sorted(opened.getnames()) == ["r/a.txt", "r/logs/b.log"]
    with pytest.raises(FileExistsError):
        report.write_archive(archive)
    report.write_directory(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert (directory / "logs" / "b.log").read_text() == "x"
    with pytest.raises(FileExistsError):
        report.write_directory(directory)


# -- environments ------------------------------------------------------------------------------------------------------

ALL_WELL: dict[str, Any] = {
    "technologies": {"bubblewrap": "", "podman": "", "venv": ""},
    "namespaces_of_forks": "",
    "without_forks": {"bubblewrap": "", "docker": "not there", "podman": ""},
    "bubblewrap_isolation": "",
    "refused_submitters": "",
    "cgroups": ["/sys/fs/cgroup/me"],
    "cpu_shares": {"cgroup v2": "cgroup.subtree_control: Device or resource busy", "cgroup v1": "", "autogroup": ""},
    "uv_index": "",
}


def said(**changes: object) -> dict[str, bool | None]:
    return {text: good for good, text in findings({**ALL_WELL, **changes}, needed="podman")}


def test_a_machine_that_can_do_all() -> None:
    assert said() == {
        "environments that work on this machine: bubblewrap, podman, venv": True,
        "workers of other submitters see their own files only (bubblewrap)": True,
        "forks of templates can have namespaces of their own on this machine": True,
        "functions can have CPU shares of their own: cgroup v1": True,
        "uv's package index: answers": True,
    }


def test_what_does_not_work_is_reported_in_words_of_its_program() -> None:
    technologies = {"docker": "docker: no daemon", "shifter": "shifter: the program shifter is not installed"}
    found = said(technologies=technologies | {"podman": "podman: no newuidmap"})
    assert found["environments that work on this machine: none"] is True
    assert found["environments: docker: no daemon"] is None
    assert found["environments whose programs are not installed: shifter"] is None
    assert found["container_type: podman does not work on this machine: podman: no newuidmap"] is False


def test_environments_that_are_not_tried_in_time_are_one_line_with_their_names() -> None:
    late = read_tried(b'["venv",""]\n["docker","docker: no daemon"]\n\nno answer within 20 s')
    found = said(technologies=late)
    assert found["environments that work on this machine: venv"] is True
    [line] = [text for text in found if "no answer within 20 s" in text]
    assert line.startswith("environments that could not be tried: apptainer, ")
    assert "docker" not in line
    found = said(technologies=read_tried(b"no answer within 20 s"))
    assert not any("work on this machine: none" in text for text in found)


def test_what_is_done_instead_is_reported() -> None:
    bare = "namespaces: Operation not permitted"
    assert "workers of other submitters are confined by Landlock only: bwrap: no" in said(
        bubblewrap_isolation="bwrap: no"
    )
    assert "tasks of other submitters are refused: bwrap: no; Landlock: no" in said(
        bubblewrap_isolation="bwrap: no", refused_submitters="bwrap: no; Landlock: no"
    )
    assert (
        said(refused_submitters="this endpoint runs as root")[
            "tasks of other submitters are refused: this endpoint runs as root"
        ]
        is None
    )
    fresh = "forks of templates cannot have namespaces of their own here, so each worker in a container is a fresh one"
    assert f"{fresh}: {bare}" in said(namespaces_of_forks=bare)
    masked = {"bubblewrap": "no", "podman": "no"}
    assert "each worker of bubblewrap, podman is a fresh container: no" in said(without_forks=masked)
    assert any("processes of workers are found by their process tree" in text for text in said(cgroups=[]))
    shares = {"cgroup v2": "not mounted", "autogroup": "no"}
    reasons = "cgroup v2: not mounted; autogroup: no"
    assert f"functions can have no CPU shares of their own here: {reasons}" in said(cpu_shares=shares)
    assert said(uv_index="tcp connect error")["uv's package index: tcp connect error"] is False


def test_an_index_is_tried_with_uv(tmp_path: Path) -> None:
    facts = environments(os.environ, index_url=str(tmp_path), with_network=True)
    assert "pip was not found" in facts["uv_index"]
    make_wheel(tmp_path, "pip", "99.0")
    before = set(tmp_path.iterdir())
    assert environments(os.environ, index_url=str(tmp_path), with_network=True)["uv_index"] == ""
    assert set(tmp_path.iterdir()) == before
    assert set(facts["technologies"]) == set(TYPES)
    assert set(facts["cpu_shares"]) == {"cgroup v2", "cgroup v1", "autogroup"}
    assert "uv_index" not in environments(os.environ, index_url="", with_network=False)
