"""An ordinary user of a node, for tests of containers that run as root: with ids for a user namespace, a home and a
runtime directory of its own. Nothing of the machine is changed: what the user sees is mounted in a namespace that ends
with the test.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from farcall_endpoint.host import process_reaper
from tests.support.apptainer_root import APPTAINER
from tests.support.images import DIRECTORY, image
from tests.waiting import wait_until

REPOSITORY: Final = Path(__file__).resolve().parents[2]

# Users of tests that run at the same time have different ids, by the process that made them.
_FIRST_ID, _FIRST_SUB_ID, _SUB_IDS = 100_000, 1_000_000, 5_000
_numbers = itertools.count(os.getpid() % 30_000 * 4)

# $1: the directory of the test, $2: Python's prefix, $3: the repository, $4: its packages, $5: the images.
_COMMON: Final = r"""
set -eu
for each in "python $2" "repository $3" "packages $4" "images $5"; do
    mkdir "$1/${each%% *}"; mount --rbind "${each#* }" "$1/${each%% *}"
done
"""
# crun refuses a node where one controller is in version 2 of control groups, and others in version 1.
_NODE: Final = (
    _COMMON
    + r"""
for each in passwd group subuid subgid; do mount --bind "$1/etc/$each" "/etc/$each"; done
if grep -q cgroup2 /proc/self/mounts && ! test -e /sys/fs/cgroup/cgroup.controllers; then
    mkdir "$1/hugetlb"
    mount -t cgroup -o hugetlb hugetlb "$1/hugetlb" || true
fi
echo ready
exec cat
"""
)
# $6: the root. A namespace of a user is not allowed below chroot. Devices are new ones: anyone may use this /dev/fuse.
_OTHER_ROOT: Final = (
    _COMMON
    + r"""
mount --rbind "$6" "$6"
cd "$6"
mount -t tmpfs -o mode=755 dev dev
for each in null zero full random urandom tty fuse; do
    mknod -m 666 "dev/$each" c $(stat -c '0x%t 0x%T' "/dev/$each")
done
mkdir dev/pts dev/shm
mount --rbind /dev/pts dev/pts
mount -t tmpfs -o mode=1777 shm dev/shm
for each in ptmx:pts/ptmx fd:/proc/self/fd stdin:fd/0 stdout:fd/1 stderr:fd/2; do
    ln -s "${each#*:}" "dev/${each%:*}"
done
mount --rbind /proc proc
mount --rbind /sys sys
mount -t tmpfs -o mode=1777 tmp tmp
mkdir -p ".$1"
mount --rbind "$1" ".$1"
for each in passwd group; do mount --bind "$1/etc/$each" "etc/$each"; done
pivot_root . .old
umount -l /.old
echo ready
exec cat
"""
)


class ContainerUser:
    """An ordinary user, in a view of the node of its own.

    :ivar directory: that of the test; the user sees it in the same place, and owns ``home`` in it.
    :ivar python: an interpreter that the user can run, with this project.
    :ivar images: as the user sees them.
    """

    def __init__(self, directory: Path, *, root: Path | None = None) -> None:
        self.directory = directory
        number = next(_numbers)
        self.uid = _FIRST_ID + number
        self._sub_ids = range(_FIRST_SUB_ID + number * _SUB_IDS, _FIRST_SUB_ID + (number + 1) * _SUB_IDS)
        self.home, self.images = directory / "home", directory / "images"
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        self.python = str(directory / "python" / "bin" / version)
        self._environment = {
            "HOME": str(self.home),
            "USER": "scientist",
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin",
            "LANG": "C.UTF-8",
            "XDG_RUNTIME_DIR": str(directory / "run"),
            "STORAGE_DRIVER": "overlay",
            "PYTHONPATH": os.pathsep.join(
                str(directory / name) for name in ("repository/endpoint", "repository/common", "packages")
            ),
            "PYTHONDONTWRITEBYTECODE": "1",
            "LD_LIBRARY_PATH": str(directory / "python" / "lib"),
        }
        self._write_users()
        packages = next(path for path in sys.path if path.endswith("site-packages"))
        script = _NODE if root is None else _OTHER_ROOT
        arguments = [directory, sys.base_prefix, REPOSITORY, packages, DIRECTORY, *([root] if root else [])]
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *map(str, arguments)]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n"

    def _write_users(self) -> None:
        for name in ("etc", "home", "run"):
            (self.directory / name).mkdir()
        for name in ("home", "run"):
            os.chown(self.directory / name, self.uid, self.uid)
            (self.directory / name).chmod(0o700)
        etc = self.directory / "etc"
        (etc / "passwd").write_text(
            f"root:x:0:0:root:/root:/bin/sh\nscientist:x:{self.uid}:{self.uid}::{self.home}:/bin/sh\n"
        )
        (etc / "group").write_text(f"root:x:0:\nscientist:x:{self.uid}:\n")
        for name in ("subuid", "subgid"):
            (etc / name).write_text(f"scientist:{self._sub_ids[0]}:{_SUB_IDS}\n")

    def command(self, command: Sequence[str]) -> list[str]:
        """A command, as the user; the process that it is started in becomes that of the command."""
        ids = [f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]
        return [*self._enter(), "setpriv", *ids, *command]

    def _enter(self) -> list[str]:
        return ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", f"--wdns={self.directory}"]

    def start(
        self,
        command: Sequence[str],
        variables: Mapping[str, str] | None = None,
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.DEVNULL,
        stderr: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """Start a command as the user."""
        return subprocess.Popen(
            self.command(command),
            env={**self._environment, **(variables or {})},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

    def run(
        self, command: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as the user; ``stdout`` has both streams."""
        return subprocess.run(
            self.command(command),
            env={**self._environment, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def variables_of_project(self) -> dict[str, str]:
        """For programs of the whole project in :attr:`python`, whose system may lack what its modules need."""
        target = self.directory / "libraries"
        if not target.is_dir():
            _copy_libraries(target)
        paths = ("repository/endpoint", "repository/common", "repository/sdk", "repository", "packages")
        return {
            "PYTHONPATH": os.pathsep.join(str(self.directory / path) for path in paths),
            "LD_LIBRARY_PATH": f"{self.directory}/python/lib:{target}",
        }

    def directory_of(self, name: str) -> Path:
        """A new directory of the user."""
        path = self.home / name
        path.mkdir(parents=True)
        os.chown(path, self.uid, self.uid)
        return path

    def small_disk(self, name: str, *, size: str) -> Path:
        """A new directory of the user on a file system of so many bytes, as ``mount`` takes them; in its view only."""
        path = self.directory_of(name)
        options = f"size={size},mode=755,uid={self.uid},gid={self.uid}"
        subprocess.run([*self._enter(), "mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
        return path

    @contextlib.contextmanager
    def without_fuse(self) -> Iterator[None]:
        """The user may not open ``/dev/fuse`` meanwhile; for users that have devices of their own."""
        subprocess.run([*self._enter(), "chmod", "600", "/dev/fuse"], check=True)
        try:
            yield
        finally:
            subprocess.run([*self._enter(), "chmod", "666", "/dev/fuse"], check=True)

    def run_without_namespaces(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in a user namespace in which no others can be made."""
        script = 'echo 0 >/proc/sys/user/max_user_namespaces && exec setpriv --inh-caps=-all --ambient-caps=-all "$@"'
        command = ["unshare", "--user", "--map-current-user", "--keep-caps", "sh", "-c", script, "sh", *command]
        runtime = self.directory_of("runtime")  # with its usual one, Podman would join a namespace that it has
        return self.run(command, {"XDG_RUNTIME_DIR": str(runtime)})

    def processes(self) -> dict[int, str]:
        """All processes of the user and of the other ids of its namespaces, without Podman's one for all containers."""
        found = {}
        for pid, process in process_reaper.read_processes().items():
            with contextlib.suppress(OSError):
                owner = Path(f"/proc/{pid}").stat().st_uid
                if (owner == self.uid or owner in self._sub_ids) and not process.is_zombie:
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        pause = self.directory / "run/libpod/tmp/pause.pid"
        if pause.exists():
            found.pop(int(pause.read_text() or "0"), None)
        return found

    def mounts(self) -> list[str]:
        """The mounts of the user's view."""
        return sorted(Path(f"/proc/{self._holder.pid}/mounts").read_text().splitlines())

    def close(self) -> None:
        """End all processes of the user, and its view."""
        (self.directory / "run/libpod/tmp/pause.pid").unlink(missing_ok=True)
        for _ in range(100):
            if not (left := self.processes()):
                break
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self.processes())
        with self._holder:
            assert self._holder.stdin is not None
            self._holder.stdin.close()
            self._holder.wait()


def _copy_libraries(target: Path) -> None:
    """What this Python's modules need of the system, but for the C library."""
    target.mkdir()
    modules = map(str, Path(sysconfig.get_paths()["stdlib"]).glob("lib-dynload/*.so"))
    found = subprocess.run(["ldd", *modules], capture_output=True, text=True, check=True).stdout
    for path in {line.split()[2] for line in found.splitlines() if "=> /" in line}:
        if not Path(path).name.startswith(("libc.", "libm.", "libpthread.", "libdl.")):
            shutil.copy(path, target)


@contextlib.contextmanager
def _user(root: Path | None) -> Iterator[ContainerUser]:
    if os.geteuid() != 0:
        pytest.skip("only root can make an ordinary user for a test")
    directory = Path(tempfile.mkdtemp(prefix="farcall-user-"))  # a short path: sockets lie below it
    directory.chmod(0o755)
    try:
        user = ContainerUser(directory, root=root)
        with contextlib.closing(user):
            yield user
    finally:
        shutil.rmtree(directory)


def ordinary_user() -> contextlib.AbstractContextManager[ContainerUser]:
    """A user on this node."""
    return _user(None)


def podman_user() -> contextlib.AbstractContextManager[ContainerUser]:
    """A user of rootless Podman on this node."""
    for program in ("podman", "crun", "newuidmap", "nsenter", "setpriv"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: sudo make setup-system")
    return ordinary_user()


def apptainer_user() -> contextlib.AbstractContextManager[ContainerUser]:
    """A user of Apptainer, in the root of Debian sid."""
    return _user(image(APPTAINER))
