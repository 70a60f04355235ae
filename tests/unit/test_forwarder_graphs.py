"""Stages of graphs in reports of agents: what is kept of them."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_common.graphs import StageState
from farcall_common.store.model import EndpointStatus, GraphState
from farcall_common.wire import EndpointReport
from farcall_forwarder.core.untrusted import clean_details, clean_status
from farcall_forwarder.core.untrusted_graphs import clean_graphs

NOW = 1_800_000_000.0
TASK = "00000000-0000-7000-8000-000000000001"
ERROR = {"code": "TASK_FAILED", "message": "boom", "hint": "", "exception_type": "ValueError", "traceback": "line 1"}
RESIZE = StageState(
    1,
    "resize",
    "failed",
    calls=40,
    ended=12,
    failed=1,
    retries=2,
    started_at=NOW - 5,
    ended_at=NOW - 1,
    run_s=30.5,
    value_bytes=1000,
    workers=(11, 12),
    node="n1",
    error=ERROR,
)
LOAD = StageState(0, "load", "done", ended=1, run_s=1.5)


def builtins(*states: StageState) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = msgspec.to_builtins(states)
    return list(found)


def test_stages_of_a_result_are_kept_and_summed() -> None:
    details = {"stages": builtins(LOAD, RESIZE), "stdout_tail": "hello"}
    assert clean_details(details, now=NOW) == {
        "stdout_tail": "hello",
        "stages": [{"number": 0, "name": "load", "state": "done", "ended": 1, "run_s": 1.5}, *builtins(RESIZE)],
        "stage_calls": 13,
        "stage_run_s": 32.0,
    }


def test_a_graph_with_more_stages_than_are_told_apart_has_sums_of_its_own() -> None:
    cleaned = clean_details({"stages": builtins(LOAD), "stage_calls": 10_000, "stage_run_s": 2_000.5}, now=NOW)
    assert (cleaned["stage_calls"], cleaned["stage_run_s"]) == (10_000, 2_000.5)


def test_of_a_sealed_graph_the_numbers_count() -> None:
    details = {"sealed": "text", "stage_calls": 3, "stage_run_s": 1.5}
    assert clean_details(details, now=NOW) == details


@pytest.mark.parametrize("stages", [None, "x", 5, {}, [5, None, {}], [{"number": 0}], [{"number": 0, "state": "odd"}]])
@pytest.mark.parametrize(
    "sums", [{}, {"stage_calls": -5, "stage_run_s": -1e9}, {"stage_calls": "1"}, {"stage_run_s": 5}]
)
def test_what_is_no_stage_is_left_out(stages: object, sums: dict[str, Any]) -> None:
    """And a sum without calls: it would take off the run time of the task."""
    assert clean_details({"stages": stages, "retries_used": 1, **sums}, now=NOW) == {"retries_used": 1}


def test_malformed_fields_of_a_stage_are_left_out() -> None:
    odd = {
        "number": 3,
        "state": "running",
        "name": ["x"],
        "calls": -1,
        "ended": True,
        "failed": 1.5,
        "retries": 2**70,
        "started_at": "now",
        "ended_at": 1e300,
        "run_s": float("nan"),
        "workers": [1, "2", -3, 2**40],
        "node": "no \0 room" + "x" * 1000,
        "error": {"message": "no code"},
        "more": 1,
    }
    [stage] = clean_details({"stages": [odd]}, now=NOW)["stages"]
    assert stage == {
        "number": 3,
        "name": "",
        "state": "running",
        "calls": 0,
        "retries": 1_000_000,
        "run_s": 0.0,
        "workers": (1,),
        "node": ("no \N{REPLACEMENT CHARACTER} room" + "x" * 1000)[:100],
    }
    assert [s["number"] for s in clean_details({"stages": builtins(LOAD, LOAD, RESIZE)}, now=NOW)["stages"]] == [0, 1]
    for number in (-1, 100_000, True, 1.0, "1", None):
        assert clean_details({"stages": [{**odd, "number": number}]}, now=NOW) == {}


def test_stages_are_bounded() -> None:
    error = {**ERROR, "traceback": "x" * 100_000 + "the end", "more": "x" * 100_000}
    many = [msgspec.structs.replace(RESIZE, number=number, error=error) for number in range(2000)]
    cleaned = clean_details({"stages": builtins(*many), "stdout_tail": "x" * 4096}, now=NOW)
    assert len(cleaned["stages"]) == 1000
    assert len(json.dumps(cleaned["stages"])) < 384 * 1024
    assert [each["number"] for each in cleaned["stages"] if "error" in each] == list(range(20))
    assert cleaned["stages"][0]["error"].keys() == ERROR.keys()
    assert cleaned["stages"][0]["error"]["traceback"].endswith("the end")
    assert len(cleaned["stdout_tail"]) == 4096  # the other details have room of their own
    long = [msgspec.structs.replace(each, name="\N{SNOWMAN}" * 100, node="\N{SNOWMAN}" * 100) for each in many]
    assert len(msgspec.json.encode(clean_details({"stages": builtins(*long)}, now=NOW)["stages"])) <= 384 * 1024


def test_values_of_a_failed_graph_are_small_texts_by_stage() -> None:
    small, large = (base64.b64encode(b"x" * size).decode() for size in (4096, 4099))
    values = {"0": small, "1": large, "x": small, "-1": small, "2": "not Base64", "3": 5, "01": small}
    assert clean_details({"values": values}, now=NOW) == {"values": {"0": small}}
    cleaned = clean_details({"values": {str(number): small for number in range(100)}}, now=NOW)
    assert len(cleaned["values"]) == 16  # 64 KiB in all
    assert clean_details({"values": [small], "x": 1}, now=NOW) == {"x": 1}


def test_graphs_of_a_report_are_bounded_and_have_no_errors() -> None:
    def status(graphs: object) -> EndpointStatus:
        return clean_status(EndpointReport(detail={"graphs": graphs}), now=NOW)

    plain = msgspec.structs.replace(RESIZE, error=None, workers=(), value_bytes=0)
    report = [{"task_id": TASK, "stages": builtins(LOAD, RESIZE)}]
    assert status(report).graphs == (GraphState(TASK, (LOAD, plain)),)
    assert status([{"task_id": TASK, "calls": 40, "ended": 41}]).graphs == (GraphState(TASK, (), 40, 40),)
    waiting = [msgspec.structs.replace(LOAD, number=number, state="waiting") for number in range(2, 60)]
    [graph] = status(
        [{"task_id": TASK, "stages": builtins(LOAD, *waiting, msgspec.structs.replace(RESIZE, number=99))}]
    ).graphs
    assert [each.number for each in graph.stages] == [*range(2, 21), 99]
    assert len(status(report * 100).graphs) == 20
    long = msgspec.structs.replace(RESIZE, name="\N{SNOWMAN}" * 100, node="\N{SNOWMAN}" * 100)
    wide = [msgspec.structs.replace(long, number=number) for number in range(20)]
    assert len(msgspec.json.encode(status([{"task_id": TASK, "stages": builtins(*wide)}] * 20).graphs)) < 33 * 1024
    malformed: list[Any] = ["x", 5, [5], [{}], [{"task_id": TASK, "stages": []}]]
    malformed += [[{"task_id": task_id, "stages": builtins(LOAD)}] for task_id in ("t", None, 5)]
    for wrong in malformed:
        assert status(wrong).graphs == ()


_json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
_FIELDS = st.sampled_from(StageState.__struct_fields__)


@given(
    st.dictionaries(st.sampled_from(["stages", "stage_calls", "stage_run_s", "values"]), _json_like),
    st.lists(st.dictionaries(_FIELDS, _json_like | st.just("running") | st.integers(0, 5))),
)
def test_any_details_become_json_that_postgresql_accepts(details: dict[str, Any], stages: list[Any]) -> None:
    for value in (details, {**details, "stages": stages}):
        cleaned = clean_details(value, now=NOW)
        assert "\\u0000" not in json.dumps(cleaned, allow_nan=False)
        assert cleaned.get("stage_run_s", 0.0) >= 0 <= cleaned.get("stage_calls", 0)
    graphs = [{"task_id": TASK, "stages": stages}, details]
    json.dumps(msgspec.to_builtins(clean_graphs(graphs, now=NOW)), allow_nan=False)
