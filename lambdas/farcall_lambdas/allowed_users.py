"""Authorization: who may use a deployment, by identity, verified domain and group. By default no one may."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Final

from farcall_common.errors import ConfigurationError, FarcallError, UserNotAllowed
from farcall_lambdas.identity import Identity, same_case

#: Among the identities: everybody whose token the identity provider accepts.
EVERYONE: Final = "*"

#: In ``verified`` of an identity that may use the deployment only because of a group.
BY_GROUP: Final = "admitted by a group"
#: In ``verified`` of an identity whose other groups are not known.
SOME_GROUPS: Final = "some groups"

#: Characters of a user name in an error.
_NAME_CHARACTERS: Final = 100
#: Bytes of groups in an identity. API Gateway takes 10 KB of headers, and a credential writes this in base64.
_GROUP_BYTES: Final = 4096
#: What a credential writes around the name of each.
_ENTRY_BYTES: Final = 12


@dataclasses.dataclass(frozen=True)
class AllowedUsers:
    """Users of the deployment: people with one of ``identities`` or ``admins`` (identity ids, or names that
    the identity provider has verified), with a verified name in one of ``domains``, or in one of ``groups``.

    Identities and domains are compared without regard to case, groups exactly. With ``reads_groups``, people's groups
    are read even if ``groups`` is empty: objects can be shared with groups.
    """

    identities: Set[str] = frozenset()
    domains: Set[str] = frozenset()
    groups: Set[str] = frozenset()
    admins: Set[str] = frozenset()
    reads_groups: bool = False

    def __post_init__(self) -> None:
        for field in ("identities", "domains", "admins"):
            object.__setattr__(self, field, frozenset(map(same_case, getattr(self, field))))
        if EVERYONE in self.domains | self.groups | self.admins:
            raise ConfigurationError(f"{EVERYONE!r}, everyone, is possible only among the allowed identities.")

    @classmethod
    def everyone(cls) -> AllowedUsers:
        """Everyone with a valid token."""
        return cls(identities=frozenset({EVERYONE}))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> AllowedUsers:
        """Read FARCALL_ALLOWED_IDENTITIES, FARCALL_ALLOWED_DOMAINS, FARCALL_ALLOWED_GROUPS and FARCALL_ADMINS, each a
        list with commas."""

        def read(name: str) -> frozenset[str]:
            return frozenset(filter(None, (part.strip() for part in environ.get(name, "").split(","))))

        return cls(
            identities=read("FARCALL_ALLOWED_IDENTITIES"),
            domains=read("FARCALL_ALLOWED_DOMAINS"),
            groups=read("FARCALL_ALLOWED_GROUPS"),
            admins=read("FARCALL_ADMINS"),
            reads_groups=environ.get("FARCALL_READ_GROUPS") == "true",
        )

    def require(
        self,
        identity: Identity,
        *,
        names: Iterable[str] = (),
        domains: Iterable[str] = (),
        groups: Callable[[], Iterable[str]] = tuple,
    ) -> Identity:
        """The identity, with ``is_admin`` and ``verified`` set, if it may use the deployment.

        ``names`` and ``domains`` are those that the identity provider has verified: what a user can choose must not be
        among them. A name belongs to the domain after its last ``@``. ``groups`` is called if the deployment names
        or reads groups. All of its answer is in ``verified``, also if something else decided: a credential of an
        endpoint is judged by it after the deployment's lists have changed. Of very many groups some are left out, those
        that the deployment names last. If some are, or ``groups`` fails, ``verified`` has SOME_GROUPS.

        :raises UserNotAllowed: if it may not.
        """
        known_names = {same_case(name) for name in names if name}
        known = known_names | set(map(same_case, identity.identity_set))
        own_domains = set(map(same_case, domains))
        known_domains = own_domains | {name.rpartition("@")[2] for name in known_names if "@" in name}
        is_admin = bool(known & self.admins)
        allowed = (
            is_admin
            or EVERYONE in self.identities
            or bool(known & self.identities)
            or bool(known_domains & self.domains)
        )
        found_groups: Set[str] = frozenset()
        is_whole = True
        if self.groups or self.reads_groups:
            try:
                found_groups = frozenset(groups())
            except FarcallError:
                is_whole = False
                if not allowed:
                    raise
        if not allowed and not found_groups & self.groups:
            name = "".join(filter(str.isprintable, identity.username))[:_NAME_CHARACTERS]
            raise UserNotAllowed(f"{name} (identity {identity.identity_id}) may not use this deployment.")
        verified = {f"name {each}" for each in known_names} | {f"domain {each}" for each in own_domains}
        shown = set(self._first_groups(found_groups))
        verified |= {f"group {each}" for each in shown}
        if not allowed:
            verified.add(BY_GROUP)
        if not is_whole or shown != found_groups:
            verified.add(SOME_GROUPS)
        return dataclasses.replace(identity, is_admin=is_admin, verified=frozenset(verified))

    def _first_groups(self, groups: Set[str]) -> Iterator[str]:
        """The groups that fit in a credential, those that the deployment names first."""
        room = _GROUP_BYTES
        for group in sorted(groups, key=lambda group: (group not in self.groups, group)):
            room -= len(json.dumps(group)) + _ENTRY_BYTES
            if room < 0:
                return
            yield group

    def require_again(self, identity: Identity) -> Identity:
        """An identity that :meth:`require` returned at an earlier time, if it may use the deployment now.

        :raises UserNotAllowed: if it may not.
        """

        def of(kind: str) -> list[str]:
            return [each.removeprefix(f"{kind} ") for each in identity.verified if each.startswith(f"{kind} ")]

        return self.require(identity, names=of("name"), domains=of("domain"), groups=lambda: of("group"))
