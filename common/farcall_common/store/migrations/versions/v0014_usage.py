"""Usage of each day. ``usage_part`` has a row for each batch of results, until the reconciler adds it to ``usage``: two
forwarders never wait for the same row. ``worker_share`` is what each task has on an
endpoint, ``running_limit`` what allowances give submitters in its queue."""

from __future__ import annotations

from alembic import op

from farcall_common.store.migrations import create_index

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

COLUMNS = """
    day          date NOT NULL,
    owner_id     text COLLATE "C" NOT NULL,
    function_id  text COLLATE "C" NOT NULL,
    endpoint_id  text COLLATE "C" NOT NULL,
    account      text COLLATE "C" NOT NULL,
    tasks        bigint NOT NULL,
    failed       bigint NOT NULL,
    wall_s       double precision NOT NULL,
    core_s       double precision NOT NULL,
    gpu_s        double precision NOT NULL
"""

STEPS = f"""
ALTER TABLE endpoint ADD COLUMN IF NOT EXISTS worker_share json NOT NULL DEFAULT '{{}}';
CREATE TABLE IF NOT EXISTS usage ({COLUMNS}, PRIMARY KEY (owner_id, day, endpoint_id, function_id, account));
CREATE TABLE IF NOT EXISTS usage_part (
    part_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, {COLUMNS}
);
CREATE TABLE IF NOT EXISTS running_limit (
    endpoint_id  text COLLATE "C" NOT NULL REFERENCES endpoint ON DELETE CASCADE,
    owner_id     text COLLATE "C" NOT NULL,
    max_running  integer,
    weight       integer,
    PRIMARY KEY (endpoint_id, owner_id)
);
"""


def upgrade() -> None:
    """Add the tables."""
    op.execute(STEPS)
    create_index("usage_of_endpoint", "usage (endpoint_id, day)")
    create_index("usage_of_day", "usage (day)")
