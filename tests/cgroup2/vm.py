"""Virtual machine with cgroups of version 2 alone, and the tests of CPU shares in it: ``python -m tests.cgroup2.vm``.

QEMU emulates its processors, so that neither KVM nor root is needed; a program takes about ten times as long in it. Its
kernel is Debian's. Its files are those of this machine, over 9P, which it can read and not change: so it has the same
Python, packages and checkout. It has no network. ``.tools/cgroup2`` keeps what is downloaded, once.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_CHECKOUT: Final = Path(__file__).resolve().parents[2]
_DIRECTORY: Final = _CHECKOUT / ".tools" / "cgroup2"
_PROGRAMS: Final = ("qemu-system-x86_64", "busybox", "depmod", "modprobe", "apt-get", "dpkg-deb")
_PATH: Final = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])  # where Debian has some
_KERNEL: Final = "linux-image-amd64"
"""The name of the package that depends on the current one. The smaller cloud kernel has no 9P."""
_MODULES: Final = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
_LIMIT_S: Final = 1800.0
_CPUS: Final = 2
_PASSED: Final = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "LANG")

_INIT: Final = """\
#!/bin/busybox sh
export PATH=/bin
busybox mkdir -p /dev /host /new /root
busybox mount -t devtmpfs devtmpfs /dev
for module in /modules/*; do busybox insmod $module; done
busybox mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=1048576,cache=loose,access=any host /host ||
  exec busybox poweroff -f
busybox mount -t tmpfs tmpfs /new
busybox mkdir /new/changes /new/work
busybox mount -t overlay -o lowerdir=/host,upperdir=/new/changes,workdir=/new/work overlay /root
busybox mount -t proc proc /root/proc
busybox mount -t sysfs sysfs /root/sys
busybox mount -t devtmpfs devtmpfs /root/dev
busybox mkdir -p /root/dev/shm /root/dev/pts
busybox mount -t tmpfs -o mode=1777 tmpfs /root/dev/shm
busybox mount -t devpts devpts /root/dev/pts
busybox mount -t cgroup2 -o nsdelegate cgroup2 /root/sys/fs/cgroup
busybox ip link set lo up
busybox chroot /root /bin/sh -c {command}
busybox echo $? > /dev/ttyS1
busybox poweroff -f
"""


def make_kernel(directory: Path = _DIRECTORY) -> None:
    """Download Debian's kernel if it is missing: 70 MB, of which 10 stay: ``vmlinuz``, and ``modules`` in their order.

    :raises subprocess.CalledProcessError: if it fails; apt-get has written why.
    """
    if directory.is_dir():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".cgroup2-", dir=directory.parent) as unfinished:
        root = Path(unfinished)
        depends = _output("apt-cache", "depends", "--important", _KERNEL)
        package = next(line.split()[-1] for line in depends.splitlines() if "Depends: linux-image-" in line)
        _output("apt-get", "download", "--quiet", "-o", "APT::Sandbox::User=root", package, cwd=root)
        tree = root / "tree"
        _output("dpkg-deb", "--extract", str(next(root.glob("*.deb"))), str(tree))
        [version] = (path.name for path in (tree / "lib" / "modules").iterdir())
        _output("depmod", "--basedir", str(tree), version)
        made = root / "made"
        (made / "modules").mkdir(parents=True)
        shutil.copy(tree / "boot" / f"vmlinuz-{version}", made / "vmlinuz")
        options = ("--dirname", str(tree), "--set-version", version, "--show-depends", "--all")
        lines = _output("modprobe", *options, *_MODULES).splitlines()
        for number, path in enumerate(dict.fromkeys(line.split()[1] for line in lines if line.startswith("insmod"))):
            shutil.copy(path, made / "modules" / f"{number:02}-{Path(path).name}")
        made.rename(directory)


def run(command: list[str], *, directory: Path = _DIRECTORY) -> int:
    """Run a command in a new machine, as root, in this checkout; its exit status, or 124 if it takes too long."""
    with tempfile.TemporaryDirectory() as temporary:
        initramfs, status = Path(temporary) / "initramfs", Path(temporary) / "status"
        initramfs.write_bytes(_initramfs(directory, command))
        machine = subprocess.Popen(
            _qemu(directory / "vmlinuz", initramfs, status),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "PATH": _PATH},
        )
        timer = threading.Timer(_LIMIT_S, machine.kill)
        timer.start()
        try:
            assert machine.stdout is not None
            for line in machine.stdout:
                print(line.rstrip("\r\n"), flush=True)
        finally:
            is_late = not timer.is_alive()
            timer.cancel()
            machine.kill()
            machine.wait()
        if is_late:
            print(f"The virtual machine was stopped after {_LIMIT_S:g} s.")
            return 124
        text = status.read_text().strip() if status.exists() else ""
        if not text.isdigit():
            print("The virtual machine has ended before the tests.")
        return int(text) if text.isdigit() else 1


def _qemu(kernel: Path, initramfs: Path, status: Path) -> list[str]:
    host = "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"
    return [
        *("qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", str(_CPUS), "-m", "2G"),
        *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
        *("-serial", "stdio", "-serial", f"file:{status}", "-virtfs", host),
        *("-kernel", str(kernel), "-initrd", str(initramfs)),
        *("-append", "console=ttyS0 quiet panic=-1 cgroup_no_v1=all"),
    ]


def _initramfs(directory: Path, command: list[str]) -> bytes:
    """A cpio archive of the form "newc": the files with which the kernel starts."""
    variables = {name: os.environ[name] for name in _PASSED if name in os.environ}
    line = _shell(["env", "-i", *_assignments(variables), *command])
    busybox = shutil.which("busybox", path=_PATH)
    assert busybox is not None
    files = {
        "init": _INIT.format(command=shlex.quote(f"cd {shlex.quote(str(_CHECKOUT))} && {line}")).encode(),
        "bin/busybox": Path(busybox).read_bytes(),
        **{f"modules/{path.name}": path.read_bytes() for path in sorted((directory / "modules").iterdir())},
    }
    entries = [(name, 0o040755, b"") for name in ("bin", "modules")]
    entries += [(name, 0o100755, content) for name, content in files.items()]
    return b"".join(_entry(*entry) for entry in [*entries, ("TRAILER!!!", 0, b"")])


def _entry(name: str, mode: int, content: bytes) -> bytes:
    # inode, mode, user, group, links, time, size, device (2), special device (2), size of the name, checksum
    fields = (0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
    return _padded(head) + _padded(content)


def _padded(part: bytes) -> bytes:
    return part + bytes(-len(part) % 4)


def _assignments(variables: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in {**variables, "HOME": "/root", "PYTHONDONTWRITEBYTECODE": "1"}.items()]


def _shell(command: list[str]) -> str:
    return " ".join(map(shlex.quote, command))


def _output(*command: str, cwd: Path | None = None) -> str:
    environment = {**os.environ, "PATH": _PATH}
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=cwd, env=environment).stdout


def main() -> int:
    if platform.machine() != "x86_64":
        print("The virtual machine has the processor and the files of this machine: only x86_64 is supported.")
        return 1
    missing = [program for program in _PROGRAMS if shutil.which(program, path=_PATH) is None]
    if missing:
        print(f"There is no {', '.join(missing)}: sudo make setup-system")
        return 1
    make_kernel()
    return run([sys.executable, "-m", "tests.cgroup2.guest", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
