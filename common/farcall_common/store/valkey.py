"""Valkey connections: the driver's client, the scripts of ``lua/``, mapping of their errors."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib import resources
from typing import Any, Final, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.commands.core import Script
from redis.exceptions import NoScriptError
from redis.retry import Retry

from farcall_common.errors import EndpointInUse, FarcallError, Fenced, QueueDataLost, Unavailable

#: A script's name, an endpoint, and arguments.
Call = tuple[str, str, Sequence[str | bytes | float]]

#: A script's name, its keys, and arguments.
KeyedCall = tuple[str, Sequence[str], Sequence[str | bytes | float]]

#: A command of the server with its arguments.
Command = tuple[str, ...]

#: The clock of the scripts, in Lua: seconds and microseconds.
SERVER_CLOCK: Final = "redis.call('TIME')"

#: Ids per script call. Serverless caches take fewer than 4,000 arguments, a task has up to seven.
BATCH: Final = 500

_LUA: Final = resources.files("farcall_common.store") / "lua"
_REFUSALS: Final = {"FENCED": Fenced, "DATALOST": QueueDataLost, "INUSE": EndpointInUse}


def connect(url: str, *, timeout_s: float) -> Any:
    """A client for ``redis://host:port/db``, or ``rediss://`` for TLS; ``timeout_s`` is for connecting and each answer.

    A connection that died idle is replaced at once; callers wait for an unavailable server. Sending a call
    twice because its first answer was lost does no harm: every script may be repeated.
    """
    # Any, because the driver's types mix the answers of its blocking and its asynchronous client.
    return redis.Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        health_check_interval=15,
        retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
    )


class Scripts:
    """The scripts of ``lua/``, by the names of their files.

    :param clock: a Lua expression that gives the time as :data:`SERVER_CLOCK` does.
    """

    def __init__(self, client: Any, *, clock: str) -> None:
        self._client = client
        prelude = f"local time = {clock}\n{(_LUA / 'prelude.lua').read_text()}"
        self._scripts: dict[str, Script] = {
            path.name.removesuffix(".lua"): client.register_script(prelude + path.read_text())
            for path in _LUA.iterdir()
            if path.name != "prelude.lua"
        }

    def run(self, name: str, endpoint_id: str, *arguments: str | bytes | float) -> Any:
        """Run a script on an endpoint's keys."""
        return self.run_on(name, _keys(endpoint_id), *arguments)

    def run_on(self, name: str, keys: Sequence[str], *arguments: str | bytes | float) -> Any:
        """Run a script on other keys."""
        with mapped():
            return self._scripts[name](keys=keys, args=arguments)

    def run_many(self, calls: Sequence[Call], *, before: Sequence[Command] = ()) -> list[Any]:
        """Run scripts on endpoints' keys, in order and in one round trip. An answer may be the error that a script
        raised. The commands ``before`` are sent first, and their answers are left out."""
        keyed = [(name, _keys(endpoint_id), arguments) for name, endpoint_id, arguments in calls]
        return self.run_many_on(keyed, before=before)

    def run_many_on(self, calls: Sequence[KeyedCall], *, before: Sequence[Command] = ()) -> list[Any]:
        """:meth:`run_many` on other keys.

        Scripts of several kinds build on one another, so that none may be missing in the middle: they are sent along.
        """
        kinds = {name for name, _, _ in calls}
        answers = self._run_all(calls, loading=kinds if len(kinds) > 1 else (), before=before)
        if missed := [index for index, answer in enumerate(answers) if isinstance(answer, NoScriptError)]:
            for index, answer in zip(missed, self._run_all([calls[i] for i in missed], loading=kinds), strict=True):
                answers[index] = answer
        return answers

    def _run_all(
        self, calls: Sequence[KeyedCall], *, loading: Collection[str], before: Sequence[Command] = ()
    ) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for command in before:
            pipeline.execute_command(*command)
        for name in loading:
            pipeline.script_load(self._scripts[name].script)
        for name, keys, arguments in calls:
            pipeline.evalsha(self._scripts[name].sha, len(keys), *keys, *arguments)
        with mapped():
            return list(pipeline.execute(raise_on_error=False))[len(before) + len(loading) :]


@contextlib.contextmanager
def mapped() -> Iterator[None]:
    """The scripts' and the driver's errors as ours."""
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError, redis.OutOfMemoryError) as error:
        raise Unavailable(f"the queue does not answer: {error}") from error
    except redis.ResponseError as error:
        code, _, message = str(error).partition(" ")
        if code in _REFUSALS:
            raise _REFUSALS[code](message) from error
        raise


def refusal(answer: Any) -> Fenced | QueueDataLost | None:
    """The refusal of an owner that a script answered with, or None. Raises any other error that it answered with."""
    error = _error_of(answer)
    if error is None or isinstance(error, Fenced | QueueDataLost):
        return error
    raise error


def in_use(answer: Any) -> EndpointInUse | None:
    """The refusal of a claim that a script answered with, or None. Raises any other error that it answered with."""
    error = _error_of(answer)
    if error is None or isinstance(error, EndpointInUse):
        return error
    raise error


def _error_of(answer: Any) -> FarcallError | None:
    if not isinstance(answer, redis.RedisError):
        return None
    try:
        with mapped():
            raise answer
    except FarcallError as error:
        return error


def _keys(endpoint_id: str) -> list[str]:
    """The keys of an endpoint, as the scripts take them."""
    tag = f"{{{endpoint_id}}}"
    prefixes = ("own:{}", "q:{}:", "l:{}", "x:{}", "o:{}", "t:{}:", "r:{}", "h:{}", "w:{}", "c:{}", "b:{}", "a:{}")
    return [prefix.format(tag) for prefix in prefixes]


_Item = TypeVar("_Item")


def batches(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """The items, so many at a time as one call may take."""
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]


def texts(values: Iterable[bytes]) -> list[str]:
    """Ids and names as the server sends them, as text."""
    return [value.decode() for value in values]
