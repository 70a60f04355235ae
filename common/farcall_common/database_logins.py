"""Database logins, names and shares: each program's role has two logins, of which one is in use. A rotation changes to
the other.

Two logins, because the password of one cannot change in the database and in Secrets Manager at the same moment.
"""

from __future__ import annotations

from typing import Final

from farcall_common.errors import ConfigurationError

#: Share of each role in the connections for programs, in percent; and its minimum.
_SHARES: Final = {"farcall_api": 60, "farcall_forwarder": 30, "farcall_reconciler": 5}
_LEAST: Final = 4
#: Connections reserved for the server, the migrator and an administrator.
_KEPT: Final = 10

#: The programs' roles.
ROLES: Final = tuple(_SHARES)
_SECOND: Final = "_b"


def logins(role: str) -> tuple[str, str]:
    """The two logins of a role. The first has the role's name."""
    return role, f"{role}{_SECOND}"


def role_of(login: str) -> str:
    """The role of a login.

    :raises ConfigurationError: if no program has it.
    """
    if (role := login.removesuffix(_SECOND)) not in ROLES:
        raise ConfigurationError(f"Unknown database role {login!r}; known roles are {', '.join(ROLES)}.")
    return role


def other_login(login: str) -> str:
    """The second login of the same role.

    :raises ConfigurationError: if no program has the role.
    """
    first, second = logins(role_of(login))
    return second if login == first else first


def connection_limit(login: str, max_connections: int) -> int:
    """How many connections a login may have on a server that permits so many.

    :raises ConfigurationError: for a role that no program has.
    """
    return max(_LEAST, (max_connections - _KEPT) * _SHARES[role_of(login)] // 100)
