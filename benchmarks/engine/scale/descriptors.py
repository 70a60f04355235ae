"""A socket is several descriptors, and a shell often allows 1,024 of them."""

from __future__ import annotations

import resource


def allow_descriptors(count: int) -> None:
    """Let this process, and those that it starts, have so many descriptors.

    :raises OSError: if the machine's hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise OSError(f"{count} descriptors are needed and {hard} allowed; see 'ulimit -H -n'")
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
