"""Start of a sandbox whose local sockets have a network namespace of their own.

The network of a sandbox is the machine's, and with it the abstract names of local sockets. Any process of the machine
could connect to such a name, and pass descriptors of files that do not exist in the sandbox. So a filter stops
``socket(AF_UNIX, ...)``, and a server in another network namespace makes the socket (seccomp_unotify(2), "addfd"). A
socket keeps the namespace in which it was made. The arguments of the call are numbers, which a task cannot change
after the filter has seen them.

A program that stands alone: ``python -I -S sandbox.py FILTER BUBBLEWRAP ARGUMENT...`` starts the server below
bubblewrap, loads the filter, in hexadecimal digits, and becomes bubblewrap with the arguments. ``... sandbox.py
DESCRIPTOR`` is the server. It ends when no process with the filter is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import socket
import struct
import sys

_NOTIFICATION = struct.Struct("<QIIiIQ6Q")
"""``struct seccomp_notif``: id, thread, flags, number, architecture, instruction, arguments."""
_RESPONSE = struct.Struct("<QqiI")
"""``struct seccomp_notif_resp``: id, value, negative error, flags."""
_ADDED = struct.Struct("<QIIII")
"""``struct seccomp_notif_addfd``: id, flags, descriptor here, descriptor there, flags there."""
_RECEIVE, _SEND, _ADD = 0xC0502100, 0xC0182101, 0x40182103
"""SECCOMP_IOCTL_NOTIF_RECV, NOTIF_SEND and NOTIF_ADDFD."""
_ANSWERS = 1 << 1
"""SECCOMP_ADDFD_FLAG_SEND (Linux 5.14): the new descriptor is the result of the call."""
_SET_FILTER, _NEW_LISTENER = 1, 1 << 3
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_NO_NEW_PRIVS = 38
_MOST_DESCRIPTORS = 2**20
_NAMESPACES = ("--unshare-user", "--unshare-net", "--die-with-parent", "--ro-bind", "/", "/", "--")


def main(code: str, command: list[str]) -> None:
    """Become the command of bubblewrap, with the filter.

    :raises OSError: if the kernel refuses.
    """
    own, other = socket.socketpair()
    if os.fork() == 0:
        try:
            _be_server(command[0], other)
        finally:
            os._exit(127)
    other.close()
    if not own.recv(1):
        sys.exit(1)  # bubblewrap has said why
    listener = _load(bytes.fromhex(code))
    socket.send_fds(own, [b"."], [listener])
    own.close()
    os.close(listener)
    os.execv(command[0], command)  # noqa: S606


def _be_server(bubblewrap: str, control: socket.socket) -> None:
    os.setsid()  # a task can signal its own group, also from a process namespace
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(null, stream)
    control.set_inheritable(True)
    descriptor = control.fileno()
    for low, high in ((3, descriptor), (descriptor + 1, _MOST_DESCRIPTORS)):  # what only the command needs
        os.closerange(low, high)
    program = (sys.executable, "-I", "-S", __file__, str(descriptor))
    os.execv(bubblewrap, [bubblewrap, *_NAMESPACES, *program])  # noqa: S606


def _load(code: bytes) -> int:
    """Load a filter for this process and its descendants; the descriptor on which its calls are received."""
    array = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(code) // 8, ctypes.addressof(array))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    listener: int = libc.syscall(_SECCOMP[os.uname().machine], _SET_FILTER, _NEW_LISTENER, header)
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return listener


def serve(control: int) -> None:
    """Make the sockets that processes with the filter ask for, until there are no such processes."""
    with socket.socket(fileno=control) as connection:
        connection.send(b".")
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:  # the command has not begun
        return
    [listener] = descriptors
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        [(_, events)] = poll.poll()
        if events & select.POLLHUP:
            return
        buffer = bytearray(_NOTIFICATION.size)
        with contextlib.suppress(FileNotFoundError, InterruptedError):  # the caller was killed or interrupted
            fcntl.ioctl(listener, _RECEIVE, buffer)
            call, *_, family, kind, protocol = _NOTIFICATION.unpack(buffer)[:9]
            error = _make(
                listener, call, *(ctypes.c_int(each & 0xFFFF_FFFF).value for each in (family, kind, protocol))
            )
            if error:
                with contextlib.suppress(OSError):  # it was answered before a signal, or its caller was killed
                    fcntl.ioctl(listener, _SEND, _RESPONSE.pack(call, 0, -error, 0))


def _make(listener: int, call: int, family: int, kind: int, protocol: int) -> int:
    """Answer a call with a new socket; the error, if there is one."""
    if family != socket.AF_UNIX:  # sockets of a virtual machine's host
        return errno.EPERM
    try:
        with socket.socket(family, kind, protocol) as made:
            flags = os.O_CLOEXEC if kind & socket.SOCK_CLOEXEC else 0
            fcntl.ioctl(listener, _ADD, _ADDED.pack(call, _ANSWERS, made.fileno(), 0, flags))
    except FileNotFoundError:
        raise
    except OSError as error:
        return error.errno or errno.EACCES
    return 0


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(sys.argv[1], sys.argv[2:])
    else:
        serve(int(sys.argv[1]))
