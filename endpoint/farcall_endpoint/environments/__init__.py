"""Environments of tasks on a node: container runners, Python prefixes, packages that uv installs, templates.

What callers catch is here, because a manager without tasks in environments loads nothing else of this package.
"""


class EnvironmentLost(OSError):
    """The prepared files of an environment are gone, for example after a program has cleaned ``/tmp``."""


class NotLocated(Exception):
    """A location is being looked up, which is not done by the thread that wants to know."""
