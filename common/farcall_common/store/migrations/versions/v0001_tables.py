"""The first schema.

Ids are text in the C collation: they compare as bytes, and a UUIDv7 sorts by its time. JSON that users can influence is
``json``, which keeps any string; ``jsonb`` refuses ``\\u0000``, and one such traceback would fail a whole batch.
Tasks refer to functions and endpoints without foreign keys: a task outlives both, and an insert takes no locks on them.

An update of an open task is made in place (HOT) as long as no index contains a column that it changes. So indexes of
open tasks ask for ``finished_at``, never for ``state``, and listed dead letters have a table of their own.
"""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

REGISTRY = """
CREATE TABLE function (
    function_id  text COLLATE "C" PRIMARY KEY,
    owner_id     text NOT NULL,
    name         text NOT NULL,
    description  text,
    public       boolean NOT NULL DEFAULT false,
    created_at   timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX function_of_owner ON function (owner_id, created_at DESC);

CREATE TABLE function_version (
    function_id  text COLLATE "C" NOT NULL REFERENCES function ON DELETE CASCADE,
    version      integer NOT NULL,
    body         bytea NOT NULL,
    body_hash    text NOT NULL,
    metadata     json NOT NULL DEFAULT '{}',
    created_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (function_id, version)
);

CREATE TABLE function_alias (
    owner_id     text NOT NULL,
    name         text COLLATE "C" NOT NULL,
    function_id  text COLLATE "C" NOT NULL REFERENCES function ON DELETE CASCADE,
    version      integer,
    PRIMARY KEY (owner_id, name)
);
CREATE INDEX function_alias_of_function ON function_alias (function_id);

CREATE TABLE container (
    container_id text COLLATE "C" PRIMARY KEY,
    owner_id     text NOT NULL,
    name         text NOT NULL,
    technology   text NOT NULL,
    image        text NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT now(),
    description  text,
    requirements text[] NOT NULL DEFAULT '{}',
    preload      text[]
);
CREATE INDEX container_of_owner ON container (owner_id, created_at DESC);
CREATE UNIQUE INDEX container_by_name ON container (owner_id, name);

CREATE TABLE endpoint (
    endpoint_id       text COLLATE "C" PRIMARY KEY,
    owner_id          text NOT NULL,
    name              text NOT NULL,
    display_name      text,
    description       text,
    public            boolean NOT NULL DEFAULT false,
    multi_user        boolean NOT NULL DEFAULT false,
    allowed_functions text[],
    metadata          json NOT NULL DEFAULT '{}',
    created_at        timestamptz NOT NULL DEFAULT now(),
    seen_at           timestamptz,
    online            boolean NOT NULL DEFAULT false,
    status            json NOT NULL DEFAULT '{}',
    -- The agent's spool and its generation in the last report: an old copy of the spool is refused.
    spool_id          text COLLATE "C" NOT NULL DEFAULT '',
    spool_generation  bigint NOT NULL DEFAULT 0,
    -- The id of the credential with which the agent may connect; empty without one.
    credential_id     text NOT NULL DEFAULT '',
    -- What each task has on a worker.
    worker_share      json NOT NULL DEFAULT '{}'
);
CREATE INDEX endpoint_of_owner ON endpoint (owner_id, created_at DESC);
CREATE INDEX endpoint_public ON endpoint (created_at DESC) WHERE public;

-- A revoked key stays in its row, so that it is not added again.
CREATE TABLE endpoint_key (
    public_key   text COLLATE "C" PRIMARY KEY,
    endpoint_id  text COLLATE "C" NOT NULL REFERENCES endpoint ON DELETE CASCADE,
    added_at     timestamptz NOT NULL,
    revoked_at   timestamptz
);
CREATE INDEX endpoint_key_of_endpoint ON endpoint_key (endpoint_id);

CREATE TABLE endpoint_qos (
    endpoint_id  text COLLATE "C" PRIMARY KEY REFERENCES endpoint ON DELETE CASCADE,
    report       json NOT NULL
);
"""

TASKS = """
CREATE TABLE task_group (
    task_group_id text COLLATE "C" PRIMARY KEY,
    owner_id      text NOT NULL,
    created_at    timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX task_group_of_owner ON task_group (owner_id, created_at DESC, task_group_id DESC);

CREATE TABLE task (
    task_id          text COLLATE "C" PRIMARY KEY,
    task_group_id    text COLLATE "C" NOT NULL,
    owner_id         text COLLATE "C" NOT NULL,
    endpoint_id      text COLLATE "C" NOT NULL,
    function_id      text COLLATE "C" NOT NULL,
    function_hash    text NOT NULL,
    payload          bytea,
    payload_ref      json,
    state            text NOT NULL DEFAULT 'received',
    attempt          integer NOT NULL DEFAULT 0,
    result           bytea,
    result_ref       json,
    error            json,
    details          json NOT NULL,
    submitted_at     timestamptz NOT NULL,
    finished_at      timestamptz,
    timings          jsonb NOT NULL,
    -- Calls with the same key are the same call, whose result may be remembered.
    memo_key         text COLLATE "C",
    traceparent      text COLLATE "C",
    function_version integer NOT NULL DEFAULT 1,
    retry_of         text COLLATE "C",
    -- The transaction that added the task. The server gives these numbers, so no clock decides what the reconciler
    -- has checked already.
    added_in         xid8 NOT NULL DEFAULT pg_current_xact_id(),
    options          json,
    -- The person for whose quota the task counts: the creator's, if the submitter is a service account.
    quota_key        text,
    CONSTRAINT task_ended_check CHECK (
        (finished_at IS NULL) = (state NOT IN ('success', 'failed', 'cancelled', 'lost', 'dead-lettered'))
    ),
    CONSTRAINT task_options_check CHECK (options IS NOT NULL),
    -- A dead letter that was discarded has no payload.
    CONSTRAINT task_payload_check CHECK (
        (payload IS NULL) <> (payload_ref IS NULL)
        OR (state = 'dead-lettered' AND payload IS NULL AND payload_ref IS NULL)
    )
) WITH (fillfactor = 80);
CREATE INDEX task_open ON task (endpoint_id, task_id) WHERE finished_at IS NULL;
CREATE INDEX task_open_added ON task (added_in, task_id) WHERE finished_at IS NULL;
CREATE INDEX task_open_callees ON task (task_id)
    WHERE finished_at IS NULL AND strpos(options::text, '"callees":[[') > 0;
CREATE INDEX task_open_function ON task (function_id, task_id) WHERE finished_at IS NULL;
CREATE INDEX task_of_group ON task (task_group_id);
CREATE INDEX task_of_owner ON task (owner_id, submitted_at DESC);
CREATE INDEX task_memo ON task (owner_id, memo_key, finished_at DESC)
    WHERE memo_key IS NOT NULL AND finished_at IS NOT NULL;
-- Only the purge uses this index, because it is on an expression. The planner took one on the bare column for the
-- newest remembered result of a call, and read the ended tasks of all users.
CREATE INDEX task_ended ON task ((finished_at AT TIME ZONE 'UTC')) WHERE finished_at IS NOT NULL;

CREATE TABLE task_event (
    event_id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task_id      text COLLATE "C" NOT NULL,
    state        text NOT NULL,
    reporter     text NOT NULL,
    at           timestamptz NOT NULL,
    attempt      integer NOT NULL,
    detail       json NOT NULL DEFAULT '{}'
);
CREATE INDEX task_event_of_task ON task_event (task_id, event_id);

CREATE TABLE dead_letter (
    task_id      text COLLATE "C" PRIMARY KEY,
    owner_id     text COLLATE "C" NOT NULL,
    endpoint_id  text COLLATE "C" NOT NULL,
    submitted_at timestamptz NOT NULL
);
CREATE INDEX dead_letter_of_owner ON dead_letter (owner_id, submitted_at DESC);
CREATE INDEX dead_letter_of_endpoint ON dead_letter (endpoint_id, submitted_at DESC);

-- One reconciler at a time has the turn.
CREATE TABLE turn (
    name   text COLLATE "C" PRIMARY KEY,
    until  timestamptz NOT NULL
);

-- Actions of Globus Flows.
CREATE TABLE flow_action (
    action_id        text COLLATE "C" PRIMARY KEY,
    owner_id         text NOT NULL,
    request_id       text NOT NULL,
    request_hash     text NOT NULL,
    tasks            integer NOT NULL,
    created_at       timestamptz NOT NULL,
    release_after_s  double precision NOT NULL,
    label            text,
    monitor_by       text[] NOT NULL,
    manage_by        text[] NOT NULL,
    deadline         timestamptz,
    UNIQUE (owner_id, request_id)
);
CREATE INDEX flow_action_owner ON flow_action (owner_id, action_id);
CREATE INDEX flow_action_created ON flow_action (created_at);
CREATE INDEX flow_action_deadline ON flow_action (deadline) WHERE deadline IS NOT NULL;
"""

RIGHTS = """
CREATE TABLE share (
    share_id    text COLLATE "C" PRIMARY KEY,
    kind        text NOT NULL,
    object_id   text COLLATE "C" NOT NULL,
    grantee     text COLLATE "C" NOT NULL,
    rank        smallint NOT NULL,
    granted_by  text NOT NULL,
    granted_at  timestamptz NOT NULL,
    ends_at     timestamptz,
    note        text NOT NULL DEFAULT '',
    allowance   json NOT NULL DEFAULT '{}',
    UNIQUE (object_id, grantee)
);
CREATE INDEX share_of_grantee ON share (grantee, granted_at DESC);
CREATE INDEX share_ends ON share (ends_at) WHERE ends_at IS NOT NULL;

-- Withdrawn rights: objects whose open tasks are to be compared with the rights again.
CREATE TABLE withdrawal (
    object_id      text COLLATE "C" PRIMARY KEY,
    identity_id    text NOT NULL,
    owner_ids      text[] NOT NULL,
    at             timestamptz NOT NULL,
    cancels_tasks  boolean NOT NULL,
    ends_sessions  boolean NOT NULL
);

CREATE TABLE team (
    team_id     text COLLATE "C" PRIMARY KEY,
    owner_id    text NOT NULL,
    name        text NOT NULL,
    created_at  timestamptz NOT NULL
);
CREATE INDEX team_of_owner ON team (owner_id);

CREATE TABLE team_member (
    team_id     text COLLATE "C" NOT NULL REFERENCES team ON DELETE CASCADE,
    member      text COLLATE "C" NOT NULL,
    added_at    timestamptz NOT NULL,
    PRIMARY KEY (team_id, member)
);
CREATE INDEX team_of_member ON team_member (member);

-- The names and groups by which people are known.
CREATE TABLE person (
    identity_id text COLLATE "C" PRIMARY KEY,
    principals  text[] NOT NULL,
    seen_at     timestamptz NOT NULL DEFAULT now()
);

-- Deleted accounts stay: their tasks count for the creator's quota.
CREATE TABLE service_account (
    account_id  text COLLATE "C" PRIMARY KEY,
    owner_id    text NOT NULL,
    name        text NOT NULL,
    created_at  timestamptz NOT NULL,
    deleted_at  timestamptz,
    UNIQUE (owner_id, name)
);

CREATE TABLE api_token (
    token_id      text COLLATE "C" PRIMARY KEY,
    identity_id   text NOT NULL,
    owner_id      text NOT NULL,
    name          text NOT NULL,
    scopes        text[] NOT NULL,
    endpoints     text[],
    functions     text[],
    created_at    timestamptz NOT NULL,
    expires_at    timestamptz NOT NULL,
    revoked_at    timestamptz,
    last_used_at  timestamptz
);
CREATE INDEX api_token_owner ON api_token (owner_id);
CREATE INDEX api_token_identity ON api_token (identity_id);

-- What allowances give submitters in the queue of an endpoint.
CREATE TABLE running_limit (
    endpoint_id  text COLLATE "C" NOT NULL REFERENCES endpoint ON DELETE CASCADE,
    owner_id     text COLLATE "C" NOT NULL,
    max_running  integer,
    weight       integer,
    PRIMARY KEY (endpoint_id, owner_id)
);
"""

_OF_A_DAY = """
    day          date NOT NULL,
    owner_id     text COLLATE "C" NOT NULL,
    function_id  text COLLATE "C" NOT NULL,
    endpoint_id  text COLLATE "C" NOT NULL,
    account      text COLLATE "C" NOT NULL,
    tasks        bigint NOT NULL,
    failed       bigint NOT NULL,
    wall_s       double precision NOT NULL,
    core_s       double precision NOT NULL,
    gpu_s        double precision NOT NULL,
    stages       bigint NOT NULL DEFAULT 0
"""

#: ``usage_part`` has a row for each batch of results, until the reconciler adds it to ``usage``: two forwarders never
#: wait for the same row. The index of the audit by time finds what is too old. Rows are in that order already, so it
#: costs a write almost nothing.
RECORDS = f"""
CREATE TABLE usage ({_OF_A_DAY}, PRIMARY KEY (owner_id, day, endpoint_id, function_id, account));
CREATE INDEX usage_of_endpoint ON usage (endpoint_id, day);
CREATE INDEX usage_of_day ON usage (day);
CREATE TABLE usage_part (part_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, {_OF_A_DAY});

CREATE TABLE audit (
    audit_id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at           timestamptz NOT NULL,
    identity_id  text COLLATE "C" NOT NULL,
    owner_id     text COLLATE "C" NOT NULL,
    action       text NOT NULL,
    object_id    text COLLATE "C" NOT NULL,
    detail       json NOT NULL DEFAULT '{{}}'
);
CREATE INDEX audit_of_identity ON audit (identity_id, at, audit_id);
CREATE INDEX audit_of_owner ON audit (owner_id, at, audit_id) WHERE owner_id <> identity_id;
CREATE INDEX audit_by_time ON audit USING brin (at);
CREATE FUNCTION audit_is_append_only() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'the audit is append-only'; END $$;
CREATE TRIGGER audit_append_only BEFORE UPDATE ON audit EXECUTE FUNCTION audit_is_append_only();
"""


def upgrade() -> None:
    """Create every table."""
    for statements in (REGISTRY, TASKS, RIGHTS, RECORDS):
        op.execute(statements)
