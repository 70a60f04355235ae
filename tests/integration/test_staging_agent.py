"""Tasks with files on real processes: agent, transfer process, managers and workers, which are killed meanwhile."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from farcall_common.file_arguments import File
from farcall_common.wire import TaskState, new_id
from tests.support.endpoint import EndpointProcess, running_endpoint
from tests.support.file_calls import submit
from tests.support.file_servers import Answer, WebServer
from tests.waiting import WAIT_S, wait_until


@pytest.fixture
def web() -> Iterator[WebServer]:
    server = WebServer()
    yield server
    server.close()


@pytest.fixture
def endpoint(tmp_path: Path, web: WebServer) -> Iterator[EndpointProcess]:
    """With ``s3://lab`` at the web server."""
    with running_endpoint(tmp_path, start=False) as endpoint:
        config = yaml.safe_load(endpoint.directory.config_file.read_text())
        options = {"endpoint": web.url, "access_key_id": "a", "secret_access_key": "b", "region": "x"}
        config["files"] = {"storages": [{"url": "s3://lab", "options": options}]}
        endpoint.directory.config_file.write_text(yaml.safe_dump(config))
        endpoint.start()
        yield endpoint


class Gate:
    """A file that a server gives, or takes, only when the gate is open."""

    def __init__(self, content: bytes = b"data") -> None:
        self.content = content
        self.opened = threading.Event()
        self.waiting = 0

    def __call__(self, method: str) -> Answer:
        if method == "HEAD":
            return 200, {"ETag": '"1"', "Content-Length": str(len(self.content))}, b""
        self.waiting += 1
        self.opened.wait(240)
        return 200, {"ETag": '"1"'}, self.content if method == "GET" else b""


def read(source: File) -> bytes:
    with source.open("rb") as file:
        content: bytes = file.read()
    return content


def write(source: File, out: File, runs: str) -> int:
    with open(runs, "a") as log:  # noqa: PTH123
        log.write("run\n")
    with source.open("rb") as file, out.open("wb") as written:
        return written.write(file.read().upper())


def source(web: WebServer, path: str, content: bytes) -> File:
    web.files.setdefault(path, content)
    return File(web.url + path, sha256=hashlib.sha256(content).hexdigest())


def transfer_process(endpoint: EndpointProcess) -> psutil.Process:
    found = []
    for each in endpoint.family():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            found += [each] if "farcall_endpoint.files.process" in each.cmdline() else []
    [process] = found
    return process


def transfers(endpoint: EndpointProcess) -> list[dict[str, Any]]:
    return list(endpoint.directory.read_status().get("transfers", ()))


def staged(endpoint: EndpointProcess) -> list[Path]:
    working_dir = endpoint.directory.path / "tasks_working_dir"
    return [*working_dir.glob("staged/*"), *working_dir.glob("submitters/*/staged/*")]


def test_a_task_reads_and_writes_files_and_leaves_the_copy_in_the_cache_only(
    endpoint: EndpointProcess, web: WebServer, tmp_path: Path
) -> None:
    given = source(web, "/data", b"data")
    for number in range(2):
        out = File(f"s3://lab/out/{number}", "w")
        end = endpoint.cloud.end(submit(endpoint, write, given, out, str(tmp_path / "runs")))
        assert (end.state, end.value) == (TaskState.SUCCESS, 4)
        assert web.stored[f"/lab/out/{number}"] == b"DATA"
        read_row, written_row = end.spec.details["files"]
        assert (read_row["url"], read_row["cached"]) == (given.url, bool(number))
        assert (written_row["url"], written_row["size_bytes"]) == (out.url, 4)
    assert web.requests["GET", "/data"] == 1
    wait_until(lambda: staged(endpoint) == [], "the directories of the tasks are removed")
    wait_until(lambda: transfers(endpoint) == [], "the status names no transfers")
    wait_until(
        lambda: endpoint.directory.read_status().get("files_cache_bytes") == 4096, "the status has the cache's size"
    )


def test_an_endpoint_whose_tasks_have_no_files_has_no_transfer_process(endpoint: EndpointProcess) -> None:
    endpoint.cloud.end(endpoint.cloud.submit(len, "abc"))
    assert not [each for each in endpoint.family() if "farcall_endpoint.files.process" in each.cmdline()]


def test_another_submitter_has_files_of_storages_that_are_open_only(endpoint: EndpointProcess, web: WebServer) -> None:
    end = endpoint.cloud.end(submit(endpoint, read, source(web, "/data", b"data"), submitter=new_id()))
    assert end.error["code"] == "FILE_DENIED"
    assert web.requests == {}
    assert "may not use the file" in endpoint.log()


def test_a_missing_file_fails_its_task_with_one_line_in_the_log(endpoint: EndpointProcess, web: WebServer) -> None:
    end = endpoint.cloud.end(submit(endpoint, read, File(web.url + "/none?signature=secret", sha256="0" * 64)))
    assert end.error["code"] == "FILE_NOT_FOUND"
    log = endpoint.log()
    assert log.count("/none") == 1
    assert "secret" not in log


def test_a_slot_is_free_and_the_status_says_what_moves_while_a_file_comes(
    endpoint: EndpointProcess, web: WebServer
) -> None:
    gate = web.files["/data"] = Gate()
    waiting = [submit(endpoint, read, source(web, "/data", b"data")) for _ in range(3)]
    wait_until(lambda: gate.waiting, "the transfer begins")
    assert endpoint.cloud.end(endpoint.cloud.submit(len, "abc")).value == 3
    begun = f"{web.url}/data"
    wait_until(
        lambda: [len(rows := transfers(endpoint)), *(row["url"] for row in rows[:1])] == [3, begun], "the status"
    )
    row = transfers(endpoint)[0]
    assert (row["state"], row["files"]) == ("staging-in", "0/1")
    gate.opened.set()
    assert [end.value for end in endpoint.cloud.ends(waiting)] == [b"data"] * 3
    assert gate.waiting == 1


def test_ten_thousand_files_of_one_task(endpoint: EndpointProcess, web: WebServer) -> None:
    def total(*files: File) -> int:
        size_bytes = 0
        for each in files:
            with each.open("rb") as file:
                size_bytes += len(file.read())
        return size_bytes

    sources = [source(web, f"/{number}", b"%d" % number) for number in range(10_000)]
    end = endpoint.cloud.end(submit(endpoint, total, *sources))
    assert end.value == sum(len(str(number)) for number in range(10_000))
    assert set(web.requests.values()) == {1}
    assert len(end.spec.details["files"]) == 100
    assert transfer_process(endpoint).memory_info().rss < 300 * 2**20
    wait_until(lambda: staged(endpoint) == [], "the directories of the tasks are removed")


def test_a_task_is_cancelled_while_its_files_move(endpoint: EndpointProcess, web: WebServer, tmp_path: Path) -> None:
    gate = web.files["/data"] = Gate()
    task_id = submit(endpoint, read, source(web, "/data", b"data"))
    wait_until(lambda: gate.waiting, "the transfer begins")
    endpoint.cloud.cancel(task_id)
    assert endpoint.cloud.end(task_id).state is TaskState.CANCELLED
    gate.opened.set()
    out = web.files["/lab/out"] = Gate()
    task_id = submit(
        endpoint, write, source(web, "/other", b"other"), File("s3://lab/out", "w"), str(tmp_path / "runs")
    )
    wait_until(lambda: out.waiting, "the output is on its way")
    endpoint.cloud.cancel(task_id)
    assert endpoint.cloud.end(task_id).state is TaskState.CANCELLED
    out.opened.set()
    wait_until(lambda: staged(endpoint) == [], "the directories of the tasks are removed")


def test_a_file_comes_although_the_agent_was_killed_meanwhile(
    endpoint: EndpointProcess, web: WebServer, tmp_path: Path
) -> None:
    gate = web.files["/data"] = Gate()
    task_id = submit(endpoint, read, source(web, "/data", b"data"))
    wait_until(lambda: gate.waiting, "the transfer begins")
    stray = endpoint.directory.path / "tasks_working_dir" / "staged" / "stray"
    stray.mkdir()
    endpoint.kill_agent()  # and waits until its transfer process is gone
    gate.opened.set()
    endpoint.start()
    assert endpoint.cloud.end(task_id).value == b"data"
    wait_until(lambda: staged(endpoint) == [], "what the former agent has left is removed")


SECOND_LOGIN_NODE = """
import runpy, socket, sys
socket.gethostname = lambda: "login2"
sys.argv = ["agent", "test", "--home", sys.argv[1]]
runpy.run_module("farcall_endpoint.agent", run_name="__main__")
"""


def test_an_agent_of_another_login_node_does_not_touch_files_that_move(
    endpoint: EndpointProcess, web: WebServer
) -> None:
    gate = web.files["/data"] = Gate()
    task_id = submit(endpoint, read, source(web, "/data", b"data"))
    wait_until(lambda: gate.waiting, "the transfer begins")
    draft = next(endpoint.directory.path.glob("files/*/drafts/*"))
    command = [sys.executable, "-c", SECOND_LOGIN_NODE, str(endpoint.home)]
    other = subprocess.run(command, env=endpoint.environment, timeout=WAIT_S, check=False)
    assert other.returncode != 0
    assert endpoint.agent is not None
    assert f"is run by process {endpoint.agent.pid} on" in endpoint.log()
    assert draft.exists()
    assert len(staged(endpoint)) == 1
    gate.opened.set()
    assert endpoint.cloud.end(task_id).value == b"data"
    assert gate.waiting == 1


def test_a_task_that_ran_while_the_agent_was_killed_has_its_files_again(
    endpoint: EndpointProcess, web: WebServer, tmp_path: Path
) -> None:
    def wait(source: File, started: str, go: str) -> bytes:
        import pathlib
        import time

        pathlib.Path(started).touch()
        while not pathlib.Path(go).exists():
            time.sleep(0.01)
        with source.open("rb") as file:
            content: bytes = file.read()
        return content

    task_id = submit(
        endpoint, wait, source(web, "/data", b"data"), str(tmp_path / "started"), str(tmp_path / "go"), max_attempts=3
    )
    wait_until(lambda: (tmp_path / "started").exists(), "the task runs")
    endpoint.kill_agent()
    (tmp_path / "go").touch()
    endpoint.start()
    assert endpoint.cloud.end(task_id).value == b"data"
    assert web.requests["GET", "/data"] == 1


def test_an_output_is_stored_although_the_agent_was_killed_meanwhile(
    endpoint: EndpointProcess, web: WebServer, tmp_path: Path
) -> None:
    gate = web.files["/lab/out"] = Gate()
    runs = tmp_path / "runs"
    task_id = submit(endpoint, write, source(web, "/data", b"data"), File("s3://lab/out", "w"), str(runs))
    wait_until(lambda: gate.waiting, "the output is on its way")
    endpoint.kill_agent()
    gate.opened.set()
    endpoint.start()
    end = endpoint.cloud.end(task_id)
    assert (end.state, end.value, web.stored["/lab/out"]) == (TaskState.SUCCESS, 4, b"DATA")
    assert runs.read_text() == "run\n"
    assert [row["mode"] for row in end.spec.details["files"]] == ["r", "w"]


def test_files_come_and_go_although_the_transfer_process_was_killed(
    endpoint: EndpointProcess, web: WebServer, tmp_path: Path
) -> None:
    gates = {"/data": Gate(), "/lab/out": Gate()}
    web.files.update(gates)
    task_id = submit(endpoint, write, source(web, "/data", b"data"), File("s3://lab/out", "w"), str(tmp_path / "runs"))
    for gate in gates.values():
        wait_until(lambda gate=gate: gate.waiting, "the transfer begins")  # type: ignore[misc]
        former = transfer_process(endpoint)
        former.kill()
        gate.opened.set()
    assert endpoint.cloud.end(task_id).state is TaskState.SUCCESS
    assert web.stored["/lab/out"] == b"DATA"
    assert (tmp_path / "runs").read_text() == "run\n"


def test_a_transfer_without_progress_ends_at_its_limit(tmp_path: Path, web: WebServer) -> None:
    gate = web.files["/data"] = Gate()
    with running_endpoint(tmp_path, start=False) as endpoint:
        config = yaml.safe_load(endpoint.directory.config_file.read_text())
        config["files"] = {"transfer_limit": 1}
        endpoint.directory.config_file.write_text(yaml.safe_dump(config))
        endpoint.start()
        end = endpoint.cloud.end(submit(endpoint, read, source(web, "/data", b"data")))
        assert end.error["code"] == "FILE_TIMEOUT"
    gate.opened.set()


def test_an_endpoint_without_files_refuses_tasks_with_files_in_storage(tmp_path: Path, web: WebServer) -> None:
    with running_endpoint(tmp_path, start=False) as endpoint:
        config = yaml.safe_load(endpoint.directory.config_file.read_text())
        config["files"] = {"enabled": False}
        endpoint.directory.config_file.write_text(yaml.safe_dump(config))
        endpoint.start()
        end = endpoint.cloud.end(submit(endpoint, read, source(web, "/data", b"data")))
        assert end.error["code"] == "FILE_UNSUPPORTED"
        local = tmp_path / "local"
        local.write_bytes(b"local")
        assert endpoint.cloud.end(submit(endpoint, read, File(f"file://{local}"))).value == b"local"
