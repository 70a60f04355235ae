"""Commands that call the API, against a cloud in memory."""

from __future__ import annotations

import csv
import datetime as dt
import json
import re
import uuid
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from farcall import Client
from farcall.cli._app import app
from farcall.cli._arguments import completes, remember
from farcall.cli._connect import CommandEnvironment
from farcall.cli._output import write
from farcall.testing import FakeCloud
from farcall_common.wire import is_uuid, new_task_id
from tests.unit.sdk_cli_runner import Farcall
from tests.unit.test_ssh_signatures import KEY, write_key

SCRIPT = '''
def half(n):
    """Halves.

    Exactly."""
    return n / 2

def add(a, b=0):
    return a + b

def refuse(n):
    raise ValueError(f"not {n}")
'''


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("FARCALL_HOME", str(home))
    for name in ("FARCALL_API_URL", "FARCALL_TOKEN", "FARCALL_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    return home


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "calls.py"
    path.write_text(SCRIPT)
    return str(path)


# -- map ---------------------------------------------------------------------------------------------------------------


def test_map_writes_results_in_the_order_of_the_inputs(cloud: FakeCloud, script: str) -> None:
    result = Farcall(cloud)("map", f"{script}:half", *map(str, range(20)))
    assert result.exit_code == 0
    assert [json.loads(line) for line in result.stdout.splitlines()] == [n / 2 for n in range(20)]


def test_map_reads_a_file_or_standard_input(cloud: FakeCloud, script: str, tmp_path: Path) -> None:
    (tmp_path / "inputs.jsonl").write_text("[1, 2]\n\n[3, 4]\n")
    farcall = Farcall(cloud)
    assert farcall("map", f"{script}:add", str(tmp_path / "inputs.jsonl"), "--unpack").stdout == "3\n7\n"
    assert farcall("map", f"{script}:add", "-", "--unpack", input='{"a": 1, "b": 1}\n{"a": 5}\n').stdout == "2\n5\n"
    assert farcall("map", "builtins:len", str(tmp_path / "inputs.jsonl")).stdout == "2\n2\n"
    assert farcall("map", f"{script}:half", "-", input="").stdout == ""


def test_map_continues_after_a_failed_call(cloud: FakeCloud, script: str) -> None:
    farcall = Farcall(cloud)
    result = farcall("map", "math:sqrt", "4", "-1", "9")
    assert result.exit_code == 1
    assert result.stdout == "2.0\nnull\n3.0\n"
    assert result.stderr.startswith("Error: [TASK_FAILED] input 2: ")
    assert result.stderr.count("\n") == 1


RETRIED = """
import pathlib

class Away(Exception):
    pass

def fail(path):
    log = pathlib.Path(path)
    runs = len(log.read_text()) + 1 if log.exists() else 1
    log.write_text("x" * runs)
    if runs < 3:
        raise Away
    return runs
"""


def test_functions_that_raise_are_retried(cloud: FakeCloud, tmp_path: Path) -> None:
    script = tmp_path / "retried.py"
    script.write_text(RETRIED)
    retried = ("--retries", "2", "--retry-on", "OSError", "--retry-on", "__main__.Away")
    shown = Farcall(cloud)("run", f"{script}:fail", str(tmp_path / "a"), *retried)
    assert (shown.exit_code, shown.stdout.strip()) == (0, "3")
    mapped = Farcall(cloud)("map", f"{script}:fail", json.dumps(str(tmp_path / "b")), *retried)
    assert (mapped.exit_code, mapped.stdout.strip()) == (0, "3")
    failed = Farcall(cloud)("run", f"{script}:fail", str(tmp_path / "c"), "--retries", "2", "--retry-on", "OSError")
    assert failed.exit_code != 0
    assert (tmp_path / "c").read_text() == "x"


@pytest.mark.parametrize(
    "arguments",
    [
        ("-2", "-1.5e0", "--timeout", "20"),
        ("--timeout", "20", "--", "-2", "-1.5"),
        ("-e", "fake", "-2", "--kwargs", "{}", "-1.5"),
    ],
)
def test_negative_numbers_are_arguments(cloud: FakeCloud, script: str, arguments: tuple[str, ...]) -> None:
    result = Farcall(cloud)("run", f"{script}:add", *arguments)
    assert (result.stdout, result.stderr) == ("-3.5\n", "")
    assert "No such option: -x" in Farcall(cloud)("run", f"{script}:add", "-2", "-x").stderr


def test_map_writes_json(cloud: FakeCloud, script: str) -> None:
    result = Farcall(cloud)("map", f"{script}:refuse", "1", "2", "--json")
    assert result.exit_code == 1
    assert result.stderr == ""
    first, second = map(json.loads, result.stdout.splitlines())
    assert [first["index"], second["index"]] == [0, 1]
    assert first.keys() == second.keys() == {"index", "task_id", "error"}
    assert second["error"]["exception_type"] == "ValueError"


def test_map_refuses_lines_that_are_not_json_before_anything_is_sent(cloud: FakeCloud, script: str) -> None:
    farcall = Farcall(cloud)
    result = farcall("map", f"{script}:half", "-", input="1\ntwo\n")
    assert result.exit_code == 65
    assert "line 2 of standard input" in result.stderr
    assert farcall.lines("tasks", "ls") == []


def test_map_refuses_a_file_that_is_no_text(cloud: FakeCloud, tmp_path: Path) -> None:
    (tmp_path / "inputs.bin").write_bytes(b"\xff\xfe\x00")
    result = Farcall(cloud)("map", "math:sqrt", str(tmp_path / "inputs.bin"))
    assert result.exit_code == 65
    assert "inputs.bin cannot be read" in result.stderr


@pytest.mark.parametrize("name", ["inputs.jsonl", "data/inputs", "Inputs.CSV"])
def test_map_refuses_a_file_that_does_not_exist(cloud: FakeCloud, script: str, name: str) -> None:
    refused = Farcall(cloud)("map", f"{script}:half", name)
    assert (refused.exit_code, f"there is no file {name}" in refused.stderr) == (65, True)
    assert Farcall(cloud)("map", "builtins:len", f'"{name}"').stdout == f"{len(name)}\n"
    assert Farcall(cloud)("map", "builtins:len", name, name).stdout == f"{len(name)}\n" * 2


def test_a_failed_call_with_one_array_is_explained(cloud: FakeCloud, script: str) -> None:
    farcall = Farcall(cloud)
    assert "write them one by one" in farcall("map", f"{script}:half", "[1, 2]").stderr
    for arguments in (("[1, 2]", "--json"), ("[1, 2, 3]", "--unpack"), ("[1]", "[2]")):
        assert "one by one" not in farcall("map", f"{script}:half", *arguments).stderr


def test_a_misspelt_function_is_answered_with_those_alike(cloud: FakeCloud, script: str) -> None:
    assert "Did you mean 'refuse'?" in Farcall(cloud)("run", f"{script}:refues", "1").stderr


def test_results_without_a_json_form_are_written(cloud: FakeCloud, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(
        "def f(n):\n    return [{(1, 2): {3}}, 2**n, b'x', (float('inf'), complex(1, 2)), {4: None}]\n"
    )
    result = Farcall(cloud)("map", f"{tmp_path / 'odd.py'}:f", "3", "100")
    assert result.exit_code == 0
    first, second = result.stdout.splitlines()
    assert json.loads(first) == [{"(1, 2)": [3]}, 8, "eA==", [None, "(1+2j)"], {"4": None}]
    assert json.loads(second) == [{"(1, 2)": [3]}, 2**100, "eA==", [None, "(1+2j)"], {"4": None}]


def test_map_cancels_late_tasks(offline: FakeCloud, script: str) -> None:
    farcall = Farcall(offline)
    result = farcall("map", f"{script}:half", "1", "2", "3", "--timeout", "0.05")
    assert result.exit_code == 75
    assert "3 tasks did not end within 0.05 s and were cancelled. Endpoint fake was never online" in result.stderr
    assert {line[3] for line in farcall.lines("tasks", "ls")} == {"cancelled"}


# -- groups ------------------------------------------------------------------------------------------------------------


def test_the_tasks_of_a_group_are_cancelled(offline: FakeCloud, script: str) -> None:
    farcall = Farcall(offline)
    group_id = farcall("map", f"{script}:half", "4", "6", "--no-wait").stdout.strip()
    assert farcall("groups", "cancel", group_id).stdout == "2 cancelled\n"
    assert json.loads(farcall("groups", "cancel", group_id, "--json").stdout)["outcomes"] == {"finished": 2}
    assert [line[1] for line in farcall.lines("groups", "show", group_id)] == ["cancelled", "cancelled"]


def test_a_group_submitted_without_waiting(offline: FakeCloud, script: str) -> None:
    farcall = Farcall(offline)
    group_id = farcall("map", f"{script}:half", "4", "6", "--no-wait").stdout.strip()
    ((listed, _, count, states),) = farcall.lines("groups", "ls")
    assert (listed, count, states) == (group_id, "2", "2 received")
    late = farcall("groups", "wait", group_id, "--timeout", "0.05")
    assert late.exit_code == 75
    assert "2 tasks have not ended after 0.05 s. Endpoint fake was never online" in late.stderr
    assert [line[1] for line in farcall.lines("groups", "show", group_id)] == ["received", "received"]
    offline.run_waiting()
    assert farcall("groups", "wait", group_id).stdout == "2 success\n"
    assert farcall("groups", "wait", group_id, "--results").stdout == "2.0\n3.0\n"
    shown = json.loads(farcall("groups", "show", group_id, "--json").stdout)
    assert [task["status"] for task in shown["tasks"]] == ["success", "success"]


def test_a_group_with_a_failure(cloud: FakeCloud, script: str) -> None:
    farcall = Farcall(cloud)
    told = json.loads(farcall("map", f"{script}:refuse", "1", "--no-wait", "--json").stdout)
    waited = farcall("groups", "wait", told["task_group_id"], "--json")
    assert waited.exit_code == 1
    assert json.loads(waited.stdout)["states"] == {"failed": 1}
    ((task_id, state, attempt, message),) = farcall.lines("groups", "show", told["task_group_id"])
    assert (task_id, state, attempt) == (told["task_ids"][0], "failed", "1")
    assert "not 1" in message
    (line,) = farcall("groups", "wait", told["task_group_id"], "--results", "--json").stdout.splitlines()
    assert json.loads(line)["error"]["code"] == "TASK_FAILED"


def test_a_group_that_does_not_exist(cloud: FakeCloud) -> None:
    assert Farcall(cloud)("groups", "show", str(uuid.uuid4())).exit_code == 66
    assert Farcall(cloud)("groups", "ls").stdout == ""


# -- tasks -------------------------------------------------------------------------------------------------------------


def test_logs_of_a_task(cloud: FakeCloud, script: str) -> None:
    farcall = Farcall(cloud)
    farcall("run", f"{script}:refuse", "3")
    ((task_id, *_),) = farcall.lines("tasks", "ls")
    result = farcall("tasks", "logs", task_id)
    assert result.exit_code == 0
    assert result.stdout == ""  # the endpoint in memory keeps no output
    assert "it is failed" in result.stderr
    shown = json.loads(farcall("tasks", "logs", task_id, "--json").stdout)
    assert shown == {"task_id": task_id, "status": "failed", "stdout_tail": "", "stderr_tail": "", "reason": None}


def test_cells_never_break_the_lines_of_a_pipe(cloud: FakeCloud, tmp_path: Path) -> None:
    (tmp_path / "lines.py").write_text('def f():\n    raise ValueError("one\\ttwo\\nthree")\n')
    farcall = Farcall(cloud)
    farcall("run", f"{tmp_path / 'lines.py'}:f")
    (cells,) = farcall.lines("tasks", "ls")
    assert len(cells) == 8
    assert cells[-1].endswith("one two")


def test_a_task_that_ended_runs_again(offline: FakeCloud, script: str) -> None:
    farcall = Farcall(offline)
    group_id = farcall("map", f"{script}:half", "3", "5", "--no-wait").stdout.strip()
    first, second = (line[0] for line in farcall.lines("groups", "show", group_id))
    early = farcall("tasks", "retry", second)
    assert early.exit_code == 73
    assert "is received" in early.stderr
    offline.run_waiting()
    ((old, new),) = farcall.lines("tasks", "retry", second)
    assert (old, new != old) == (second, True)
    offline.run_waiting()
    shown = json.loads(farcall("tasks", "show", new, "--json").stdout)
    assert (shown["result"], shown["retry_of"]) == (2.5, second)
    again = json.loads(farcall("tasks", "retry", new, first, "--json").stdout)  # what was retried can be retried
    assert again.keys() == {new, first}


def test_a_dead_letter_is_listed_until_it_is_discarded(offline: FakeCloud, script: str) -> None:
    farcall = Farcall(offline)
    task_id = farcall("run", f"{script}:half", "3", "--no-wait").stdout.strip()
    offline.dead_letter(task_id)
    shown = farcall("tasks", "show", task_id)
    assert f"farcall tasks retry {task_id}" in shown.stdout
    assert "1. killed by SIGKILL" in shown.stdout
    assert [cells[0] for cells in farcall.lines("tasks", "ls", "--state", "dead-lettered")] == [task_id]
    assert farcall.lines("tasks", "discard", task_id, task_id) == [[task_id]]
    assert farcall.lines("tasks", "ls", "--state", "dead-lettered") == []
    assert farcall("tasks", "retry", task_id).exit_code == 73
    assert farcall("tasks", "discard", new_task_id()).exit_code == 66


def test_all_tasks_and_audit_entries_are_exported(offline: FakeCloud, script: str) -> None:
    farcall = Farcall(offline)
    farcall("map", f"{script}:half", *map(str, range(9)), "--no-wait")
    offline.run_waiting()
    lines = [json.loads(line) for line in farcall("tasks", "export").stdout.splitlines()]
    assert {line["status"] for line in lines} == {"success"}
    heading, *rows = csv.reader(farcall("tasks", "export", "--csv", "--since", "1h").stdout.splitlines())
    assert [row[heading.index("task_id")] for row in rows] == [line["task_id"] for line in lines]
    assert farcall("tasks", "export", "--until", "2020-01-01").stdout == ""
    assert farcall("tasks", "export", "--since", "yesterday").exit_code == 65

    done = [json.loads(line) for line in farcall("audit", "export", "--since", "1d").stdout.splitlines()]
    assert {line["action"] for line in done} == {"tasks.submit"}
    heading, first, *_ = csv.reader(farcall("audit", "export", "--csv").stdout.splitlines())
    assert json.loads(first[heading.index("detail")])["tasks"] == 1


def test_usage_is_shown_and_exported(offline: FakeCloud, script: str) -> None:
    farcall = Farcall(offline)
    farcall("map", f"{script}:half", *map(str, range(3)), "--no-wait")
    offline.run_waiting()
    today = str(dt.datetime.now(dt.UTC).date())
    [[day, tasks, failed, *_]] = farcall.lines("usage")
    assert (day, tasks, failed) == (today, "3", "0")
    [line] = farcall("usage", "--by", "endpoint,account", "--from", "1d", "--json").stdout.splitlines()
    assert json.loads(line)["endpoint_id"] == offline.endpoint_id
    heading, row = csv.reader(farcall("usage", "--by", "account,identity", "--csv").stdout.splitlines())
    assert heading == ["identity_id", "account", "tasks", "failed", "wall_s", "core_s", "gpu_s", "stages"]
    assert row[2:4] == ["3", "0"]
    assert farcall("usage", "--until", "2020-01-01").stdout == ""
    assert farcall("usage", "--from", "yesterday").exit_code == 65


def test_a_spreadsheet_calculates_nothing_of_an_exported_table(capsys: pytest.CaptureFixture[str]) -> None:
    write([{"account": "=1+1", "tasks": -3}, {"account": "phys-7", "tasks": 1}], ["account", "tasks"], as_json=False)
    assert capsys.readouterr().out == "account,tasks\n'=1+1,-3\nphys-7,1\n"


# -- functions and endpoints -------------------------------------------------------------------------------------------


def test_functions(cloud: FakeCloud, script: str) -> None:
    farcall = Farcall(cloud)
    function_id = farcall("functions", "register", f"{script}:half", "--memoize").stdout.strip()
    other = json.loads(farcall("functions", "register", f"{script}:add", "--name", "plus", "--json").stdout)
    assert [line[:2] for line in farcall.lines("functions", "ls")] == [
        [other["function_uuid"], "plus"],
        [function_id, "half"],
    ]
    ((found, _, version, _, description),) = farcall.lines("functions", "search", "HALVES")
    assert (found, version, description) == (function_id, "1", "Halves.")
    assert json.loads(farcall("functions", "show", function_id, "--json").stdout)["metadata"]["memoize"] is True
    assert farcall("functions", "rm", function_id, other["function_uuid"]).exit_code == 0
    assert farcall.lines("functions", "ls") == []
    assert farcall("functions", "delete", function_id).exit_code == 66  # the name of old


def test_versions_and_aliases(cloud: FakeCloud, script: str) -> None:
    farcall = Farcall(cloud)
    function_id = farcall("functions", "register", f"{script}:half").stdout.strip()
    assert farcall("functions", "update", function_id, f"{script}:add", "--description", "Adds.").stdout == "2\n"
    assert farcall("functions", "update", function_id, "--public").stdout == "2\n"
    assert [line[0] for line in farcall.lines("functions", "versions", function_id)] == ["2", "1"]
    assert farcall("functions", "alias", "old", f"{function_id}@1").exit_code == 0
    assert farcall("functions", "alias", "now", function_id).exit_code == 0
    assert farcall.lines("functions", "aliases") == [["now", function_id, "newest"], ["old", function_id, "1"]]
    assert ["version", "1"] in farcall.lines("functions", "show", "old")
    assert json.loads(farcall("functions", "show", "now", "--json").stdout)["version"] == 2
    assert farcall("functions", "alias", "old", "--delete").exit_code == 0
    assert farcall("functions", "show", "old").exit_code == 66
    assert farcall("functions", "alias", "old").exit_code == 65


def test_signed_functions(cloud: FakeCloud, script: str, tmp_path: Path) -> None:
    farcall, key = Farcall(cloud), str(write_key(tmp_path, KEY))
    function_id = farcall("functions", "register", f"{script}:half", "--sign-with", key).stdout.strip()

    def signature() -> str:
        shown = json.loads(farcall("functions", "show", function_id, "--json").stdout)
        return str(shown["metadata"].get("ssh_signature", ""))

    first = signature()
    assert first.startswith("-----BEGIN SSH SIGNATURE-----")
    assert farcall("functions", "update", function_id, f"{script}:add").stdout == "2\n"
    assert not signature()
    assert farcall("functions", "sign", function_id, "--key", key).stdout == "3\n"
    second = signature()
    assert second not in ("", first)
    assert farcall("functions", "update", function_id, f"{script}:half", "--sign-with", key).stdout == "4\n"
    assert signature() == first, "half again, under its name"
    failed = farcall("functions", "sign", function_id, "--key", str(tmp_path / "none"))
    assert failed.exit_code != 0
    assert "cannot be read" in failed.stderr


def test_containers(cloud: FakeCloud) -> None:
    farcall = Farcall(cloud)
    given = ("/images/xtal.sif", "--type", "singularity", "--name", "xtal")
    container_id = farcall("containers", "register", *given).stdout.strip()
    assert json.loads(farcall("containers", "register", *given, "--json").stdout) == {"container_id": container_id}
    ((listed, *shown, _),) = farcall.lines("containers", "ls")
    assert (listed, shown) == (container_id, ["xtal", "singularity", "/images/xtal.sif"])
    assert ["container uuid", container_id] in farcall.lines("containers", "show", "xtal")
    packages = ("--requirement", "polars==1.*", "--requirement", "numpy", "--preload", "polars", "--name", "frames")
    frames = farcall("containers", "register", *packages).stdout.strip()
    assert farcall.lines("containers", "ls")[0][:4] == [frames, "frames", "uv", "polars==1.* numpy"]
    shown = json.loads(farcall("containers", "show", "frames", "--json").stdout)
    assert (shown["requirements"], shown["preload"]) == (["polars==1.*", "numpy"], ["polars"])
    refused = farcall("containers", "register", "/x", "--type", "aptainer")
    assert "Did you mean 'apptainer'?" in refused.output
    assert ["preload", "polars"] in farcall.lines("containers", "show", "frames")
    assert completes("containers")("xt") == ["xtal"]
    assert farcall("containers", "delete", "xtal").exit_code == 0
    assert farcall("containers", "show", "xtal").exit_code == 66


def test_endpoints_are_listed_with_their_state_and_owner(cloud: FakeCloud) -> None:
    farcall = Farcall(cloud)
    assert farcall.lines("endpoints", "ls") == [["fake", "online", cloud.endpoint_id, "me", ""]]
    cloud.is_owned = False
    ((*_, owner, _),) = farcall.lines("endpoints", "list")
    assert is_uuid(owner)
    (listed,) = json.loads(farcall("endpoints", "ls", "--json").stdout)
    assert (listed["status"], listed["uuid"]) == ("online", cloud.endpoint_id)


def test_the_status_of_an_endpoint_is_watched_until_an_interruption(cloud: FakeCloud) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    environment = CommandEnvironment(lambda *_: cloud.client(), pause=pause)
    arguments = ["endpoints", "status", "fake", "--watch", "--json"]
    result = CliRunner().invoke(app, arguments, obj=environment, prog_name="farcall")
    assert result.exit_code == 130
    assert [json.loads(line)["status"] for line in result.stdout.splitlines()] == ["online"] * 3


def test_tasks_are_listed_with_names_and_times(cloud: FakeCloud, script: str) -> None:
    farcall = Farcall(cloud)
    farcall("run", f"{script}:half", "3")
    ((task_id, function, endpoint, state, age, waited, ran, error),) = farcall.lines("tasks", "ls", "-e", "fake")
    assert (is_uuid(task_id), function, endpoint, state, error) == (True, "half", "fake", "success", "")
    assert all(each.endswith((" s", " ms")) for each in (age, waited, ran))
    shown = farcall("tasks", "show", task_id).stdout
    assert "task transitions" not in shown
    assert re.search(r"started\t2\d{3}-\d\d-\d\d ", shown)


def test_lists_take_few_requests_however_long_they_are(cloud: FakeCloud, script: str) -> None:
    farcall = Farcall(cloud)
    farcall("map", f"{script}:half", *map(str, range(20)))
    requests: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request.url.path)
        return cloud.transport.handle_request(request)

    client = Client("https://farcall.test", cloud.token, transport=httpx.MockTransport(answer))
    for arguments in (["tasks", "ls"], ["endpoints", "ls"], ["functions", "ls"], ["groups", "ls"]):
        CliRunner().invoke(app, arguments, obj=CommandEnvironment(lambda *_: client), prog_name="farcall")
    assert requests == ["/v3/tasks", "/v2/endpoints", "/v3/functions", "/v3/groups"]


def test_the_last_task_and_group_and_first_digits_of_ids(offline: FakeCloud, script: str) -> None:
    farcall = Farcall(offline)
    refused = farcall("tasks", "show", "@last")
    assert (refused.exit_code, "0 tasks were submitted" in refused.stderr) == (65, True)
    first = farcall("run", f"{script}:half", "1", "--no-wait").stdout.strip()
    group_id = farcall("map", f"{script}:half", "1", "2", "--no-wait").stdout.strip()
    last = json.loads(farcall("groups", "show", group_id, "--json").stdout)["tasks"][-1]["task_id"]
    farcall("tasks", "ls")  # what is listed was not submitted now
    for text, task_id in (("@last", last), ("@last~2", first), (first[:23], first), (last, last)):
        assert json.loads(farcall("tasks", "show", text, "--json").stdout)["task"] == task_id
        assert json.loads(farcall("tasks", "why", text, "--json").stdout)["task_id"] == task_id
        assert farcall("tasks", "events", text).exit_code == farcall("tasks", "logs", text).exit_code == 0
    assert farcall("tasks", "show", "@last~9").exit_code == 65
    several = farcall("tasks", "cancel", first[:4])
    assert (several.exit_code, first in several.stderr, last in several.stderr) == (65, True, True)
    assert json.loads(farcall("groups", "show", group_id[:8], "--json").stdout)["task_group_id"] == group_id
    assert farcall.lines("tasks", "cancel", first[:23]) == [[first, "cancelled"]]
    assert {line[1] for line in farcall.lines("tasks", "cancel", "--group", "@last")} == {"cancelled"}
    assert farcall("tasks", "cancel").exit_code == farcall("tasks", "cancel", first, "--group", "@last").exit_code == 65
    [again] = farcall.lines("tasks", "retry", "@last")
    assert again[0] == last


def test_removing_an_endpoint_needs_a_confirmation(cloud: FakeCloud) -> None:
    farcall = Farcall(cloud)
    refused = farcall("endpoints", "rm", "fake")
    assert refused.exit_code == 65
    assert "--yes" in refused.stderr
    assert (
        farcall("endpoints", "rm", "fake", "--yes", "--json").stdout == f'{{\n  "deleted": "{cloud.endpoint_id}"\n}}\n'
    )
    assert farcall.lines("endpoints", "ls") == []
    assert "farcall-endpoint configure" in farcall("run", "math:sqrt", "4").stderr


def test_owners_list_and_cancel_all_tasks_of_an_endpoint(offline: FakeCloud, script: str) -> None:
    farcall = Farcall(offline)
    first, second, third = (farcall("run", f"{script}:half", "4", "--no-wait").stdout.strip() for _ in range(3))

    listed = farcall.lines("endpoints", "tasks", "fake")
    assert [line[0] for line in listed] == [first, second, third]
    submitter, function_id = listed[0][1:3]
    assert farcall.lines("endpoints", "tasks", "fake", "--submitter", "unknown") == []
    assert farcall("endpoints", "cancel", "fake").exit_code == 65
    assert farcall("endpoints", "cancel", "fake", first, "--submitter", submitter).exit_code == 65
    assert farcall.lines("endpoints", "cancel", "fake", first) == [[first, "cancelled"]]

    refused = farcall("endpoints", "cancel", "fake", "--all")
    assert (refused.exit_code, "--yes" in refused.stderr) == (65, True)
    assert farcall.lines("endpoints", "cancel", "fake", "--all", "--yes") == [
        [second, "cancelled"],
        [third, "cancelled"],
    ]
    assert farcall("endpoints", "cancel", "fake", "--all").exit_code == 0, "there is nothing to confirm"
    assert farcall.lines("endpoints", "cancel", "fake", "--function", function_id) == []


def test_owners_see_and_revoke_keys_of_an_endpoint(offline: FakeCloud) -> None:
    farcall = Farcall(offline)
    assert farcall.lines("endpoints", "keys", "fake") == []
    offline._endpoint.keys |= {"k" * 40: 1.0, "l" * 40: 2.0}
    assert [line[0] for line in farcall.lines("endpoints", "keys", "fake")] == ["k" * 40, "l" * 40]

    assert farcall("endpoints", "revoke-key", "fake", "k" * 40).exit_code == 0
    assert [each["public_key"] for each in json.loads(farcall("endpoints", "keys", "fake", "--json").stdout)] == [
        "l" * 40
    ]
    assert farcall("endpoints", "revoke-key", "fake", "k" * 40).exit_code == 66


# -- what holds for all ------------------------------------------------------------------------------------------------


def test_seen_ids_and_names_are_completed(offline: FakeCloud, script: str) -> None:
    farcall = Farcall(offline)
    task_id = farcall("run", f"{script}:half", "4", "--no-wait").stdout.strip()
    assert completes("tasks")(task_id[:9]) == [task_id]
    assert completes("tasks")("x") == []
    assert completes("endpoints")("fa") == ["fake"]


def test_a_configured_endpoint_needs_no_option(cloud: FakeCloud, script: str) -> None:
    farcall = Farcall(cloud)
    assert farcall("config", "set", "endpoint", str(uuid.uuid4()), "--no-check").exit_code == 0
    assert "ENDPOINT_UNKNOWN" in farcall("run", f"{script}:half", "4").stderr
    assert farcall("run", f"{script}:half", "4", "-e", "fake").stdout == "2.0\n"


def test_internal_errors_are_one_line_without_debug(cloud: FakeCloud) -> None:
    def broken(_request: httpx.Request) -> httpx.Response:
        raise KeyError("something")

    class BrokenFarcall(Farcall):
        def _connect(self, api_url: str | None, token: str | None) -> Client:
            return Client("https://farcall.test", "token", transport=httpx.MockTransport(broken))

    farcall = BrokenFarcall(cloud)
    result = farcall("tasks", "ls")
    assert result.exit_code == 70
    assert result.stderr.startswith("Error: [INTERNAL] KeyError: 'something'")
    assert result.stderr.count("\n") == 1
    debugged = farcall("--debug", "tasks", "ls")
    assert debugged.exit_code == 70
    assert "Traceback" in debugged.stderr
    assert json.loads(farcall("tasks", "ls", "--json").stderr)["error"]["code"] == "INTERNAL"


def test_unreachable_address_is_reported() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused", request=request)

    def connect(api_url: str | None, token: str | None) -> Client:
        return Client("https://farcall.test", "token", retry_timeout_s=0, transport=httpx.MockTransport(refuse))

    result = CliRunner().invoke(app, ["tasks", "ls"], obj=CommandEnvironment(connect))
    assert result.exit_code == 69
    assert result.stderr.startswith("Error: [UNAVAILABLE]")
    assert result.stderr.count("\n") == 1


def test_json_behind_two_dashes_is_an_argument(cloud: FakeCloud) -> None:
    result = Farcall(cloud)("run", "nowhere.py:f", "--", "--json")
    assert result.stderr.startswith("Error: [INVALID_REQUEST]")


@pytest.mark.parametrize(
    ("name", "is_completed"),
    [
        *[(name, True) for name in ("zz", "my-lab", "lab.org", "ada@lab", "@last", "0199f0c2-1234", "a_b", "env:1")],
        *[(f"zz{text}", False) for text in ("\\$(touch x)", "$(x)", ";x", " x", "\nx", "`x`", "'x", '"x', "\x1b[31m")],
        *[
            (f"zz{text}", False)
            for text in ("é", "\u200b", "*", "~", "&x", "|x", ">x", "\\", "#", "{a,b}", "[a]", "!x")
        ],
        *[("-rf", False), ("--help", False)],
    ],
)
def test_completion_leaves_out_names_that_shells_evaluate(
    name: str, is_completed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path))
    remember("endpoints", [name])
    assert (name in completes("endpoints")("")) is is_completed
