"""One envelope of every kind of message, with every field set: what the golden bytes are made from."""

from __future__ import annotations

from typing import Any, Final

from farcall_common.environments import Environment
from farcall_common.task_options import Callee, TaskOptions
from farcall_common.wire import messages as m
from farcall_common.wire.states import TaskState

TASK: Final = "01932f2e-7c00-7000-8000-000000000001"
GROUP: Final = "5d0b9c80-0000-4000-8000-000000000002"
ENDPOINT: Final = "5d0b9c80-0000-4000-8000-000000000003"
SHA: Final = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
BLOB: Final = m.BlobLocation(blob_key="owner/key", size_bytes=5_000_000, sha256=SHA, url="https://blobs.example/get")
ERROR: Final = {"code": "TASK_FAILED", "message": "ValueError: no", "fault": "user_code", "retryable": False}
OPTIONS: Final = TaskOptions(
    idempotent=False,
    max_attempts=7,
    walltime_s=60.0,
    memory_bytes=2**30,
    max_output_bytes=4096,
    num_nodes=2,
    ranks_per_node=4,
    num_ranks=8,
    keep_output=True,
    memoize=False,
    container="c-1",
    result_serializers=("11", "00"),
    resource_specification={"queue": "short"},
    user_endpoint_config={"account": "a"},
)


def _result_with(**details: object) -> m.Envelope:
    """The result of a task with these details."""
    result = m.ResultSpec(task_id=TASK, attempt=1, state=TaskState.SUCCESS, result=0, details=details)
    return m.Envelope(m.TaskResults(results=(result,)), (b"4\n11\n[",))


def _heartbeat_with(**detail: object) -> m.Envelope:
    """A report with this detail."""
    return m.Envelope(m.Heartbeat(at=1_700_000_000.5, report=m.EndpointReport(managers=1, detail=detail)))


SAMPLES: Final = {
    type(envelope.message).__name__: envelope
    for envelope in (
        m.Envelope(
            m.Hello(
                endpoint_id=ENDPOINT,
                ticket="a.b.c",
                instance_id="i-1",
                spool_id="s-1",
                protocol_versions=(1,),
                heartbeat_s=30.0,
                held=(m.HeldTask(task_id=TASK, attempt=2, finished=True),),
                capabilities=m.Capabilities(
                    python_version="3.11.7",
                    software_version="0.1.0",
                    platform="linux",
                    hostname="node1",
                    serializers=("00", "11"),
                    packages={"numpy": "2.4.6"},
                ),
            )
        ),
        m.Envelope(m.Credit(tasks=8)),
        m.Envelope(m.TasksAccepted(tasks=(m.TaskRef(task_id=TASK, attempt=1),))),
        m.Envelope(
            m.TaskTransitions(
                transitions=(
                    m.TaskTransition(
                        task_id=TASK, attempt=1, state=TaskState.RUNNING, at=1_700_000_000.5, detail={"node": "n1"}
                    ),
                )
            )
        ),
        m.Envelope(
            m.TaskResults(
                results=(
                    m.ResultSpec(
                        task_id=TASK,
                        attempt=1,
                        state=TaskState.SUCCESS,
                        result=0,
                        started_at=1_700_000_000.5,
                        ended_at=1_700_000_001.5,
                        details={"python_version": "3.11.7"},
                    ),
                    m.ResultSpec(task_id=TASK, attempt=1, state=TaskState.SUCCESS, result_blob=BLOB),
                    m.ResultSpec(task_id=TASK, attempt=1, state=TaskState.FAILED, error=ERROR),
                )
            ),
            (b"11\n42",),
        ),
        m.Envelope(m.BlobRequest(task_id=TASK, attempt=1, size_bytes=5_000_000, sha256=SHA)),
        m.Envelope(
            m.Welcome(
                session_id="x-1",
                forwarder_id="f-1",
                protocol_version=1,
                heartbeat_s=30.0,
                forget=(m.TaskRef(task_id=TASK, attempt=2),),
            )
        ),
        m.Envelope(
            m.RunTasks(
                tasks=(
                    m.TaskSpec(
                        task_id=TASK,
                        attempt=1,
                        function_id="fn-1",
                        function_hash=SHA,
                        options=OPTIONS,
                        payload=1,
                    ),
                    m.TaskSpec(
                        task_id=TASK,
                        attempt=1,
                        function_id="fn-1",
                        function_hash=SHA,
                        options=TaskOptions(),
                        payload_blob=BLOB,
                    ),
                ),
                functions=(m.FunctionSpec(function_hash=SHA, name="hello", body=0),),
            ),
            (b"5\n01\nAA", b"4\n11\n["),
        ),
        m.Envelope(
            m.OutputRequest(
                request_id="r-1",
                tasks=(m.OutputWanted(task_id=TASK, stdout_from=4096, stderr_from=7),),
                max_bytes=65_536,
            )
        ),
        m.Envelope(
            m.FilePull(
                request_id="p-1",
                task_id=TASK,
                endpoint_id=ENDPOINT,
                path="/data/scan 7.h5",
                offset_bytes=8_388_608,
                max_bytes=8_388_608,
            )
        ),
        m.Envelope(m.FilesTaken(request_ids=("p-1", "p-2"))),
        m.Envelope(
            m.FileRead(
                request_id="r-1",
                size_bytes=30_000_000,
                version="1700000000000000000-42-30000000",
                piece_bytes=8_388_608,
                sha256=SHA,
                reason="NOT_FOUND",
            )
        ),
        m.Envelope(
            m.FileWanted(
                request_id="r-1",
                submitter="0b5a1f4e-5f0e-4d5b-9c55-0f2a7f6f2d10",
                path="/data/scan 7.h5",
                offset_bytes=8_388_608,
                max_bytes=8_388_608,
            )
        ),
        m.Envelope(
            m.FilePiece(
                request_id="p-1",
                size_bytes=30_000_000,
                version="1700000000000000000-42-30000000",
                piece_bytes=8_388_608,
                sha256=SHA,
                url="https://blobs.example/get",
                reason="OFFLINE",
            )
        ),
        m.Envelope(
            m.TaskOutput(
                request_id="r-1",
                pieces=(
                    m.OutputPiece(
                        task_id=TASK,
                        attempt=2,
                        stdout=m.OutputText(start=4100, next=4103, text="añ"),
                        stderr=m.OutputText(start=7, next=7),
                        complete=True,
                    ),
                    m.OutputPiece(task_id=TASK, reason="NOT_KEPT", sealed="fs\nQUJD"),
                ),
            )
        ),
        m.Envelope(m.CancelTasks(task_ids=(TASK,))),
        m.Envelope(m.ResultsRecorded(tasks=(m.TaskRef(task_id=TASK, attempt=1),))),
        m.Envelope(
            m.BlobGrant(
                task_id=TASK,
                attempt=1,
                blob_key="owner/key",
                upload_url="https://blobs.example/put",
                headers={"x-amz-checksum-sha256": "n4bQ"},
                error=ERROR,
            )
        ),
        m.Envelope(m.BlobPull(task_id=TASK, attempt=1, offset_bytes=1_048_576)),
        m.Envelope(
            m.BlobPush(task_id=TASK, attempt=1, size_bytes=5_000_000, sha256=SHA, offset_bytes=1_048_576, piece=0),
            (b"bytes",),
        ),
        m.Envelope(m.BlobPiece(task_id=TASK, attempt=1, offset_bytes=1_048_576, piece=0, error=ERROR), (b"bytes",)),
        m.Envelope(
            m.BlobTaken(task_id=TASK, attempt=1, offset_bytes=5_000_000, blob_key="owner/key", error=ERROR),
        ),
        m.Envelope(m.Redirect(reason="deploy", retry_after_s=1.5)),
        m.Envelope(
            m.Heartbeat(
                at=1_700_000_000.5,
                report=m.EndpointReport(
                    managers=1,
                    total_workers=4,
                    idle_workers=2,
                    pending_tasks=3,
                    outstanding_tasks=5,
                    detail={"blocks": 1},
                ),
            )
        ),
        m.Envelope(m.Goodbye(reason="stopped by its user")),
        m.Envelope(m.Refused(error=ERROR)),
        m.Envelope(
            m.OpenStream(
                ticket="a.b.c", protocol_versions=(1,), heartbeat_s=30.0, task_group_ids=(GROUP,), cursor="f-1:7"
            )
        ),
        m.Envelope(m.Subscribe(task_group_ids=(GROUP,))),
        m.Envelope(
            m.StreamOpened(session_id="x-2", protocol_version=1, heartbeat_s=30.0, cursor="f-1:9", resumed=True)
        ),
        m.Envelope(
            m.ResultsReady(
                cursor="f-1:10",
                results=(
                    m.StreamResult(
                        task_id=TASK,
                        task_group_id=GROUP,
                        state=TaskState.SUCCESS,
                        attempt=1,
                        result=0,
                        finished_at=1_700_000_001.5,
                        timings={"submitted_at": 1_700_000_000.0},
                        details={"python_version": "3.11.7"},
                    ),
                    m.StreamResult(task_id=TASK, task_group_id=GROUP, state=TaskState.SUCCESS, result_blob=BLOB),
                    m.StreamResult(task_id=TASK, task_group_id=GROUP, state=TaskState.FAILED, error=ERROR),
                ),
            ),
            (b"11\n42",),
        ),
    )
}


def _hello(**later: Any) -> m.Envelope:
    """A message with these fields, and the oldest ones."""
    return m.Envelope(
        m.Hello(
            endpoint_id="e-1",
            ticket="t-1",
            instance_id="i-1",
            spool_id="s-1",
            protocol_versions=(1,),
            heartbeat_s=30.0,
            **later,
        )
    )


def _run_tasks(*tasks: m.TaskSpec, payload: bytes = b"4\n11\n[") -> m.Envelope:
    """A message with these tasks, which have the same payload."""
    return m.Envelope(m.RunTasks(tasks=tasks), (payload,))


def _task(**later: Any) -> m.TaskSpec:
    """A task with these fields, and the oldest ones."""
    later = {"options": TaskOptions(), **later}
    return m.TaskSpec(task_id=TASK, attempt=1, function_id="fn-1", function_hash=SHA, payload=0, **later)


#: Fields that came after the first golden bytes of their message, which are never edited.
LATER_FIELDS: Final = {
    "Welcome.relay": m.Envelope(
        m.Welcome(
            session_id="x-1",
            forwarder_id="f-1",
            protocol_version=1,
            heartbeat_s=30.0,
            relay_piece_bytes=1_048_576,
        )
    ),
    "Welcome.files": m.Envelope(
        m.Welcome(
            session_id="x-1", forwarder_id="f-1", protocol_version=1, heartbeat_s=30.0, file_piece_bytes=8_388_608
        )
    ),
    "TaskResults.exhausted": m.Envelope(
        m.TaskResults(
            results=(
                m.ResultSpec(task_id=TASK, attempt=3, state=TaskState.FAILED, error=ERROR, exhausted=True),
                # Read and not written, in this version: see PROTOCOL.md on dead letters.
                m.ResultSpec(task_id=TASK, attempt=3, state=TaskState.DEAD_LETTERED, error=ERROR),
            )
        )
    ),
    "ResultsReady.dead-lettered": m.Envelope(
        m.ResultsReady(
            cursor="f-1:7",
            results=(m.StreamResult(task_id=TASK, task_group_id=GROUP, state=TaskState.DEAD_LETTERED, error=ERROR),),
        )
    ),
    "Hello.spool-generation": _hello(spool_generation=7),
    "Heartbeat.spool-generation": m.Envelope(m.Heartbeat(at=1_800_000_000.5, spool_generation=7)),
    "RunTasks.traceparent": _run_tasks(_task(traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")),
    "RunTasks.submitter": _run_tasks(_task(submitter="0b5a1f4e-5f0e-4d5b-9c55-0f2a7f6f2d10")),
    "Hello.fair-share": _hello(reserve=16, weights={"0b5a1f4e-5f0e-4d5b-9c55-0f2a7f6f2d10": 3}),
    "RunTasks.payer": _run_tasks(_task(payer="0b5a1f4e-5f0e-4d5b-9c55-0f2a7f6f2d11")),
    "FileWanted.payer": m.Envelope(
        m.FileWanted(
            request_id="r-1",
            submitter="0b5a1f4e-5f0e-4d5b-9c55-0f2a7f6f2d10",
            path="/data/scan 7.h5",
            payer="0b5a1f4e-5f0e-4d5b-9c55-0f2a7f6f2d11",
        )
    ),
    "RunTasks.sources": _run_tasks(_task(options=TaskOptions(sources=(ENDPOINT,), source_files=(SHA[:32],)))),
    "Hello.containers": _hello(capabilities=m.Capabilities(containers=("apptainer", "uv"))),
    "RunTasks.environment": _run_tasks(
        _task(
            options=TaskOptions().within(
                Environment(type="apptainer", location="/images/sci.sif", preload=("numpy",), name="sci"),
                container="c-1",
            )
        ),
        _task(options=TaskOptions().within(Environment(type="uv", requirements=("polars==1.*",)))),
    ),
    "RunTasks.retries": _run_tasks(
        _task(options=TaskOptions(retries=3, retry_on=("builtins.OSError",), retry_delay_s=0.5))
    ),
    "RunTasks.callees": _run_tasks(
        _task(
            options=TaskOptions(
                callees=(
                    Callee("fn-1", SHA, 2),
                    Callee("fn-2", SHA, 1, Environment(type="uv", requirements=("polars==1.*",))),
                )
            )
        ),
        payload=b"gr\nAAAA",
    ),
    "RunTasks.functions-ahead": m.Envelope(
        m.RunTasks(tasks=(), functions=(m.FunctionSpec(function_hash=SHA, name="resize", body=0),)),
        (b"4\n01\nf",),
    ),
    "TaskResults.stages": _result_with(
        stages=[{"number": 0, "name": "load", "state": "done", "ended": 1, "run_s": 1.5}],
        stage_calls=1,
        stage_run_s=1.5,
    ),
    "Heartbeat.graphs": _heartbeat_with(
        graphs=[
            {
                "task_id": TASK,
                "stages": [{"number": 1, "name": "resize", "state": "running", "calls": 40, "ended": 12}],
            }
        ]
    ),
    "Heartbeat.progress": _heartbeat_with(
        progress=[{"task_id": TASK, "done": 3, "total": 10, "text": "fitting", "at": 1_700_000_000.25}]
    ),
    "TaskResults.progress": _result_with(progress={"done": 10, "total": 10, "at": 1_700_000_000.25}),
    "TaskTransitions.retry": m.Envelope(
        m.TaskTransitions(
            transitions=(
                m.TaskTransition(
                    task_id=TASK,
                    attempt=1,
                    state=TaskState.WAITING_FOR_NODES,
                    at=1_700_000_000.5,
                    detail={"retry": 1, "retries": 3, "retry_at": 1_700_000_001.5, "error": "OSError"},
                ),
            )
        )
    ),
}
