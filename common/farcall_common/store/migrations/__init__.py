"""The database schema, as Alembic revisions. Only ever added to: a released revision does not change."""
