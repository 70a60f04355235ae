"""Graphs, chains and callees of an executor, against a cloud in memory that runs them."""

from __future__ import annotations

import base64
import concurrent.futures
import functools
import json
import types
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

import farcall
from farcall import (
    Client,
    Executor,
    FunctionUnknown,
    Graph,
    InputFailed,
    MPIFunction,
    NotFound,
    PayloadTooLarge,
    SerializationError,
    ShellFunction,
    TaskFailed,
    TaskPending,
    chain,
)
from farcall._stages import stages_of
from farcall.testing import FakeCloud
from farcall_common.graphs import StageState, is_graph, unpack_graph
from farcall_common.task_options import MAX_CALLEES
from tests.unit.sdk_cli_runner import Farcall
from tests.waiting import WAIT_S


def read(path: str) -> str:
    return f"text of {path}"


def split(text: str, parts: int = 9) -> list[str]:
    return text.split()[:parts]


def count(word: str) -> int:
    return len(word)


def total(counts: list[int], *, extra: int = 0) -> int:
    return sum(counts) + extra


def refuse(value: object) -> None:
    raise ValueError(f"not {value}")


def ignore(value: object) -> str:
    return "ignored"


def _unsendable() -> Any:
    return (each for each in "ab")


class Submits(httpx.BaseTransport):
    """The transport of a cloud, which keeps the bodies of requests to register and submit."""

    def __init__(self, cloud: FakeCloud) -> None:
        self._inner = cloud.transport
        self.bodies: list[dict[str, Any]] = []
        self.registered: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/submit"):
            self.bodies.append(msgspec.json.decode(request.content))
        if request.url.path.endswith("/functions") and request.method == "POST":
            self.registered.append(json.loads(request.content)["function_name"])
        return self._inner.handle_request(request)

    @property
    def payloads(self) -> list[bytes]:
        return [text.encode() for body in self.bodies for payloads in body["tasks"].values() for text in payloads]


@pytest.fixture
def submits(cloud: FakeCloud) -> Submits:
    return Submits(cloud)


@pytest.fixture
def executor(cloud: FakeCloud, submits: Submits) -> Iterator[Executor]:
    with (
        Client("https://farcall.test", cloud.token, transport=submits) as client,
        Executor(cloud.endpoint_id, client) as executor,
    ):
        yield executor


def word_count(graph: Graph) -> tuple[Any, Any]:
    counts = graph.map(count, graph.call(split, graph.call(read, "corpus"), parts=2))
    return counts, graph.call(total, counts, extra=1)


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_a_graph_is_one_task(executor: Executor, submits: Submits, cloud: FakeCloud) -> None:
    graph = Graph()
    _, sum_ = word_count(graph)
    future = executor.submit(graph, sum_)
    assert future.result(WAIT_S) == 7
    [body] = submits.bodies
    [(function_id, [payload])] = body["tasks"].items()
    assert is_graph(payload.encode())
    assert submits.registered == ["read", "split", "count", "total"]
    assert len(body["callees"]) == 4
    assert function_id == body["callees"][3]
    assert executor.task_count_submitted == 1
    stages = future.stages
    assert [(each.name, each.state, each.calls) for each in stages] == [
        ("read", "done", 1),
        ("split", "done", 1),
        ("count", "done", 2),
        ("total", "done", 1),
    ]
    assert stages[sum_].name == "total"


@pytest.mark.parametrize("form", [list, tuple])
def test_several_stages_are_a_target(executor: Executor, form: type) -> None:
    graph = Graph()
    counts, sum_ = word_count(graph)
    assert executor.submit(graph, form([counts, sum_])).result(WAIT_S) == form([[4, 2], 7])
    named = executor.submit(graph, {"counts": counts, "more": [sum_, (counts,)]})
    assert named.result(WAIT_S) == {"counts": [4, 2], "more": [7, ([4, 2],)]}


def test_other_functions_are_not_registered(executor: Executor, submits: Submits) -> None:
    graph = Graph()
    text = graph.call(read, "a")
    refused = graph.call(refuse, text)
    last = graph.call(ignore, text)
    future = executor.submit(graph, last)
    assert future.result(WAIT_S) == "ignored"
    assert submits.registered == ["read", "ignore"]
    assert [each.number for each in future.stages] == [0, 1]
    assert future.stages[last].name == "ignore"
    with pytest.raises(IndexError, match=r"stage 1 \(refuse\) is not among the 2 stages"):
        future.stages[refused]
    with pytest.raises(ValueError, match=r"stage 0 \(read\) is a stage of another graph"):
        future.stages[Graph().call(read, "a")]


def test_a_graph_is_packed_and_its_functions_are_serialised_once(
    executor: Executor, submits: Submits, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = Graph()
    _, sum_ = word_count(graph)
    assert executor.submit(graph, sum_).result(WAIT_S) == 7
    monkeypatch.setattr("farcall._graphs.pack_arguments", None)
    monkeypatch.setattr("farcall._functions._pack_function", None)
    assert executor.submit(graph, sum_).result(WAIT_S) == 7
    assert submits.payloads[0] == submits.payloads[1]
    assert len(submits.registered) == 4


def test_options_of_stages_travel_in_the_graph(executor: Executor, submits: Submits) -> None:
    decorated = farcall.function(walltime_s=5)(read)
    graph = Graph()
    text = graph.options(retries=2).call(decorated, "a")
    last = graph.options(name="words", needs="any").call(split, text)
    executor.options(retries=1, memoize=True).submit(graph, last).result(WAIT_S)
    first, second = unpack_graph(submits.payloads[0], callees=2).stages
    assert first.options is not None
    assert (first.options.walltime_s, first.options.retries, first.options.memoize) == (5, 2, None)
    assert (second.options, second.name, second.needs) == (None, "words", 1)
    assert submits.bodies[0]["retries"] == 1


def test_a_graph_with_a_stage_that_may_not_run_twice_may_not_either(executor: Executor, submits: Submits) -> None:
    graph = Graph()
    text = graph.options(idempotent=False).call(read, "a")
    last = graph.call(total, [graph.call(len, text), graph.options(retries=2).call(len, text)])
    executor.options(walltime_s=60).submit(graph, last).result(WAIT_S)
    [body] = submits.bodies
    assert body["idempotent"] is False
    options = [each.options for each in unpack_graph(submits.payloads[0], callees=3).stages]
    assert [each and each.idempotent for each in options] == [False, True, True, True]
    assert [each and each.walltime_s for each in options] == [60, None, 60, None], "as without that stage"
    executor.submit(graph, graph.call(read, "b")).result(WAIT_S)
    assert submits.bodies[1]["idempotent"] is True


def test_functions_that_are_equal_travel_once(executor: Executor, submits: Submits) -> None:
    graph = Graph()
    stages = [graph.call(functools.partial(split, parts=1), "a b") for _ in range(3)]
    assert executor.submit(graph, stages).result(WAIT_S) == [["a"]] * 3
    [body] = submits.bodies
    assert len(body["callees"]) == 1


def test_shell_functions_are_stages(executor: Executor) -> None:
    graph = Graph()
    shown = graph.call(ShellFunction("echo {word}"), word="hello")
    assert executor.submit(graph, graph.call(ignore, shown)).result(WAIT_S) == "ignored"


def test_futures_are_inputs_of_stages(executor: Executor) -> None:
    later: concurrent.futures.Future[str] = concurrent.futures.Future()
    graph = Graph()
    last = graph.call(count, graph.call(read, later))
    future = executor.submit(graph, last)
    assert future.why().reason == "WAITING_FOR_INPUTS"
    later.set_result("ab")
    assert future.result(WAIT_S) == len("text of ab")
    failed: concurrent.futures.Future[str] = concurrent.futures.Future()
    failed.set_exception(ValueError("early"))
    with pytest.raises(InputFailed):
        executor.submit(chain(read, count), failed).result(WAIT_S)
    graph = Graph()
    last = graph.call(count, graph.call(read, concurrent.futures.Future()), 2)
    with pytest.raises(TypeError, match=r"stage 1 \(count\): .*; it is called as count\(word: "):
        executor.submit(graph, last)  # now, and not when the future is done


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_submitted_names_its_stage(executor: Executor, submits: Submits) -> None:
    graph = Graph()
    text = graph.call(read, "a")
    cases: list[tuple[Any, type[Exception], str]] = [
        (graph.call(split, text, lines=2), TypeError, r"stage 1 \(split\): .*'lines'.*split\(text: "),
        (graph.call(count), TypeError, r"stage 2 \(count\): .*missing 1 required positional argument: 'word'"),
        (graph.call(total, _unsendable()), SerializationError, r"stage 3 \(total\): .*cannot be serialised"),
        (graph.call(count, "x" * 11_000_000), PayloadTooLarge, r"the arguments of stage 4 \(count\) take 10.5 MiB"),
        (graph.call(MPIFunction("x"), text), TypeError, r"stage 5 \(.*\): an MPIFunction is a task of its own"),
        (
            graph.call(functools.partial(count, _unsendable())),
            SerializationError,
            r"stage 6 \(count\): argument 1 \(generator\) of partial: The function",
        ),
        (Graph().call(read, "a"), ValueError, "a stage of another graph"),
        ("text", TypeError, "got str"),
    ]
    for target, error, message in cases:
        with pytest.raises(error, match=message):
            executor.submit(graph, target)
    with pytest.raises(TypeError, match=r"expected one target"):
        executor.submit(graph)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="'container' is not an option of stages"):
        graph.call(farcall.function(container="c")(read), "a")
    with pytest.raises(SerializationError, match=r"stage 0 \(read\) has no value before the graph runs"):
        executor.submit(ignore, text)
    assert submits.bodies == []


def test_a_stage_that_is_submitted_without_its_graph_is_refused_with_a_hint(executor: Executor) -> None:
    graph = Graph()
    for target in (graph.call(read, "a"), graph.map(read, "ab")):
        with pytest.raises(SerializationError, match="cannot be called") as caught:
            executor.submit(target)  # type: ignore[call-overload]
        assert "executor.submit(graph, stage)" in caught.value.hint


def test_a_stage_inside_an_object_is_explained_once(executor: Executor) -> None:
    graph = Graph()
    hidden = types.SimpleNamespace(text=graph.call(read, "a"))
    with pytest.raises(SerializationError, match=r"stage 1 \(count\): Positional argument 1") as caught:
        executor.submit(graph, graph.call(count, hidden))
    assert caught.value.record.message.count("has no value before the graph runs") == 1


def test_needs_counts_elements_of_a_map_in_the_fake_cloud(executor: Executor) -> None:
    graph = Graph()
    counts = graph.map(count, graph.call(split, graph.call(read, "a")))
    enough = graph.options(needs=2).call(total, counts)
    assert executor.submit(graph, enough).result(WAIT_S) == 7
    with pytest.raises(TaskFailed, match=r"TOO_FEW_INPUTS.*stage 3 \(total\): The stage needs 4 inputs, and has 3"):
        executor.submit(graph, graph.options(needs=4).call(total, counts)).result(WAIT_S)


def test_a_graph_with_too_many_functions_is_refused(executor: Executor) -> None:
    graph = Graph()
    stages = [graph.call(functools.partial(read, str(number))) for number in range(MAX_CALLEES + 1)]
    with pytest.raises(ValueError, match="1,001 different functions; a task calls at most 1,000"):
        executor.submit(graph, stages)


def test_a_function_that_cannot_be_registered_fails_the_graph(cloud: FakeCloud) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/functions") and b'"function_name":"split"' in request.content:
            return httpx.Response(413, json={"code": "PAYLOAD_TOO_LARGE", "message": "no room"})
        return cloud.transport.handle_request(request)

    with (
        Client("https://farcall.test", cloud.token, transport=httpx.MockTransport(answer)) as client,
        Executor(cloud.endpoint_id, client) as executor,
    ):
        with pytest.raises(PayloadTooLarge, match="no room"):
            executor.submit(chain(read, split), "a").result(WAIT_S)
        assert executor.submit(chain(read, count), "a").result(WAIT_S) == 9


# -- failures and stages -----------------------------------------------------------------------------------------------


def test_a_failed_graph_says_which_stage(executor: Executor, client: Client) -> None:
    graph = Graph()
    text = graph.call(read, "a")
    bad = graph.map(refuse, graph.call(split, text))
    last = graph.call(total, [bad, 1])
    future = executor.submit(graph, last)
    with pytest.raises(TaskFailed, match=r"stage 2 \(refuse\), element 0: ValueError: not text") as caught:
        future.result(WAIT_S)
    assert isinstance(caught.value, ValueError)
    assert any("in refuse" in note for note in caught.value.__notes__)
    stages = future.stages
    assert [each.state for each in stages] == ["done", "done", "failed", "cancelled"]
    assert stages[text].result() == "text of a"
    with pytest.raises(TaskFailed, match="ValueError: not text"):
        stages[bad].result()
    with pytest.raises(NotFound, match="has no value: it was cancelled"):
        stages[last].result()
    info = client.get_batch_result([future.task_id])[future.task_id]
    assert [each.state for each in info.stages] == [each.state for each in stages]
    assert info.stages[1].result() == ["text", "of", "a"]
    [used] = client.iter_usage(["endpoint"])
    assert (used["tasks"], used["stages"]) == (1, 3)


def test_a_value_of_a_stage_is_read_as_a_result_is(executor: Executor, cloud: FakeCloud) -> None:
    """Not by code, from an endpoint of another user."""
    cloud.is_owned = False
    graph = Graph()
    pair = graph.call(_object, 1)
    array = graph.call(_numbers, 3)
    future = executor.submit(graph, graph.call(refuse, [pair, array]))
    with pytest.raises(TaskFailed):
        future.result(WAIT_S)
    with pytest.raises(farcall.ResultRefused, match=r"the value of stage 0 \(_object\) of task .* comes from"):
        future.stages[pair].result()
    with cloud.client() as trusting, Executor(cloud.endpoint_id, trusting) as own:
        cloud.is_owned = True
        future = own.submit(graph, graph.call(refuse, [pair, array]))
        with pytest.raises(TaskFailed):
            future.result(WAIT_S)
        assert future.stages[pair].result() == {1}
        assert future.stages[array].result().tolist() == [0, 1, 2]


def _numbers(count: int) -> Any:
    import numpy

    return numpy.arange(count)


def _object(value: object) -> object:
    return {value}


def test_stages_of_a_running_task_come_from_the_api(offline: FakeCloud) -> None:
    graph = Graph()
    counts, last = word_count(graph)
    with offline.client() as client, Executor(offline.endpoint_id, client) as executor:
        future = executor.submit(graph, last)
        executor._engine.flush(WAIT_S)
        assert (len(future.stages), str(future.stages)) == (0, "(no stages)")
        states = [
            StageState(0, "read", "done", ended=1, run_s=0.5, workers=(7,), started_at=1.0),
            StageState(2, "count", "running", calls=9, ended=4, failed=1, retries=2),
        ]
        offline.report_stages(future.task_id, states)
        stages = future.stages
        assert [line.split() for line in str(stages).splitlines()] == [
            ["stage", "name", "state", "calls", "seconds", "workers", "error"],
            ["0", "read", "done", "1", "0.500", "7"],
            ["2", "count", "running", "4", "of", "9,", "1", "failed,", "2", "retries", "0.000"],
        ]
        assert repr(stages) == str(stages)
        assert "<td" in stages._repr_html_()
        assert "4 of 9, 1 failed, 2 retries" in stages._repr_html_()
        assert stages[counts].retries == 2
        assert len(stages[:1]) == 1
        with pytest.raises(TaskPending, match=r"stage 2 \(count\) is running"):
            stages[1].result()
        with pytest.raises(NotFound, match=r"the value of stage 0 \(read\) was not kept"):
            stages[0].result()
        future.cancel()
        assert [each.state for each in future.stages] == ["done", "running"]


def test_a_task_that_is_no_graph_has_no_stages(executor: Executor) -> None:
    future = executor.submit(count, "a")
    assert future.result(WAIT_S) == 1
    assert list(future.stages) == []


@pytest.mark.parametrize(
    "details",
    [
        {},
        {"stages": 3},
        {"stages": [{"number": "x"}]},
        {"stages": [{"number": 1, "name": "a", "state": "done", "error": {"code": 3}}]},
        {"stages": None, "values": 4},
    ],
)
def test_stages_that_cannot_be_read_are_none(details: dict[str, Any]) -> None:
    assert len(stages_of(details, lambda data, what: data)) == 0


def test_text_of_an_endpoint_controls_no_terminal() -> None:
    error = {"code": "TASK_FAILED", "message": "\x1b[2J\nnext line"}
    details = {"stages": [{"number": 0, "name": "a\x1b[31m\tb", "state": "failed", "error": error}]}
    shown = str(stages_of(details, lambda data, what: data))
    assert "\x1b" not in shown
    assert len(shown.splitlines()) == 2


def test_a_value_that_is_damaged_is_an_error() -> None:
    state = msgspec.to_builtins([StageState(0, "a", "done"), StageState(1, "b", "done")])
    details = {"stages": state, "values": {"0": "%", "1": base64.b64encode(b"x").decode(), "2": 7}}
    stages = stages_of(details, lambda data, what: (data, what))
    with pytest.raises(farcall.DeserializationError, match=r"the value of stage 0 \(a\) cannot be read"):
        stages[0].result()
    assert stages[1].result() == (b"x", "the value of stage 1 (b)")


def test_the_command_line_shows_stages_of_a_running_task(
    offline: FakeCloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path))
    with offline.client() as client, Executor(offline.endpoint_id, client) as executor:
        future = executor.submit(chain(read, count), "a")
        assert executor._engine.flush(WAIT_S)
        offline.report_stages(future.task_id, [StageState(0, "read", "running", calls=1)])
        assert ["0", "read", "running", "1", "", "", ""] in Farcall(offline).lines("tasks", "show", future.task_id)
        future.cancel()


def test_the_command_line_shows_stages(
    cloud: FakeCloud, executor: Executor, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path))
    future = executor.submit(chain(read, refuse), "a")
    concurrent.futures.wait([future], WAIT_S)
    lines = Farcall(cloud).lines("tasks", "show", future.task_id)
    assert [line[:4] for line in lines if line[0] in ("0", "1")] == [
        ["0", "read", "done", "1"],
        ["1", "refuse", "failed", "1, 1 failed"],
    ]
    assert not any(line[0] in ("stages", "values", "stage calls", "stage run s") for line in lines)
    shown = json.loads(Farcall(cloud)("tasks", "show", future.task_id, "--json").stdout)
    assert [each["state"] for each in shown["stages"]] == ["done", "failed"]


# -- chains ------------------------------------------------------------------------------------------------------------


def test_a_chain_is_one_task(executor: Executor, submits: Submits) -> None:
    lengths = chain(read, split, len)
    future = executor.submit(lengths, path="a b")
    assert future.result(WAIT_S) == 4
    assert [each.name for each in future.stages] == ["read", "split", "len"]
    assert len(submits.registered) == 3


def test_chains_of_a_map_share_requests_and_functions(offline: FakeCloud) -> None:
    submits = Submits(offline)
    with (
        Client("https://farcall.test", offline.token, transport=submits) as client,
        Executor(offline.endpoint_id, client) as executor,
    ):
        results = executor.map(chain(read, count), ["a", "bc"] * 20)
        assert executor._engine.flush(WAIT_S)
        assert executor.task_count_submitted == 40
        assert len(submits.bodies) < 40
        assert len({tuple(body["callees"]) for body in submits.bodies}) == 1
        assert submits.registered == ["read", "count"]
        offline.run_waiting()
        assert list(results) == [9, 10] * 20


def test_a_chunk_of_chains_is_a_graph(executor: Executor, submits: Submits) -> None:
    mapped = executor.map(chain(read, count), ["a", "bc", "d"], chunksize=2)
    assert list(mapped) == [9, 10, 9]
    assert sorted(len(unpack_graph(payload, callees=2).stages) for payload in submits.payloads) == [3, 5]


def test_tasks_that_call_many_functions_are_sent_in_several_requests(
    offline: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farcall._batch.MAX_CALLEES_PER_SUBMIT", 10)
    submits = Submits(offline)
    with (
        Client("https://farcall.test", offline.token, transport=submits) as client,
        Executor(offline.endpoint_id, client, callees=[read, count, split]) as executor,
    ):
        results = executor.map(total, [[1]] * 20)
        assert executor._engine.flush(WAIT_S)
        sizes = [len(ids) for body in submits.bodies for ids in body["tasks"].values()]
        assert (sum(sizes), max(sizes)) == (20, 3)
        offline.run_waiting()
        assert list(results) == [1] * 20
        function_id, callee = (executor.register_function(each) for each in (total, read))
        options: dict[str, Any] = {"callees": [callee] * 4}
        batch = client.create_batch(**options)
        for _ in range(5):
            batch.add(function_id, ([1],))
        submits.bodies.clear()
        client.batch_run(offline.endpoint_id, batch)
        assert [len(body["task_ids"][function_id]) for body in submits.bodies] == [2, 2, 1]


# -- callees -----------------------------------------------------------------------------------------------------------


def test_callees_are_registered_and_named_in_the_request(executor: Executor, submits: Submits) -> None:
    registered = executor.register_function(split)
    view = executor.options(callees=[read, count, registered, read])
    assert view.callees == (read, count, registered, read)
    assert view.submit(total, [1, 2]).result(WAIT_S) == 3
    [body] = submits.bodies
    assert sorted(submits.registered) == ["count", "read", "split", "total"]
    assert len(body["callees"]) == 3
    assert body["callees"][2] == registered
    assert executor.submit(total, [1]).result(WAIT_S) == 1
    assert "callees" not in submits.bodies[1]
    graph = Graph()
    view.submit(graph, graph.call(total, [graph.call(len, "ab")])).result(WAIT_S)
    assert len(submits.bodies[2]["callees"]) == 5
    view.callees = (each for each in [read])
    assert view.callees == (read,)
    view.callees = None
    assert view.callees == ()


def test_callees_of_an_executor_and_of_a_decorated_function(cloud: FakeCloud, submits: Submits) -> None:
    decorated = farcall.function(callees=[count])(total)
    with (
        Client("https://farcall.test", cloud.token, transport=submits) as client,
        Executor(cloud.endpoint_id, client, callees=[read]) as executor,
    ):
        executor.submit(total, [1]).result(WAIT_S)
        executor.submit(decorated, [1]).result(WAIT_S)
    assert sorted(submits.registered) == ["count", "read", "total"]
    assert [len(body["callees"]) for body in submits.bodies] == [1, 1]
    assert submits.bodies[0]["callees"] != submits.bodies[1]["callees"]


def test_callees_of_a_decorated_function_are_those_of_its_graph(executor: Executor, submits: Submits) -> None:
    driver = farcall.function(callees=[count], walltime_s=9)(ignore)
    assert executor.submit(chain(read, driver), "a").result(WAIT_S) == "ignored"
    [body] = submits.bodies
    assert len(body["callees"]) == 3
    assert sorted(submits.registered) == ["count", "ignore", "read"]


@pytest.mark.parametrize(
    ("callees", "error", "message"),
    [
        ("read", TypeError, "callees: expected a list, got str"),
        (3, TypeError, "callees: expected a list, got int"),
        ([3], TypeError, "callees: expected functions, ids or aliases, got int"),
        (["unknown"], FunctionUnknown, "unknown"),
        ([functools.partial(read, _unsendable())], SerializationError, "cannot be serialised"),
        ([functools.partial(read, str(number)) for number in range(MAX_CALLEES + 1)], ValueError, "at most 1,000"),
    ],
)
def test_callees_that_cannot_be(executor: Executor, callees: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        executor.options(callees=callees)


def test_an_executor_with_impossible_callees_ends(cloud: FakeCloud, client: Client) -> None:
    with pytest.raises(TypeError, match="callees"):
        Executor(cloud.endpoint_id, client, callees=3)  # type: ignore[arg-type]


# -- the running task --------------------------------------------------------------------------------------------------


def test_no_task_runs_in_a_program_that_submits() -> None:
    with pytest.raises(farcall.ConfigurationError, match=r"no task runs here"):
        farcall.current()
