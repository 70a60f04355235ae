"""Shares of endpoints and functions, teams, and the names and groups by which people are known.

Grants become shares. The table of grants stays for the release before, and nothing reads it after that.
"""

from __future__ import annotations

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

STEPS = """
CREATE TABLE IF NOT EXISTS share (
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
CREATE INDEX IF NOT EXISTS share_of_grantee ON share (grantee, granted_at DESC);
CREATE INDEX IF NOT EXISTS share_ends ON share (ends_at) WHERE ends_at IS NOT NULL;

CREATE TABLE IF NOT EXISTS team (
    team_id     text COLLATE "C" PRIMARY KEY,
    owner_id    text NOT NULL,
    name        text NOT NULL,
    created_at  timestamptz NOT NULL
);
CREATE INDEX IF NOT EXISTS team_of_owner ON team (owner_id);

CREATE TABLE IF NOT EXISTS team_member (
    team_id     text COLLATE "C" NOT NULL REFERENCES team ON DELETE CASCADE,
    member      text COLLATE "C" NOT NULL,
    added_at    timestamptz NOT NULL,
    PRIMARY KEY (team_id, member)
);
CREATE INDEX IF NOT EXISTS team_of_member ON team_member (member);

CREATE TABLE IF NOT EXISTS person (
    identity_id text COLLATE "C" PRIMARY KEY,
    principals  text[] NOT NULL,
    seen_at     timestamptz NOT NULL DEFAULT now()
);

INSERT INTO share (share_id, kind, object_id, grantee, rank, granted_by, granted_at)
SELECT gen_random_uuid()::text, kind, object_id, 'identity ' || identity_id, 2, owner_id, granted_at
FROM access_grant JOIN (
    SELECT endpoint_id AS object_id, 'endpoint' AS kind, owner_id FROM endpoint
    UNION ALL SELECT function_id, 'function', owner_id FROM function
) AS shared USING (object_id)
ON CONFLICT DO NOTHING;
"""


def upgrade() -> None:
    """Add the tables, and a share for each grant."""
    op.execute(STEPS)
