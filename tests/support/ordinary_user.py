"""Commands as an ordinary user, in tests that root runs."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

USER: Final = 65534
"""The unprivileged account of Unix: no files, no privileges, no home."""
_CHECKOUT: Final = Path(__file__).parents[2]
_UNSHARE: Final = shutil.which("unshare") or "unshare"
"""A test may change PATH."""


def as_ordinary_user(command: Iterable[str], *, reachable: Iterable[Path] = ()) -> list[str]:
    """A command that becomes the given one, as an ordinary user, if root runs it.

    A checkout or a test's directory may lie below a directory of root alone. So the command has a mount namespace in
    which what leads to the ``reachable`` paths, to this Python and to the checkout, is open.
    """
    command = list(command)
    if os.geteuid() != 0:
        return command
    closed: dict[Path, list[Path]] = {}
    for path in (Path(sys.prefix), Path(sys.base_prefix), _CHECKOUT, *reachable):
        for each in dict.fromkeys((path, path.resolve())):
            above = next((up for up in reversed(each.parents) if not up.stat().st_mode & 0o001), None)
            if above is not None:
                closed.setdefault(above, []).append(each)
    lines = ["set -e", "mount -t tmpfs farcall /mnt"]
    paths_of_all = dict.fromkeys(path for paths in closed.values() for path in paths)
    places = {path: f"/mnt/{number}" for number, path in enumerate(paths_of_all)}
    for path, place in places.items():
        lines += [f"mkdir {place}", f"mount --rbind {shlex.quote(str(path))} {place}"]
    for above, paths in closed.items():
        lines += [f"mount -t tmpfs -o mode=755 farcall {shlex.quote(str(above))}"]
        for path in sorted(set(paths), key=lambda each: each.parts):
            quoted = shlex.quote(str(path))
            lines += [f"mkdir -p {quoted}", f"mount --rbind {places[path]} {quoted}"]
    lines += ["umount -R -l /mnt", f'exec setpriv --reuid {USER} --regid {USER} --clear-groups "$@"']
    return [_UNSHARE, "--mount", "--propagation", "slave", "sh", "-c", "\n".join(lines), "sh", *command]
