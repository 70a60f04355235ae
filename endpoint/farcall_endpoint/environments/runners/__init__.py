"""Runners: one for each technology of environments."""
