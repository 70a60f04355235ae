"""Functions that workers run, and the packets that carry them. Each imports what it needs, as a user's function does.

LinPack, MatMul, Chameleon and pyaes do what those of FunctionBench do, and return a number that depends on the result.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from farcall_common.payload import Serializer
from farcall_common.task_options import TaskOptions
from farcall_endpoint.contracts.manager_worker import Order, Run


def first_line() -> float:
    """When the function could begin, in monotonic seconds."""
    import time

    import numpy  # noqa: F401
    import pandas  # noqa: F401

    return time.monotonic()


def use_pandas() -> float:
    """A small calculation."""
    import numpy
    import pandas

    return float(pandas.DataFrame({"a": numpy.arange(1000)}).a.sum())


def nothing() -> float:
    """Nothing that needs an import."""
    return 0.0


def linpack() -> float:
    """Solve 200 linear equations."""
    import numpy

    random = numpy.random.default_rng(7)
    matrix = random.random((200, 200)) - 0.5
    solution = numpy.linalg.solve(matrix, random.random(200))
    return float(round(solution.sum(), 6))


def matmul() -> float:
    """Multiply two matrices of 200 rows and columns."""
    import numpy

    random = numpy.random.default_rng(7)
    product = random.random((200, 200)) @ random.random((200, 200))
    return float(round(product.sum(), 6))


def chameleon() -> float:
    """Render a table of 10 rows and 10 columns."""
    import zlib

    from chameleon import PageTemplate  # type: ignore[import-not-found]

    template = PageTemplate(
        '<table xmlns="http://www.w3.org/1999/xhtml" xmlns:tal="http://xml.zope.org/namespaces/tal">'
        '<tr tal:repeat="row python: options[\'table\']"><td tal:repeat="cell python: row.values()">'
        '<span tal:define="next python: cell + 1" tal:attributes="class python: \'column-\' + str(next)" '
        'tal:content="python: next" /></td></tr></table>'
    )
    row = {str(number): number for number in range(10)}
    return float(zlib.crc32(template.render(options={"table": [row] * 10}).encode()))


def pyaes() -> float:
    """Encrypt and decrypt 100 bytes, five times."""
    import zlib

    import pyaes  # type: ignore[import-not-found]

    message, key = b"0123456789" * 10, bytes(range(16))
    for _ in range(5):
        encrypted = pyaes.AESModeOfOperationCTR(key).encrypt(message)
        if pyaes.AESModeOfOperationCTR(key).decrypt(encrypted) != message:
            raise ValueError("the message is another one")
    return float(zlib.crc32(encrypted))


FUNCTIONS: Final[Mapping[str, Callable[[], float]]] = {
    function.__name__: function for function in (first_line, use_pandas, nothing, linpack, matmul, chameleon, pyaes)
}


class Workload(NamedTuple):
    """A function of FunctionBench: its name there, its size, the packages that it needs, and the modules that it
    imports, which a template would learn from it.

    ``least_runc``, ``least_bubblewrap``: how many times as fast as a fresh container a fork should be.
    """

    title: str
    size: str
    packages: tuple[str, ...]
    preload: tuple[str, ...]
    least_runc: float
    least_bubblewrap: float


_OF_NUMPY: Final = ("numpy", "numpy.random")
WORKLOADS: Final[Mapping[str, Workload]] = {
    "linpack": Workload("LinPack", "200 equations", ("numpy",), _OF_NUMPY, 8, 10),
    "matmul": Workload("MatMul", "200 x 200", ("numpy",), _OF_NUMPY, 8, 10),
    "chameleon": Workload("Chameleon", "10 rows x 10 columns", ("chameleon",), ("chameleon", "email.parser"), 8, 7),
    "pyaes": Workload("pyaes", "100 bytes, 5 times", ("pyaes",), ("pyaes",), 8, 4),
}


@functools.cache
def packed(name: str) -> tuple[Run, list[bytes]]:
    """The packet of a task with one of the :data:`FUNCTIONS`."""
    serializer = Serializer()
    body, payload = serializer.pack_function(FUNCTIONS[name]), serializer.pack_call(())
    function_hash = hashlib.sha256(body).hexdigest()
    order = Order("t", 1, function_hash, len(payload), TaskOptions())
    return Run((order,), ((function_hash, len(body)),)), [body, payload]
