"""Environments of tasks on a node: container runners, Python prefixes, packages that uv installs, templates."""
