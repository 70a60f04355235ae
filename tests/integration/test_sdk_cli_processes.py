"""The command line as a process: closed pipes, Ctrl-C, terminals."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from farcall.testing import FakeCloud
from farcall_common.errors import ForwarderWaking
from tests.integration.sdk_served_cloud import serving
from tests.waiting import WAIT_S, wait_until

PROGRAM = (sys.executable, "-W", "error", "-c", "from farcall.cli import main; main()")
SCRIPT = """
def same(value):
    return value
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def cloud() -> Iterator[FakeCloud]:
    with FakeCloud(workers=0) as cloud:
        yield cloud


@pytest.fixture
def environ(cloud: FakeCloud, tmp_path: Path) -> Iterator[dict[str, str]]:
    with serving(cloud) as address:
        named = {"FARCALL_API_URL": address, "FARCALL_TOKEN": cloud.token, "FARCALL_HOME": str(tmp_path / "home")}
        environ = os.environ | named | {"COLUMNS": "150", "TERM": "xterm"}
        environ.pop("PYTHONUNBUFFERED", None)  # with it, Python does not see that a large write was cut short
        yield environ


@pytest.fixture
def start(environ: dict[str, str], tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "script.py").write_text(SCRIPT)
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*PROGRAM, *arguments],
            env=environ,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def states(cloud: FakeCloud) -> list[str]:
    with cloud.client() as client:
        return [task["status"] for task in client.get_tasks(limit=1000)]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_an_interruption_leaves_a_task_running_and_prints_its_id(
    start: Start, cloud: FakeCloud, number: signal.Signals, code: int
) -> None:
    program = start("run", "script.py:same", "1")
    wait_until(lambda: states(cloud), "the task was never submitted")
    program.send_signal(number)
    output, errors = program.communicate(timeout=WAIT_S)
    assert (program.returncode, output) == (code, "")
    assert "Traceback" not in errors
    with cloud.client() as client:
        (task,) = client.get_tasks()
    assert task["status"] == "received"
    assert f"Still running: {task['task_id']}\n" in errors
    assert f"farcall groups wait {task['task_group_id']}" in errors


def test_a_second_ctrl_c_cancels_the_tasks(start: Start, cloud: FakeCloud) -> None:
    program = start("map", "script.py:same", "1", "2")
    wait_until(lambda: len(states(cloud)) == 2, "not all tasks were submitted")
    program.send_signal(signal.SIGINT)
    assert program.stderr is not None
    assert program.stderr.readline() == "\n"
    assert program.stderr.readline().startswith("Still running: ")
    assert program.stderr.readline().startswith("Press Ctrl-C again to cancel them now. Later: `farcall groups wait ")
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=WAIT_S)
    assert (program.returncode, errors) == (130, "2 tasks were cancelled.\n")
    assert states(cloud) == ["cancelled"] * 2


@pytest.mark.parametrize("arguments", [("run", "script.py:same", "1"), ("map", "script.py:same", "1")])
def test_a_wait_for_an_endpoint_that_is_off_is_explained(
    start: Start, cloud: FakeCloud, arguments: Sequence[str]
) -> None:
    program = start(*arguments)
    assert program.stderr is not None
    assert program.stderr.readline() == "Waiting: Endpoint fake was never online.\n"
    cloud.run_waiting()
    output, errors = program.communicate(timeout=WAIT_S)
    assert (program.returncode, output, errors) == (0, "1\n", "")


def test_a_wait_for_a_group_is_explained(start: Start, cloud: FakeCloud) -> None:
    group_id, _ = start("map", "script.py:same", "1", "--no-wait").communicate(timeout=WAIT_S)
    program = start("groups", "wait", group_id.strip())
    assert program.stderr is not None
    assert program.stderr.readline() == "Waiting: Endpoint fake was never online.\n"
    cloud.run_waiting()
    assert program.wait(WAIT_S) == 0


def test_ctrl_c_in_a_map_prints_all_ids_for_programs(start: Start, cloud: FakeCloud) -> None:
    program = start("map", "script.py:same", *map(str, range(30)), "--json")
    wait_until(lambda: len(states(cloud)) == 30, "not all tasks were submitted")
    program.send_signal(signal.SIGINT)
    output, errors = program.communicate(timeout=WAIT_S)
    assert (program.returncode, output) == (130, "")
    told = json.loads(errors)["error"]
    assert told["code"] == "INTERRUPTED"
    with cloud.client() as client:
        assert client.get_task_group(told["task_group_id"]) == told["task_ids"]
    assert states(cloud) == ["received"] * 30


def test_ctrl_c_ends_only_the_wait_for_a_group(start: Start, cloud: FakeCloud) -> None:
    group_id, _ = start("map", "script.py:same", "1", "--no-wait").communicate(timeout=WAIT_S)
    asked = threading.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v2/batch_status":
            asked.set()
        return cloud._answer(request)

    cloud.transport.handler = answer
    program = start("groups", "wait", group_id.strip())
    assert asked.wait(WAIT_S)
    program.send_signal(signal.SIGINT)
    output, errors = program.communicate(timeout=WAIT_S)
    assert (program.returncode, output, errors) == (130, "", "")
    assert states(cloud) == ["received"]


def test_a_closed_pipe_ends_a_list_without_output(start: Start, cloud: FakeCloud) -> None:
    start("map", "script.py:same", *map(str, range(900)), "--no-wait").communicate(timeout=WAIT_S)
    program = start("tasks", "ls", "--limit", "900", "--json")
    assert program.stdout is not None
    assert program.stdout.readline() == "[\n"
    program.stdout.close()
    assert program.stderr is not None
    assert program.stderr.read() == ""
    assert program.wait(WAIT_S) == 141


def test_help_to_a_closed_pipe_is_silent(environ: dict[str, str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = subprocess.run([*PROGRAM, "--help"], env=environ, stdout=writer, stderr=subprocess.PIPE, timeout=WAIT_S)
    os.close(writer)
    assert (program.returncode, program.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("module", "arguments", "code"),
    [
        ("farcall.cli", "whoami >&-", 0),
        ("farcall.cli", "whoami <&- >&- 2>&-", 0),
        ("farcall.cli", "whoami >/dev/full", 69),
        ("farcall.cli", "--help >/dev/full 2>&1", 69),
        ("farcall_endpoint.app.cli", "list >&-", 0),
        ("farcall_endpoint.app.cli", "version >/dev/full", 69),
    ],
)
def test_output_that_goes_nowhere_is_no_defect(environ: dict[str, str], module: str, arguments: str, code: int) -> None:
    command = f'exec "$0" -c "from {module} import main; main()" {arguments}'
    program = subprocess.run(
        ["sh", "-c", command, sys.executable], env=environ, capture_output=True, text=True, timeout=WAIT_S
    )
    shown = program.stdout + program.stderr
    assert program.returncode == code, shown
    assert shown.count("\n") == arguments.endswith("/dev/full"), shown
    assert ("No space left on device" in shown) is arguments.endswith("/dev/full")


def test_a_closed_pipe_ends_a_map_and_its_tasks_continue(start: Start, cloud: FakeCloud) -> None:
    text = json.dumps("x" * 20_000)
    program = start("map", "script.py:same", *[text] * 50)
    wait_until(lambda: len(states(cloud)) == 50, "not all tasks were submitted")
    assert program.stdout is not None
    program.stdout.close()
    with cloud._lock:
        tasks = list(cloud._tasks.values())
    cloud._run(tasks[0])
    assert program.stderr is not None
    assert program.stderr.read() == ""
    assert program.wait(WAIT_S) == 141
    assert states(cloud).count("received") == 49


def test_a_terminal_gets_a_bar_on_standard_error_and_a_pipe_only_results(start: Start, cloud: FakeCloud) -> None:
    screen = Screen()
    program = start("map", "script.py:same", "1", "2", stderr=screen.slave)
    wait_until(lambda: "0/2" in screen.text(), "there was no bar")
    cloud.run_waiting()
    output, _ = program.communicate(timeout=WAIT_S)
    assert (program.returncode, output) == (0, "1\n2\n")
    screen.close()


@pytest.mark.parametrize("at_terminal", [True, False])
def test_a_starting_forwarder_is_reported_on_standard_error(start: Start, cloud: FakeCloud, at_terminal: bool) -> None:
    asked = list[None]()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/v3/stream":
            return cloud._answer(request)
        asked.append(None)
        return httpx.Response(503, json=ForwarderWaking("it sleeps", retry_after_s=0.0).record.to_json())

    cloud.transport.handler = answer
    screen = Screen()
    program = start("run", "script.py:same", "7", stderr=screen.slave if at_terminal else subprocess.PIPE)
    wait_until(lambda: len(asked) > 2 and states(cloud), "it did not wait for the forwarder")
    cloud.run_waiting()
    output, errors = program.communicate(timeout=WAIT_S)
    assert (program.returncode, output) == (0, "7\n")
    told = screen.text() if at_terminal else errors
    assert told.count("is being woken, which takes about a minute") == 1
    if not at_terminal:
        assert len(told.splitlines()) == 1
    screen.close()


def test_a_terminal_gets_a_table(environ: dict[str, str], start: Start, cloud: FakeCloud) -> None:
    screen = Screen()
    # What it shows there while it waits, on a busy machine, is not of the table.
    program = subprocess.Popen(
        [*PROGRAM, "endpoints", "ls"], env=environ, stdout=screen.slave, stderr=subprocess.DEVNULL
    )
    assert program.wait(WAIT_S) == 0
    wait_until(lambda: cloud.endpoint_id[:8] in screen.text(), "there was no table")
    assert cloud.endpoint_id not in screen.text()
    head = re.sub(r"\x1b\[[0-9;]*m", "", screen.text()).splitlines()[0]
    assert head.split() == ["name", "state", "endpoint", "owner", "display", "name"]
    screen.close()


def test_a_terminal_shows_results_above_the_bar(environ: dict[str, str], cloud: FakeCloud) -> None:
    screen = Screen()
    arguments = ["map", "math:sqrt", "16", "25"]
    program = subprocess.Popen([*PROGRAM, *arguments], env=environ, stdout=screen.slave, stderr=screen.slave)
    wait_until(lambda: "0/2" in screen.text(), "there was no bar")
    with cloud._lock:
        first, second = cloud._tasks.values()
    cloud._run(first)
    wait_until(lambda: "4.0" in screen.text(), "the first result was not shown")
    assert program.poll() is None
    cloud._run(second)
    assert program.wait(WAIT_S) == 0
    wait_until(lambda: "5.0" in screen.text(), "the second result was not shown")
    assert [line for line in screen.lines() if line] == ["4.0", "5.0"], "the bar is gone, and shared no line"
    screen.close()


def test_a_status_line_erases_no_output_without_a_line_end(environ: dict[str, str]) -> None:
    screen = Screen()
    code = """
import time
from farcall._task_output import OutputPart
from farcall.cli import _connect, _run

with _connect.waiting("task 1"):
    time.sleep(1.2)
    for text in (".", ".", ".\\n", "last"):
        _run._show_output(OutputPart("1", "stdout", text), as_json=False)
        time.sleep(0.2)
_connect.end_line()
print("result")
"""
    program = subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=screen.slave, stderr=screen.slave)
    assert program.wait(WAIT_S) == 0
    wait_until(lambda: "result" in screen.text(), "the result was not shown")
    assert [line for line in screen.lines() if line] == ["...", "last", "result"]
    screen.close()


def test_the_token_prompt_has_no_echo(environ: dict[str, str], cloud: FakeCloud, tmp_path: Path) -> None:
    del environ["FARCALL_TOKEN"]
    screen = Screen()
    program = screen.sit_down(environ, "login")
    wait_until(lambda: "Token:" in screen.text(), "no prompt appeared")
    wait_until(lambda: not screen.shows_what_is_typed(), "the token would be shown")
    screen.type(f"{cloud.token}\n")
    assert program.wait(WAIT_S) == 0
    wait_until(lambda: "Logged in" in screen.text(), "nothing was said")
    assert cloud.token not in screen.text()
    assert f'"{cloud.token}"' in (tmp_path / "home" / "config.toml").read_text()
    screen.close()


@pytest.mark.parametrize(
    ("arguments", "question", "answer"),
    [
        (["login"], "Token:", "\x03"),
        (["endpoints", "rm", "fake"], "Delete endpoint fake", "\x03"),
        (["endpoints", "rm", "fake"], "Delete endpoint fake", "n\n"),
    ],
)
def test_a_confirmation_can_be_interrupted(
    environ: dict[str, str], cloud: FakeCloud, tmp_path: Path, arguments: list[str], question: str, answer: str
) -> None:
    screen = Screen()
    program = screen.sit_down(environ, *arguments)
    wait_until(lambda: question in screen.text(), "no prompt appeared")
    screen.type(answer)
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(5)
    if program.poll() is None:  # Python notices a Ctrl-C between the question and the reading with the next key
        screen.type(answer)
    assert program.wait(WAIT_S) == 130
    assert "Error" not in screen.text()
    assert "Abort" not in screen.text()
    assert not (tmp_path / "home" / "config.toml").exists()
    with cloud.client() as client:
        assert len(client.get_endpoints()) == 1
    screen.close()


class Screen:
    """An interactive terminal."""

    def __init__(self) -> None:
        self._master, self.slave = pty.openpty()
        self._seen = bytearray()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def text(self) -> str:
        return self._seen.decode(errors="replace")

    def lines(self) -> list[str]:
        """What a person sees now, of a bar and what is written above it."""
        lines, row, column = [""], 0, 0
        for code, text in re.findall(r"(\x1b\[[0-9;?]*[A-Za-z]|[\r\n])|([^\x1b\r\n]+)", self.text()):
            if text:
                lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
                column += len(text)
            elif code == "\r":
                column = 0
            elif code == "\n":
                row += 1
                lines += [""] * (row == len(lines))
            elif code == "\x1b[2K":
                lines[row] = ""
            elif code == "\x1b[1A":
                row -= 1
        return lines

    def sit_down(self, environ: dict[str, str], *arguments: str) -> subprocess.Popen[bytes]:
        """Start the command line in a session of its own, at this terminal."""
        # The first terminal that the leader of a session opens becomes that of the session.
        own_terminal = "import os; os.open(os.ttyname(0), os.O_RDWR); "
        return subprocess.Popen(
            [*PROGRAM[:-1], own_terminal + PROGRAM[-1], *arguments],
            env=environ,
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
        )

    def shows_what_is_typed(self) -> bool:
        return bool(termios.tcgetattr(self.slave)[3] & termios.ECHO)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def close(self) -> None:
        os.close(self.slave)
        self._thread.join(WAIT_S)
        os.close(self._master)

    def _look(self) -> None:
        while True:
            try:
                self._seen += os.read(self._master, 4096) or b""
            except OSError:  # all have left
                return
