"""Task options: the options of the tasks of a submit, defined once.

One :class:`TaskOptions` is a part of each message, row and queue entry about a task, unchanged from the submitter to
the worker. A new option is a field here (and in :class:`OwnOptionsDict`), an attribute of the SDK's
``Submitter``, and the code that acts on it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, TypedDict, Unpack

import msgspec

from farcall_common.environments import UV, Environment
from farcall_common.errors import did_you_mean
from farcall_common.finite import is_finite
from farcall_common.limits import KEPT_OUTPUT_BYTES, MAX_KEPT_OUTPUT_BYTES, MAX_SOURCE_FILES, MAX_SOURCES
from farcall_common.qos import QoS
from farcall_common.retries import MAX_DELAY_S, MAX_RETRIES, exception_names

#: A count or a number of bytes, within the range of JSON readers.
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]

_KeptBytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_KEPT_OUTPUT_BYTES)]

#: Functions that one task may call.
MAX_CALLEES: Final = 1000

#: The options that programs for Globus Compute put into the resource specification.
SPECIFIED: Final = ("num_nodes", "ranks_per_node", "num_ranks", "memory_bytes", "max_output_bytes", "keep_output")


class AttemptOptionsDict(TypedDict, total=False):
    """Options of each attempt to run a task, as keyword arguments; see :class:`TaskOptions`. Calls of running tasks
    know these."""

    idempotent: bool
    max_attempts: int
    walltime_s: float | None
    memory_bytes: int | None
    max_output_bytes: int | None
    retries: int
    retry_on: type[BaseException] | str | Iterable[type[BaseException] | str]
    retry_delay_s: float


class StageOptionsDict(AttemptOptionsDict, total=False):
    """Options of a stage of a graph, as keyword arguments; the others are those of the graph's task."""

    environment: Mapping[str, Any] | None
    requirements: Iterable[str] | None


class EngineOptionsDict(AttemptOptionsDict, total=False):
    """Options of tasks that an engine without a cloud knows."""

    qos: QoS | Mapping[str, Any] | None


class OwnOptionsDict(EngineOptionsDict, total=False):
    """The other options of Farcall's own."""

    num_nodes: int | None
    ranks_per_node: int | None
    num_ranks: int | None
    keep_output: bool
    output_bytes: int
    memoize: bool | None
    container: str | None
    environment: Mapping[str, Any] | None
    requirements: Iterable[str] | None


class TaskOptionsDict(OwnOptionsDict, total=False):
    """All options: with those that Globus Compute has, too."""

    result_serializers: Iterable[object] | None
    resource_specification: Mapping[str, Any] | None
    user_endpoint_config: Mapping[str, Any] | None
    callees: Iterable[Any] | None


class Callee(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A function that a task may call on its endpoint, as a stage of its graph or while it runs.

    :param function_id: id, or where it is submitted ``id@version``. The API replaces it by the id.
    :param function_hash: SHA-256 of its body in hex; the API sets it.
    :param version: of the function; the API sets it.
    :param environment: the environment that its calls run in, unless a stage names another: the one that the submit
        names, else that of the function; the API sets it. None = the endpoint's own, whatever that of the task is.
    """

    function_id: str
    function_hash: str = ""
    version: int = 0
    environment: Environment | None = None

    @property
    def reference(self) -> str:
        """The function as a submit names it."""
        return f"{self.function_id}@{self.version}" if self.version else self.function_id


class TaskOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, repr_omit_defaults=True, gc=False):
    """Options of every task of a submit, created and checked by :meth:`of` and :meth:`changed`.

    :param idempotent: whether the task may be started again after its endpoint has disconnected. Otherwise it ends as
        lost.
    :param max_attempts: most starts of the task.
    :param walltime_s: seconds after which an attempt is stopped; None = never.
    :param memory_bytes: memory that all processes of an attempt may use together; None = no limit.
    :param max_output_bytes: bytes that an attempt may write to standard output and error, each; None = no limit.
    :param retries: how often the task is run again after its function raised; apart from ``max_attempts``, which counts
        the runs that ended with their worker, node or endpoint.
    :param retry_on: which exceptions are retried: classes or their names, with those of their subclasses; none = every
        ``Exception``.
    :param retry_delay_s: seconds before the first retry. They double with each retry, up to 5 minutes; each wait is
        shortened at random by up to a half.
    :param qos: the latency that the task is to hold; None = as the function was registered. Calls of its graph, and
        those that it makes while it runs, have none.
    :param num_nodes: number of whole nodes of its block for MPI ranks.
    :param ranks_per_node: number of ranks on each node.
    :param num_ranks: number of all ranks; two of the three are enough.
    :param keep_output: whether the end of a task's output is recorded when it succeeds, too.
    :param output_bytes: how many of the last bytes of each stream of its output the endpoint keeps for a while; 0:
        none, and the output cannot be read while the task runs.
    :param memoize: whether the API may answer with the result of an equal call, and stores this one's; None = as
        the function was registered.
    :param container: a registered environment to run in: id or name where it is submitted. From the API on its id, or
        the :attr:`~farcall_common.environments.Environment.reference` of one that is not registered; and then
        ``environment`` is set, too.
    :param environment: the environment to run in; the API sets it to the one that ``container`` names, or that of the
        function. None = the endpoint's own.
    :param result_serializers: strategies that the worker tries in turn on a result; none = its own choice.
    :param resource_specification: other requirements, for the endpoint's own template.
    :param user_endpoint_config: values for the endpoint's own template; most endpoints take none.
    :param callees: other functions that the task calls on its endpoint: those of the stages of a graph, or those that
        it may call while it runs. On an endpoint that restricts functions it can call no others.
    :param sources: ids of other endpoints whose files the task reads (``endpoint://ENDPOINT/path``). Not an option of
        users: the client finds them in the arguments, as it does the files.
    :param source_files: those files, each as :func:`source_file` writes it: its endpoint can read no others.
    :param max_calls: most calls of graphs that a node runs at a time for the submitter; None = no limit. Not an option
        of users: the API sets it to the submitter's allowance of running tasks.
    """

    idempotent: bool = True
    max_attempts: _Count = 3
    walltime_s: _Seconds | None = None
    memory_bytes: _Count | None = None
    max_output_bytes: _Count | None = None
    retries: Annotated[int, msgspec.Meta(ge=0, le=MAX_RETRIES)] = 0
    retry_on: tuple[str, ...] = ()
    retry_delay_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_DELAY_S)] = 1.0
    qos: QoS | None = None
    num_nodes: _Count | None = None
    ranks_per_node: _Count | None = None
    num_ranks: _Count | None = None
    keep_output: bool = False
    output_bytes: _KeptBytes = KEPT_OUTPUT_BYTES
    memoize: bool | None = None
    container: str | None = None
    environment: Environment | None = None
    result_serializers: tuple[str, ...] = ()
    resource_specification: dict[str, Any] | None = None
    user_endpoint_config: dict[str, Any] | None = None
    callees: Annotated[tuple[Callee, ...], msgspec.Meta(max_length=MAX_CALLEES)] = ()
    sources: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_SOURCES)] = ()
    source_files: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_SOURCE_FILES)] = ()
    max_calls: _Count | None = None

    @classmethod
    def of(cls, **given: Unpack[TaskOptionsDict]) -> TaskOptions:
        """Options; what is not given has its default.

        :raises TypeError: for an option that does not exist, or an object that is not JSON, no environment, no list.
        :raises ValueError: for a value that an option cannot have; the message names the option.
        """
        return cls().changed(**given)

    def changed(self, **changes: Unpack[TaskOptionsDict]) -> TaskOptions:
        """These options with others for some of them.

        :raises TypeError, ValueError: as :meth:`of`.
        """
        if unknown := changes.keys() - {*self.__struct_fields__, "requirements"}:
            raise TypeError(unknown_option(sorted(unknown)[0], (*self.__struct_fields__, "requirements")))
        values: dict[str, Any] = {**msgspec.structs.asdict(self), **changes}
        values["environment"] = _environment(values, changes)
        values["result_serializers"] = tuple(values["result_serializers"] or ())
        if "retry_on" in changes:
            values["retry_on"] = exception_names(values["retry_on"])
        if "callees" in changes:
            values["callees"] = _callees(values["callees"])
        qos = values["qos"]
        if not isinstance(qos, QoS | Mapping | None):
            raise TypeError(f"qos: expected a QoS or a dictionary, got {type(qos).__name__}")
        if isinstance(qos, Mapping) and (unknown := qos.keys() - set(QoS.__struct_fields__)):
            raise ValueError(unknown_option(sorted(unknown)[0], QoS.__struct_fields__, what="qos"))
        for name in ("resource_specification", "user_endpoint_config"):
            # A copy: later changes by the caller have no effect until the option is set again.
            values[name] = _json_object(values[name], name)
        try:
            options = msgspec.convert(values, TaskOptions)
        except msgspec.ValidationError as error:
            reason, _, path = str(error).partition(" - at `$.")
            raise ValueError(f"{path.rstrip('`') or 'option'}: {reason}") from None
        if options.walltime_s == math.inf:
            raise ValueError("walltime_s: Expected a finite number of seconds")
        return options

    @property
    def wants_ranks(self) -> bool:
        """Whether the task starts MPI ranks."""
        return self.num_nodes is not None or self.num_ranks is not None or self.ranks_per_node is not None

    def translated(self) -> TaskOptions:
        """The same options, with those that the resource specification names moved to their fields. A field that is
        set already wins.

        :raises ValueError: as :meth:`of`.
        """
        specified = self.resource_specification
        if not specified or specified.keys().isdisjoint(SPECIFIED):
            return self
        rest = {name: value for name, value in specified.items() if name not in SPECIFIED}
        found = {
            name: specified[name]
            for name in SPECIFIED
            if specified.get(name) is not None and getattr(self, name) in (None, False)
        }
        return self.changed(resource_specification=rest or None, **found)

    def untranslatable(self) -> tuple[str, object] | None:
        """Name and value of an option that is still in the resource specification, because its value is invalid."""
        specified = self.resource_specification
        return next(((name, specified[name]) for name in SPECIFIED if name in specified), None) if specified else None

    def unknown_resource(self) -> str | None:
        """Name of something in the resource specification that is no option."""
        specified = self.resource_specification or {}
        return next((name for name, value in specified.items() if name not in SPECIFIED and value is not None), None)

    def to_json(self) -> dict[str, Any]:
        """The options as the body of a submit has them: those that are set, and always those that every task has."""
        body = {"idempotent": self.idempotent, "max_attempts": self.max_attempts, **msgspec.to_builtins(self)}
        if self.environment is not None:
            body |= {"environment": self.environment.to_json(), "container": self.environment.reference}
        if self.callees:
            body["callees"] = [each.reference for each in self.callees]
        return body

    def within(self, environment: Environment, *, container: str = "") -> TaskOptions:
        """The options of a task that runs in an environment; ``container``: the id of its registration, if it has
        one."""
        return msgspec.structs.replace(self, environment=environment, container=container or environment.reference)


def source_file(endpoint_id: str, path: str) -> str:
    """A file of another endpoint in options: the SHA-256 of its endpoint and path, in hexadecimal.

    :param path: absolute, without percent signs of a URL.
    """
    return hashlib.sha256(f"{endpoint_id}{path}".encode(errors="replace")).hexdigest()


#: Three ways to name the environment of a task.
_ENVIRONMENTS: Final = ("container", "environment", "requirements")


def _environment(values: dict[str, Any], changes: Mapping[str, Any]) -> Environment | None:
    """The environment of changed options; ``requirements`` are a way to write one, and are taken out. The one that was
    named last wins: a changed container, environment or list of requirements takes the place of the others. An empty
    one takes away what was named in the same way.

    :raises TypeError: for requirements that are no list.
    :raises ValueError: if it cannot be, or two of the three are given at once.
    """
    requirements = values.pop("requirements", None)
    given = [name for name in _ENVIRONMENTS if changes.get(name)]
    if len(given) > 1:
        raise ValueError(f"{given[0]} and {given[1]}: a task has one environment")
    if requirements:
        if isinstance(requirements, str | bytes) or not isinstance(requirements, Iterable):
            raise TypeError(f"requirements: expected a list, got {type(requirements).__name__}")
        values["container"] = None
        return Environment.of({"type": UV, "requirements": tuple(requirements)})
    if given == ["container"]:
        return None
    if given == ["environment"]:
        values["container"] = None
        return Environment.of(values["environment"])
    environment: Environment | None = values["environment"] or None
    if "requirements" in changes and environment is not None and environment.type == UV:
        return None
    return environment


def _callees(given: Iterable[Callee | str] | None) -> tuple[Callee, ...]:
    """Functions that a task calls, from references to them.

    :raises TypeError: if it is no list, or one of another thing.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Iterable | None):
        raise TypeError(f"callees: expected a list, got {type(given).__name__}")
    return tuple(Callee(each) if isinstance(each, str) else each for each in given or ())


def _json_object(value: Mapping[str, Any] | None, name: str) -> dict[str, Any] | None:
    """A copy of a JSON object.

    :raises TypeError: if it is not one.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict, and this is a {type(value).__name__}")
    if not is_finite(value):
        raise TypeError(f"{name} must be JSON, which has neither NaN nor infinity")
    try:
        copied: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(dict(value)))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be JSON: {error}") from error
    return copied


def unknown_option(name: str, known: Iterable[str], *, what: str = "tasks") -> str:
    """The message for an option that does not exist, with those that are spelled alike."""
    return f"{name!r} is not an option of {what}. {did_you_mean(name, known) or ''}".rstrip()
