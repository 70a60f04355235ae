"""Readable directories that are writable for other accounts of the machine: servers of these accounts could pass files
to tasks of other submitters through sockets there."""

from __future__ import annotations

import grp
import itertools
import os
import pwd
import stat
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

_MOST_ENTRIES: Final = 2000
"""Entries of a directory that are looked at."""
_ACL: Final = "system.posix_acl_access"
_ACL_HEAD: Final = struct.Struct("<I")
_ACL_ENTRY: Final = struct.Struct("<HHI")
_ACL_VERSION: Final = 2
_OF_USER, _OF_OWNING_GROUP, _OF_GROUP, _MASK = 0x02, 0x04, 0x08, 0x10
_WRITE: Final = 2


class Acl(NamedTuple):
    """Writers in a POSIX access control list: ids of users and groups, and whether the owning group may write."""

    users: tuple[int, ...]
    groups: tuple[int, ...]
    owning_group: bool


def read_acl(value: bytes) -> Acl:
    """Decode the extended attribute of an access control list. Pure.

    :raises ValueError: for bytes of another format.
    """
    if len(value) < _ACL_HEAD.size or (len(value) - _ACL_HEAD.size) % _ACL_ENTRY.size:
        raise ValueError("not an access control list")
    if _ACL_HEAD.unpack_from(value)[0] != _ACL_VERSION:
        raise ValueError("an access control list of another version")
    entries = list(_ACL_ENTRY.iter_unpack(value[_ACL_HEAD.size :]))
    mask = next((rights for tag, rights, _ in entries if tag == _MASK), 7)
    found = [(tag, who) for tag, rights, who in entries if rights & mask & _WRITE]
    return Acl(
        tuple([who for tag, who in found if tag == _OF_USER]),
        tuple([who for tag, who in found if tag == _OF_GROUP]),
        any(tag == _OF_OWNING_GROUP for tag, _ in found),
    )


def writable_by_others(paths: Iterable[str], *, user: int) -> dict[str, str]:
    """Reasons why other accounts than root and the endpoint's may write, by path: to a readable directory, to those in
    it, or to a parent, where they could replace it. Nothing further below is looked at.

    :param paths: absolute, of files and directories.
    :param user: the id of the endpoint's account.
    """
    found: dict[str, str] = {}
    own = dict.fromkeys(paths)
    parents = dict.fromkeys(str(parent) for path in own for parent in Path(path).parents)
    inner = dict.fromkeys(each for path in own for each in _directories_in(path))
    checked = {**dict.fromkeys(parents, True), **dict.fromkeys(inner, False), **dict.fromkeys(own, False)}
    for path, is_parent in checked.items():
        if reasons := list(_reasons(path, user=user, is_parent=is_parent)):
            found[path] = ", ".join(reasons)
    return found


def _directories_in(path: str) -> Iterator[str]:
    """The directories in a directory that this account may enter; none where it may not read."""
    try:
        with os.scandir(path) as entries:
            for entry in itertools.islice(entries, _MOST_ENTRIES):
                if entry.is_dir(follow_symlinks=False) and os.access(entry.path, os.X_OK):
                    yield entry.path
    except OSError:
        return


def _reasons(path: str, *, user: int, is_parent: bool) -> Iterator[str]:
    try:
        found = os.stat(path)  # noqa: PTH116 - text all along
    except OSError:
        return
    if found.st_uid not in (0, user):
        yield f"belongs to {_user(found.st_uid)}"
    if is_parent and found.st_mode & stat.S_ISVTX:  # no other account can replace what is in it
        return
    acl = _acl_of(path)
    if found.st_mode & stat.S_IWOTH:
        yield "writable for all"
    of_group = bool(found.st_mode & stat.S_IWGRP) if acl is None else acl.owning_group
    groups = [*([found.st_gid] if of_group else []), *(() if acl is None else acl.groups)]
    for group in groups:
        if _has_others(group, user=user):
            yield f"writable for the group {_group(group)}"
    for each in () if acl is None else acl.users:
        if each not in (0, user):
            yield f"writable for {_user(each)}"


def _acl_of(path: str) -> Acl | None:
    """None where there is none, or where the file system has none of POSIX."""
    try:
        return read_acl(os.getxattr(path, _ACL))
    except (OSError, ValueError):
        return None


def _has_others(group: int, *, user: int) -> bool:
    """Whether accounts other than root and this one are in a group, as far as it lists members: not in root's group,
    nor in the group of this account's own name."""
    try:
        members = set(grp.getgrgid(group).gr_mem)
    except KeyError:
        return group != 0
    names = {"root", _user(user)}
    return bool(members - names) or (group != 0 and _group(group) not in names and _is_primary(group, user=user))


def _is_primary(group: int, *, user: int) -> bool:
    """Whether a group is the primary one of another account that this machine itself knows."""
    try:
        lines = Path("/etc/passwd").read_text(errors="replace").splitlines()
    except OSError:
        return False
    fields = [line.split(":") for line in lines]
    return any(len(each) > 3 and each[3] == str(group) and each[2] not in ("0", str(user)) for each in fields)


def _user(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


def _group(group: int) -> str:
    try:
        return grp.getgrgid(group).gr_name
    except KeyError:
        return str(group)
