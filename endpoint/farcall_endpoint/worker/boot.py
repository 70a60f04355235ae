"""Boot of a worker in an environment: a manager sends variables and descriptors through a Unix socket.

Inheritance does not work here. A container's runner may close descriptors and change variables, and a fork of a
template inherits from the template. So the program in the environment connects to the manager (see
:mod:`farcall_endpoint.worker.__main__`), and receives one message: a :class:`Boot`, and the four descriptors of
:class:`Descriptors`.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Final, NamedTuple

import msgspec

from farcall_endpoint.worker.environment import set_all

SECRET: Final = "k"  # noqa: S105 - a name of a file
"""File in the socket's directory with the secret that the program sends first. Other programs cannot read it."""
BEGUN: Final = b"begun"
"""Message of the program when it has become the worker. Later failures belong to its tasks."""
_MOST_BYTES: Final = 2**20
"""Maximum size of a message. Variables and paths of a worker take a few kilobytes."""
_CONNECT_LIMIT_S: Final = 600.0
"""Seconds to wait for the manager's answer. A slower manager is gone, or has dropped the worker."""
MOST_DESCRIPTORS: Final = 4
"""Maximum number of descriptors in a message."""


class Descriptors(NamedTuple):
    """The worker's end of its channel, its end of the claims, and the files for its standard output and error."""

    channel: int
    claims: int
    stdout: int
    stderr: int


class Boot(msgspec.Struct, frozen=True, omit_defaults=True):
    """Setup of a worker.

    :param variables: the worker's environment variables.
    :param merged: whether existing variables, such as those of an image, stay where ``variables`` does not name them.
    :param directory: the worker's working directory, as seen in its environment.
    :param namespaces: whether a fork of a template must have mount, process, IPC and host name namespaces of its own.
    """

    variables: dict[str, str]
    directory: str
    merged: bool = False
    namespaces: bool = False


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Boot).decode


def listen(path: str) -> socket.socket:
    """A socket for one connection, which does not block. Each of its messages is one packet.

    :raises OSError: for a path that exists, or is longer than socket names can be.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        listener.bind(path)
        listener.listen(1)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(path: str) -> socket.socket:
    """Connect to the manager that started this program, and send the secret.

    :raises OSError: if it is gone.
    """
    with open(os.path.join(os.path.dirname(path), SECRET), "rb") as file:  # noqa: PTH118, PTH120, PTH123
        secret = file.read()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    connection.settimeout(_CONNECT_LIMIT_S)
    try:
        connection.connect(path)
        connection.sendall(secret)
    except BaseException:
        connection.close()
        raise
    return connection


def send_boot(connection: socket.socket, boot: Boot, descriptors: Descriptors) -> None:
    """Send a boot message; the descriptors stay open here.

    :raises OSError: if the other side is gone, or does not read.
    """
    socket.send_fds(connection, [_encode(boot)], list(descriptors))


def receive_boot(connection: socket.socket) -> tuple[Boot, Descriptors] | None:
    """The next boot message; None if the manager is gone.

    :raises ValueError: for bytes that are none.
    """
    data, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, MOST_DESCRIPTORS)
    if not data:
        return None
    if len(descriptors) != MOST_DESCRIPTORS:
        raise ValueError(f"{len(descriptors)} descriptors instead of {MOST_DESCRIPTORS}")
    return _decode(data), Descriptors(*descriptors)


def take_on(boot: Boot, descriptors: Descriptors) -> tuple[int, int]:
    """Become what a boot message says; returns the descriptors of channel and claims.

    :raises OSError: if the working directory does not exist in the environment.
    """
    set_all(boot.variables, merged=boot.merged)
    os.chdir(boot.directory)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor, standard in ((descriptors.stdout, 1), (descriptors.stderr, 2)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    return descriptors.channel, descriptors.claims
