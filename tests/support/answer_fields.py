"""Fields of the API's answers: who wrote each of them, and what the client does with it.

A field that is read as a value may run code. A client reads those of a sealed call under the seal of the endpoint only,
and says "by the service" where it shows others (``farcall._details``). Models that this client never reads have ``*``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple


class Writer(enum.StrEnum):
    """Who wrote a field."""

    SEAL = "the endpoint, under the seal of a sealed call"
    ENDPOINT = "the endpoint, without a seal: of a sealed call this is the word of the service"
    SIGNED = "the endpoint, with a signature of its identity"
    SERVICE = "the service"
    USER = "the caller or another user, as the service repeats it"


class Use(enum.StrEnum):
    """What the client does with a field."""

    VALUE = "read as a value, with the strategies that its writer is trusted with"
    KEY = "used as a key, after its signature and age are checked"
    NUMBER = "used as a number, an instant or a flag"
    ID = "compared, or an id of later requests"
    TEXT = "shown as text, or returned as it came"
    REQUEST = "address, ticket or parameter of a later request"
    PARTS = "an object or a list, whose fields have entries of their own"
    UNREAD = "not read"


SEAL, ENDPOINT, SIGNED, SERVICE, USER = Writer
VALUE, KEY, NUMBER, ID, TEXT, REQUEST, PARTS, UNREAD = Use


class Entry(NamedTuple):
    """The entry of a field."""

    writer: Writer
    use: Use


_FIELDS: Final[Mapping[str, Mapping[Entry, str]]] = {
    # -- tasks
    "TaskAnswer": {
        # The value, the exception inside of the error, and values of stages inside of the details.
        Entry(SEAL, VALUE): "result result_ref error details",
        # While the task runs, without texts; afterwards the details have them.
        Entry(ENDPOINT, NUMBER): "stages progress staging timings",
        Entry(SERVICE, NUMBER): "attempt completion_t function_version qos",
        Entry(SERVICE, TEXT): "status environment function_id retry_of",
        Entry(SERVICE, ID): "task_id task_group_id endpoint_id",
        Entry(USER, ID): "result_serializers",
        Entry(SERVICE, UNREAD): "exception reason",
    },
    "TaskBatchAnswer": {
        Entry(SERVICE, PARTS): "results",
        Entry(SERVICE, ID): "unknown",
        Entry(SERVICE, UNREAD): "response",
    },
    "ResultRefShape": {Entry(SERVICE, REQUEST): "blob_key sha256 size_bytes url"},
    "StageShape": {
        Entry(
            ENDPOINT, NUMBER
        ): "number calls ended failed retries run_s value_bytes workers started_at ended_at state",
        Entry(SEAL, TEXT): "name node error",
    },
    "ProgressShape": {Entry(ENDPOINT, NUMBER): "done total at", Entry(SEAL, TEXT): "text"},
    "StagingShape": {
        Entry(ENDPOINT, NUMBER): "state files files_done bytes total since to_node",
        Entry(SEAL, TEXT): "url problem",
    },
    "QosShape": {Entry(USER, NUMBER): "target_ms max_slowdown percentile is_baseline"},
    "OutputBatchAnswer": {Entry(SERVICE, PARTS): "results", Entry(SERVICE, UNREAD): "unknown"},
    "OutputAnswer": {
        Entry(SEAL, TEXT): "sealed stdout stderr",
        Entry(SERVICE, NUMBER): "attempt complete",
        Entry(SERVICE, TEXT): "status source reason",
    },
    "StreamShape": {Entry(SEAL, NUMBER): "from next", Entry(SEAL, TEXT): "text"},
    "TaskGroupAnswer": {
        Entry(SERVICE, PARTS): "tasks",
        Entry(SERVICE, UNREAD): "taskgroup_id create_websockets_queue",
    },
    "TaskGroupEntry": {Entry(SERVICE, ID): "id", Entry(SERVICE, UNREAD): "created_at"},
    "FoundIds": {Entry(SERVICE, ID): "ids"},
    "TaskList": {Entry(SERVICE, PARTS): "tasks", Entry(SERVICE, REQUEST): "next"},
    "TaskEntry": {
        Entry(SERVICE, ID): "task_id",
        # Of a sealed call the text is shown as that of the service; `sealed` in it is not opened in lists.
        Entry(ENDPOINT, TEXT): "error",
        Entry(ENDPOINT, NUMBER): "timings",
        Entry(SERVICE, NUMBER): "attempt function_version submitted_at finished_at",
        Entry(SERVICE, TEXT): "status task_group_id endpoint_id function_id retry_of owner_id",
        Entry(USER, TEXT): "function_name endpoint_name",
    },
    "TaskEvents": {Entry(SERVICE, PARTS): "events", Entry(SERVICE, REQUEST): "next", Entry(SERVICE, UNREAD): "task_id"},
    "TaskEventShape": {Entry(SERVICE, TEXT): "state reporter at attempt detail"},
    "WhyAnswer": {
        Entry(SERVICE, TEXT): "task_id reason state text",
        Entry(SERVICE, NUMBER): "attempt expires_at queue_depth queue_position queue_submitters state_age_s",
        Entry(SERVICE, PARTS): "endpoint infeasible qos",
        Entry(SERVICE, UNREAD): "state_since",
    },
    "WhyEndpoint": {
        Entry(SERVICE, TEXT): "endpoint_id status",
        Entry(USER, TEXT): "name",
        Entry(ENDPOINT, TEXT): "problem",
        Entry(SERVICE, NUMBER): "seen_at reported_at age_s",
        Entry(ENDPOINT, PARTS): "details",
        Entry(ENDPOINT, UNREAD): "environments",
    },
    "InfeasibleShape": {Entry(SERVICE, TEXT): "reason fix"},
    "SubmitAnswer": {
        Entry(SERVICE, ID): "tasks task_group_id endpoint_id",
        Entry(SERVICE, TEXT): "request_id",
        Entry(SERVICE, PARTS): "results warnings",
        Entry(SERVICE, NUMBER): "results_left_out",
    },
    "SubmitWarning": {Entry(SERVICE, TEXT): "code message hint", Entry(SERVICE, ID): "function_id"},
    "CancelBatchAnswer": {Entry(SERVICE, PARTS): "results"},
    "CancelAnswer": {Entry(SERVICE, TEXT): "outcome status task_id"},
    "RetryAnswer": {Entry(SERVICE, ID): "task_id", Entry(SERVICE, UNREAD): "retry_of task_group_id"},
    "DiscardAnswer": {Entry(SERVICE, UNREAD): "outcome task_id"},
    "GroupList": {Entry(SERVICE, PARTS): "groups", Entry(SERVICE, REQUEST): "next"},
    "GroupEntry": {Entry(SERVICE, TEXT): "task_group_id created_at states tasks"},
    "EndpointTasks": {Entry(SERVICE, PARTS): "tasks", Entry(SERVICE, REQUEST): "next"},
    "EndpointTaskEntry": {
        Entry(SERVICE, TEXT): "age_s function_id function_version status submitter task_id",
    },
    "CancelEndpointTasksAnswer": {Entry(SERVICE, PARTS): "results", Entry(SERVICE, REQUEST): "next"},
    "AuditList": {Entry(SERVICE, PARTS): "entries", Entry(SERVICE, REQUEST): "next"},
    "AuditEntryShape": {Entry(SERVICE, TEXT): "action at detail identity_id object_id owner_id"},
    "UsageList": {Entry(SERVICE, PARTS): "usage", Entry(SERVICE, REQUEST): "next"},
    "UsageEntry": {
        Entry(SERVICE, TEXT): "account day endpoint_id function_id identity_id",
        Entry(SERVICE, NUMBER): "tasks failed wall_s core_s gpu_s stages",
    },
    "ErrorAnswer": {
        Entry(SERVICE, TEXT): "code message hint fault request_id",
        Entry(SERVICE, NUMBER): "retryable retry_after_s http_status_code",
        Entry(SERVICE, UNREAD): "error_args reason status",
    },
    # -- the way of bytes and results
    "BlobGranted": {Entry(SERVICE, REQUEST): "blob_key headers upload_url"},
    "StreamAnswer": {
        Entry(SERVICE, REQUEST): "forwarders ticket",
        Entry(SERVICE, NUMBER): "heartbeat_s ticket_expires_at",
    },
    "ForwarderEntry": {Entry(SERVICE, REQUEST): "address server_key"},
    # -- endpoints
    "EndpointAnswer": {
        Entry(SIGNED, KEY): "sealing",
        # Whose an endpoint is decides whether its pickles are read: the service is trusted with that.
        Entry(SERVICE, NUMBER): "owned multi_user public",
        Entry(SERVICE, TEXT): "uuid sdk_version",
        Entry(USER, TEXT): "name display_name description subscription_uuid user_config_schema user_config_template",
        Entry(ENDPOINT, TEXT): "endpoint_version endpoint_config hostname ip_address local_user",
        Entry(ENDPOINT, PARTS): "runtime",
    },
    "SealingKeyShape": {Entry(SIGNED, KEY): "identity key created_at signature"},
    "EndpointRuntime": {
        Entry(ENDPOINT, ID): "python_version serializers",
        Entry(ENDPOINT, TEXT): "containers packages platform",
    },
    "EndpointEntry": {
        Entry(SERVICE, ID): "uuid",
        Entry(USER, TEXT): "name display_name",
        Entry(SERVICE, TEXT): "owner owned status",
    },
    "EndpointStatusAnswer": {
        Entry(SERVICE, TEXT): "status reported_at age_s",
        Entry(ENDPOINT, TEXT): "problem",
        Entry(ENDPOINT, PARTS): "details environments",
    },
    "EndpointDetails": {
        Entry(
            ENDPOINT, NUMBER
        ): "blocks idle_workers managers outstanding_tasks pending_blocks pending_tasks total_workers",
    },
    "EnvironmentEntry": {
        Entry(ENDPOINT, TEXT): "busy forkable key label node problem retry_at since starting text type warm",
    },
    "EndpointQos": {
        Entry(ENDPOINT, TEXT): "actuator admission policy problem",
        Entry(SERVICE, TEXT): "endpoint_id reported_at",
        Entry(ENDPOINT, PARTS): "functions",
    },
    "FunctionQosEntry": {
        Entry(ENDPOINT, NUMBER): "histogram max_slowdown percentile target_ms weight weights",
        Entry(ENDPOINT, PARTS): "infeasible windows",
        Entry(SERVICE, TEXT): "function_id submitter",
        Entry(USER, TEXT): "function",
    },
    "QosWindow": {
        Entry(
            ENDPOINT, NUMBER
        ): "cold_starts p50_ms p75_ms p90_ms p99_ms queue_p50_ms queue_p95_ms run_p50_ms run_p95_ms tasks violations",
    },
    "EndpointRegistered": {Entry(SERVICE, TEXT): "endpoint_id result_queue_info task_queue_info"},
    "QueueInfo": {Entry(SERVICE, TEXT): "connection_url exchange queue"},
    "ResultQueueInfo": {Entry(SERVICE, TEXT): "connection_url exchange queue queue_publish_kwargs"},
    "EndpointKeys": {Entry(SERVICE, PARTS): "keys", Entry(SERVICE, UNREAD): "endpoint_id"},
    "EndpointKeyEntry": {Entry(SERVICE, TEXT): "added_at public_key"},
    "AllowedFunctions": {Entry(USER, TEXT): "endpoint_id functions restricted"},
    # -- functions, environments, shares, tokens
    "FunctionAnswer": {Entry(USER, TEXT): "description function_code function_name function_uuid metadata"},
    "FunctionEntry": {
        Entry(USER, TEXT): "description function_name metadata public",
        Entry(SERVICE, TEXT): "created_at function_hash function_uuid version",
    },
    "FunctionFound": {
        Entry(USER, TEXT): "description function_name metadata public",
        Entry(SERVICE, TEXT): "created_at function_hash function_uuid version",
        Entry(SERVICE, ID): "reference",
    },
    "FunctionList": {Entry(SERVICE, PARTS): "functions"},
    "FunctionRegistered": {Entry(SERVICE, ID): "function_uuid environment"},
    "FunctionUpdated": {Entry(SERVICE, ID): "function_uuid environment", Entry(SERVICE, NUMBER): "version"},
    "FunctionVersions": {Entry(SERVICE, PARTS): "versions", Entry(SERVICE, UNREAD): "function_uuid"},
    "VersionEntry": {Entry(USER, TEXT): "metadata", Entry(SERVICE, TEXT): "created_at function_hash version"},
    "AliasList": {Entry(SERVICE, PARTS): "aliases"},
    "AliasEntry": {Entry(USER, TEXT): "function_uuid name version"},
    "ContainerList": {Entry(SERVICE, PARTS): "containers"},
    "ContainerAnswer": {Entry(SERVICE, PARTS): "container"},
    "ContainerEntry": {
        Entry(USER, TEXT): "description location name preload requirements type",
        Entry(SERVICE, TEXT): "container_uuid created_at",
    },
    "ContainerRegistered": {Entry(SERVICE, ID): "container_id"},
    "BuildStatus": {Entry(SERVICE, TEXT): "status", Entry(SERVICE, UNREAD): "container_id"},
    "ShareList": {Entry(SERVICE, PARTS): "shares"},
    "ShareEntry": {
        Entry(USER, TEXT): "allowance ends_at granted_at granted_by grantee note right",
        Entry(SERVICE, ID): "share_id",
    },
    "Grantee-Output": {Entry(USER, TEXT): "id kind"},
    "SharedList": {Entry(SERVICE, PARTS): "shared"},
    "SharedEntry": {Entry(USER, TEXT): "kind name object_id owner_id share"},
    "TeamList": {Entry(SERVICE, PARTS): "teams"},
    "TeamEntry": {Entry(USER, TEXT): "name", Entry(SERVICE, TEXT): "created_at owner_id team_id"},
    "MemberList": {Entry(SERVICE, PARTS): "members", Entry(SERVICE, UNREAD): "team_id"},
    "MemberEntry": {Entry(USER, TEXT): "member", Entry(SERVICE, TEXT): "added_at"},
    "Member-Output": {Entry(USER, TEXT): "id kind"},
    "AccountList": {Entry(SERVICE, PARTS): "accounts"},
    "AccountEntry": {Entry(USER, TEXT): "name", Entry(SERVICE, TEXT): "account_id created_at owner_id"},
    "TokenList": {Entry(SERVICE, PARTS): "tokens"},
    "TokenEntry": {
        Entry(USER, TEXT): "name scopes endpoints functions",
        Entry(SERVICE, TEXT): "created_at expires_at identity_id last_used_at revoked_at token_id",
    },
    "TokenCreated": {
        Entry(USER, TEXT): "name scopes endpoints functions",
        Entry(SERVICE, TEXT): "created_at expires_at identity_id last_used_at revoked_at token_id token",
    },
    "TokenShape": {Entry(USER, TEXT): "name scopes endpoints functions", Entry(SERVICE, TEXT): "token_id"},
    # -- the deployment
    "VersionAnswer": {Entry(SERVICE, TEXT): "api git_sha min_endpoint_version min_ep_version min_sdk_version"},
    "WhoAmI": {Entry(SERVICE, TEXT): "identity_id linked provider username", Entry(SERVICE, PARTS): "limits token"},
    "Limits": {
        Entry(SERVICE, PARTS): "containers endpoints functions",
        Entry(
            SERVICE, NUMBER
        ): "max_inline_bytes max_payload_bytes max_queue_depth max_request_bytes max_tasks_per_request "
        "rate_burst rate_per_s retention_days",
    },
    "Quota": {Entry(SERVICE, NUMBER): "limit used"},
    "Removed": {Entry(SERVICE, UNREAD): "result"},
    # -- read by agents, Globus Flows and Globus Compute's clients
    **{
        name: {Entry(SERVICE, UNREAD): "*"}
        for name in (
            *("ActionErrorAnswer", "ActionLog", "ActionLogEntry", "ActionProvider", "ActionStatus"),
            *("ConnectAnswer", "EndpointCredential", "EndpointRegisteredV2", "SubmitV2Answer", "SubmitV2Result"),
        )
    },
}


def entries() -> Iterator[tuple[str, str, Entry]]:
    """Model, field and entry of each field of the table."""
    for model, fields in _FIELDS.items():
        for entry, names in fields.items():
            for name in names.split():
                yield model, name, entry
