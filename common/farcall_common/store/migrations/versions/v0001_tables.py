"""The first schema.

Ids are text in the C collation: they compare as bytes, and a UUIDv7 sorts by its time. JSON that users can influence is
``json``, which keeps any string; ``jsonb`` refuses ``\\u0000``, and one such traceback would fail a whole batch.
Tasks refer to functions and endpoints without foreign keys: a task outlives both, and an insert takes no locks on them.
"""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = """
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

CREATE TABLE container (
    container_id text COLLATE "C" PRIMARY KEY,
    owner_id     text NOT NULL,
    name         text NOT NULL,
    technology   text NOT NULL,
    image        text NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX container_of_owner ON container (owner_id, created_at DESC);

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
    status            json NOT NULL DEFAULT '{}'
);
CREATE INDEX endpoint_of_owner ON endpoint (owner_id, created_at DESC);
CREATE INDEX endpoint_public ON endpoint (created_at DESC) WHERE public;

CREATE TABLE endpoint_key (
    public_key   text COLLATE "C" PRIMARY KEY,
    endpoint_id  text COLLATE "C" NOT NULL REFERENCES endpoint ON DELETE CASCADE,
    added_at     timestamptz NOT NULL
);
CREATE INDEX endpoint_key_of_endpoint ON endpoint_key (endpoint_id);

CREATE TABLE access_grant (
    identity_id  text NOT NULL,
    object_id    text COLLATE "C" NOT NULL,
    granted_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (identity_id, object_id)
);

CREATE TABLE task_group (
    task_group_id text COLLATE "C" PRIMARY KEY,
    owner_id      text NOT NULL,
    created_at    timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE task (
    task_id                text COLLATE "C" PRIMARY KEY,
    task_group_id          text COLLATE "C" NOT NULL,
    owner_id               text COLLATE "C" NOT NULL,
    endpoint_id            text COLLATE "C" NOT NULL,
    function_id            text COLLATE "C" NOT NULL,
    function_hash          text NOT NULL,
    payload                bytea,
    payload_ref            json,
    container_id           text,
    idempotent             boolean NOT NULL,
    max_attempts           integer NOT NULL,
    walltime_s             double precision,
    result_serializers     json NOT NULL,
    resource_specification json NOT NULL,
    state                  text NOT NULL DEFAULT 'received',
    attempt                integer NOT NULL DEFAULT 0,
    result                 bytea,
    result_ref             json,
    error                  json,
    details                json NOT NULL,
    submitted_at           timestamptz NOT NULL,
    finished_at            timestamptz,
    timings                jsonb NOT NULL,
    CHECK ((payload IS NULL) <> (payload_ref IS NULL)),
    CHECK ((finished_at IS NULL) = (state NOT IN ('success', 'failed', 'cancelled', 'lost')))
) WITH (fillfactor = 80);
-- An open task has no finished_at. Asking for that instead of the state lets a move update its row in place (HOT).
CREATE INDEX task_open ON task (endpoint_id, task_id) WHERE finished_at IS NULL;
CREATE INDEX task_of_group ON task (task_group_id);
CREATE INDEX task_of_owner ON task (owner_id, submitted_at DESC);

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
"""


def upgrade() -> None:
    """Create every table."""
    op.execute(TABLES)
