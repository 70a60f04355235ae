"""Alembic's entry: runs the revisions on the connection that :mod:`farcall_common.store.migrate` opened."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
