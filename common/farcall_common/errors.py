"""Errors: every exception that Farcall raises or reports, in one tree.

::

    FarcallError
    ├── InvalidRequest            the request is invalid and cannot succeed
    │   ├── PayloadTooLarge       (RequestTooLarge: all of a request together)
    │   ├── TooManyTasks
    │   ├── Unsupported           not supported, although other SDKs and services have it
    │   └── EndpointIncompatible  the endpoint cannot read or run it (also a SerializationError)
    ├── Unauthenticated           no identity
    ├── Forbidden                 an identity without the right (on an endpoint: FunctionNotPermitted ·
    │                             FunctionNotSigned · AllowanceExceeded; StoreDenied: by a store of objects)
    ├── NotFound                  FunctionUnknown · ContainerUnknown · EndpointUnknown · TaskUnknown · BlobUnknown ·
    │                             TaskGroupUnknown · ActionUnknown · ObjectGone
    ├── Conflict                  TaskIdReused · RequestIdReused · EndpointInUse · SpoolOutdated
    ├── LimitExceeded             a limit is reached; retry later
    │   ├── RateLimited           too many requests in a short time
    │   ├── QueueFull             too many tasks wait for an endpoint
    │   ├── TargetInfeasible      an endpoint cannot hold the latency target of a task
    │   └── QuotaExceeded         (retry after something was deleted; StoreFull: from a store of objects)
    ├── Unavailable               a part of the service is unavailable; retry
    │   ├── DatabaseUntrusted     its certificate is not accepted
    │   ├── StorageLow            the database's disk is nearly full: no new tasks are accepted
    │   ├── StoreUnavailable      a store of objects does not answer
    │   └── NoForwarder       (ForwarderWaking: one is starting)
    ├── ProtocolError             a peer violated PROTOCOL.md
    │   ├── FrameMalformed
    │   └── VersionUnsupported
    ├── SessionRefused            the forwarder refuses this peer: TicketInvalid · EndpointMismatch ·
    │                             EndpointTakenOver
    ├── Fenced                    another forwarder owns the endpoint
    ├── QueueDataLost             the queue lost an endpoint's data; restore it from the database
    ├── SerializationError        a value cannot be turned into bytes
    ├── DeserializationError      bytes cannot be turned into a value
    │   ├── ResultRefused         reading the result could run code that the reader did not ask for
    │   ├── ObjectDamaged         what a store has in place of an object is not that object
    │   └── SealInvalid           sealed bytes cannot be opened
    ├── EndpointKeyChanged        an endpoint shows another identity than it had
    ├── ConfigurationError        a setting is missing or wrong
    └── TaskError                 the outcome of a task without a result
        ├── TaskPending           (not an outcome: the task has not ended yet)
        ├── TaskFailed            user code raised, or the task could not run
        │   ├── TaskDeadLettered  each attempt killed its worker or manager; none is left
        │   ├── NodesUnavailable  the endpoint's scheduler provides no nodes
        │   ├── ResultTooLarge    the result is over the size limit
        │   ├── EndpointRequiresSealed  the endpoint runs sealed calls only
        │   ├── SealedCallRefused the endpoint cannot open the sealed call, or has opened it before
        │   └── WaitedTooLong     the endpoint did not start the task within the maximum wait
        ├── TaskCancelled
        │   ├── RightWithdrawn    the right to use the endpoint or the function was withdrawn while the task was open
        │   └── EndpointDeleted   its endpoint was deleted
        └── TaskLost              it is unknown whether the task ran, and it may not run again

Other packages add classes of their own. A class that sets ``code`` is registered when it is created, so that
:func:`error_from_record` knows it as soon as its module is imported; a code belongs to one class.

An error has a fault (:class:`Fault`), whether a retry can help (``retryable``), and what to do (``hint``).
:class:`ErrorRecord` is the same as a value: the one JSON shape used in REST answers, in wire messages and
in the record of a failed task.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final, Self

from farcall_common.plain_text import plain


class Fault(enum.StrEnum):
    """Cause of an error: who has to act."""

    CALLER = "caller"
    PEER = "peer"
    NETWORK = "network"
    USER_CODE = "user_code"
    US = "us"


@dataclasses.dataclass(frozen=True)
class ErrorRecord:
    """An error as a value.

    ``code`` is stable and upper-case, for programs; ``message`` and ``hint`` are for people. The optional part
    belongs to tasks: the remote exception's type, its traceback (text, remote frames only), the last bytes of the
    task's output, and which attempt on which endpoint it was. ``retry_after_s`` is how long to wait, in seconds.
    ``builtin_type`` is the nearest built-in class of the remote exception (see :func:`builtin_type_of`), and
    ``exception_data`` the exception itself, as a buffer that only the client opens (see :mod:`farcall_common.payload`).
    ``sealed`` is the whole record of a sealed call, which only its submitter opens (:mod:`farcall_common.sealing`).
    ``retries_used`` is how many earlier runs of the task raised and were retried.
    """

    code: str
    message: str
    hint: str = ""
    fault: Fault = Fault.US
    retryable: bool = False
    retry_after_s: float | None = None
    exception_type: str | None = None
    traceback: str | None = None
    stdout_tail: str | None = None
    stderr_tail: str | None = None
    attempt: int | None = None
    endpoint_id: str | None = None
    #: Of a dead letter: how each of its attempts ended.
    reasons: tuple[str, ...] | None = None
    builtin_type: str | None = None
    exception_data: str | None = None
    sealed: str | None = None
    retries_used: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The record as a JSON object; optional fields that are not set are left out."""
        full = dataclasses.asdict(self)
        full["fault"] = str(self.fault)
        return {key: value for key, value in full.items() if value is not None}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ErrorRecord:
        """Read a record. Fields of a newer writer are ignored; its faults that this reader does not know become ``us``.

        :raises KeyError: if ``code`` or ``message`` is missing.
        :raises ValueError: if ``fault`` is not a word.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        values["code"], values["message"] = str(data["code"]), str(data["message"])
        values["fault"] = _fault(values.get("fault", Fault.US))
        values["reasons"] = tuple(map(str, values["reasons"])) if values.get("reasons") else None
        return cls(**values)


def _fault(word: Any) -> Fault:
    """The fault of this name; ``us`` for one of a newer writer."""
    try:
        return Fault(word)
    except ValueError:
        if isinstance(word, str):
            return Fault.US
        raise


#: Every class that sets a code.
_BY_CODE: Final[dict[str, type[FarcallError]]] = {}


class FarcallError(Exception):
    """Base class. Subclasses set ``code``, ``fault`` and ``retryable``; each error has a message and a hint."""

    code: ClassVar[str] = "INTERNAL"
    fault: ClassVar[Fault] = Fault.US
    retryable: ClassVar[bool] = False
    default_hint: ClassVar[str] = ""
    #: Whether a gateway, a proxy or another service answered a request, and not Farcall.
    is_foreign: bool = False

    def __init_subclass__(cls) -> None:
        """Register a class that sets ``code``; one that inherits its code is found by its parent's.

        :raises TypeError: if the code is that of another class. A class may be defined again, as by a reload.
        """
        super().__init_subclass__()
        if "code" not in vars(cls):
            return
        known = _BY_CODE.get(cls.code, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"{cls.__qualname__}: {known.__qualname__} of {known.__module__} has code {cls.code!r}")
        _BY_CODE[cls.code] = cls

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        retry_after_s: float | None = None,
        record: ErrorRecord | None = None,
    ) -> None:
        super().__init__(message)
        self.record: ErrorRecord = record or ErrorRecord(
            code=self.code,
            message=message,
            hint=self.default_hint if hint is None else hint,
            fault=self.fault,
            retryable=self.retryable,
            retry_after_s=retry_after_s,
        )

    @property
    def hint(self) -> str:
        """Advice to the user about the error; may be empty."""
        return self.record.hint

    def __str__(self) -> str:
        text = f"[{self.record.code}] {self.record.message}"
        return plain(f"{text} ({self.record.hint})" if self.record.hint else text)


_BY_CODE[FarcallError.code] = FarcallError


class InvalidRequest(FarcallError):
    code = "INVALID_REQUEST"
    fault = Fault.CALLER


class PayloadTooLarge(InvalidRequest):
    code = "PAYLOAD_TOO_LARGE"
    default_hint = "Pass a path or a reference to the data instead of the data itself."


class RequestTooLarge(PayloadTooLarge):
    code = "REQUEST_TOO_LARGE"
    default_hint = "Submit fewer tasks at once, and big payloads by reference."


class AnswerTooLarge(InvalidRequest):
    code = "ANSWER_TOO_LARGE"
    default_hint = "Ask for less at once: fewer ids, or a smaller limit."


class TooManyTasks(InvalidRequest):
    code = "TOO_MANY_TASKS"
    default_hint = "Split the request."


class Unsupported(InvalidRequest):
    """An argument, method or request that other SDKs and services have, and that is not supported here; ``hint`` names
    the alternative."""

    code = "UNSUPPORTED"


class Unauthenticated(FarcallError):
    code = "UNAUTHENTICATED"
    fault = Fault.CALLER
    default_hint = "Log in with `farcall login`, set FARCALL_TOKEN, or run `farcall local up` for a local tier."


class Forbidden(FarcallError):
    code = "FORBIDDEN"
    fault = Fault.CALLER
    default_hint = "Only the owner has access, unless it is public: ask the owner to make it public."
    #: What the caller may not use, and its owner, if they are known: for the audit, and not in the record.
    object_id: str = ""
    owner_id: str = ""

    def of(self, object_id: str, *, owner_id: str) -> Self:
        """The error, with the object and its owner."""
        self.object_id, self.owner_id = object_id, owner_id
        return self


class UserNotAllowed(Forbidden):
    code = "USER_NOT_ALLOWED"
    default_hint = (
        "Ask the administrator of the deployment to allow you, and send this message along: it has your identity."
    )


class FunctionNotPermitted(Forbidden):
    code = "FUNCTION_NOT_PERMITTED"
    default_hint = "Ask the endpoint's owner to allow the function; `allowed_functions` lists those that may run."


class AllowanceExceeded(Forbidden):
    code = "ALLOWANCE_EXCEEDED"
    default_hint = "Ask the endpoint's owner for more."


class FunctionNotSigned(Forbidden):
    code = "FUNCTION_NOT_SIGNED"
    default_hint = (
        "Sign the function with a key that the endpoint's owner allows: `farcall functions sign FUNCTION --key KEY`."
    )


class StoreDenied(Forbidden):
    code = "STORE_DENIED"
    default_hint = "Check the credentials and the permissions of the store of objects."


class NotFound(FarcallError):
    code = "NOT_FOUND"
    fault = Fault.CALLER


class FunctionUnknown(NotFound):
    code = "FUNCTION_UNKNOWN"
    default_hint = "Register the function first, or look it up with `farcall functions search`."


class ContainerUnknown(NotFound):
    code = "CONTAINER_UNKNOWN"
    default_hint = "Register the container first, or look it up with `farcall containers ls`."


class EndpointUnknown(NotFound):
    code = "ENDPOINT_UNKNOWN"
    default_hint = "`farcall endpoints ls` lists the endpoints that you may use."


class TaskUnknown(NotFound):
    code = "TASK_UNKNOWN"
    default_hint = "Tasks are forgotten after their retention time; `farcall tasks ls` lists yours."


class TaskGroupUnknown(NotFound):
    code = "TASK_GROUP_UNKNOWN"


class ActionUnknown(NotFound):
    code = "ACTION_UNKNOWN"
    default_hint = "Actions are forgotten when they are released, and after their retention time."


class BlobUnknown(NotFound):
    code = "BLOB_UNKNOWN"
    default_hint = "Upload the blob before submitting a task that refers to it."


class ObjectGone(NotFound):
    code = "OBJECT_GONE"
    default_hint = (
        "It was evicted or not used for too long, was read as often as it may, or is on another machine: objects in "
        "memory are for the processes of one node. Put it again, with another lifetime or in another store."
    )


class Conflict(FarcallError):
    code = "CONFLICT"
    fault = Fault.CALLER


class TaskIdReused(Conflict):
    code = "TASK_ID_REUSED"
    default_hint = "Create a new UUIDv7 for each task; only an identical resubmission may repeat one."


class RequestIdReused(Conflict):
    code = "REQUEST_ID_REUSED"
    default_hint = "Use a new request_id for each request, and the same one only to repeat a request unchanged."


class EndpointInUse(Conflict):
    code = "ENDPOINT_IN_USE"
    default_hint = (
        "Another agent runs with this endpoint id; stop it first, or configure a new endpoint. If its machine lost "
        "power or its network, wait 90 s and start again."
    )


class SpoolOutdated(Conflict):
    code = "SPOOL_OUTDATED"
    default_hint = (
        "If the endpoint runs elsewhere, stop this one. If not, start it with an empty spool: "
        "farcall-endpoint start NAME --new-spool. Tasks that may run twice then run again; the others end as lost."
    )


class LimitExceeded(FarcallError):
    code = "LIMIT_EXCEEDED"
    fault = Fault.CALLER
    retryable = True


class RateLimited(LimitExceeded):
    code = "RATE_LIMITED"
    default_hint = "Wait for retry_after_s, and put many items into one request."


class QueueFull(LimitExceeded):
    code = "QUEUE_FULL"
    default_hint = "Wait until the endpoint has finished some of its tasks, or use another endpoint."


class TargetInfeasible(LimitExceeded):
    code = "TARGET_INFEASIBLE"
    retryable = False
    default_hint = "Submit with a looser target, without one (`qos=QoS()`), or to another endpoint."


class QuotaExceeded(LimitExceeded):
    code = "QUOTA_EXCEEDED"
    retryable = False
    default_hint = "Delete what you do not need any more."


class StoreFull(QuotaExceeded):
    code = "STORE_FULL"
    default_hint = "Evict objects that are not needed any more, give them shorter lifetimes, or use another store."


class Unavailable(FarcallError):
    code = "UNAVAILABLE"
    retryable = True
    default_hint = "Try again in a moment."


class DatabaseUntrusted(Unavailable):
    code = "DATABASE_UNTRUSTED"
    default_hint = (
        "For the deployment's operator: the database's certificate must be valid, be for its host name, and be signed"
        " by one of database.authorities; see docs/operations/keys.md."
    )


class StorageLow(Unavailable):
    code = "STORAGE_LOW"
    default_hint = (
        "No accepted task is lost. Wait for retry_after_s; the deployment's operator can raise the limit of the disk"
        " (database.max_storage_gib)."
    )


class StoreUnavailable(Unavailable):
    code = "STORE_UNAVAILABLE"
    default_hint = "Check that the store of objects runs and can be reached from here."


class StoreBusy(StoreUnavailable):
    """A storage refuses a request, or does not answer it, and may answer the next one. The request may have been done
    all the same."""


class NoForwarder(Unavailable):
    code = "NO_FORWARDER"
    default_hint = "No forwarder is running yet; the connection is retried."


class ForwarderWaking(NoForwarder):
    code = "FORWARDER_WAKING"
    default_hint = "No action is needed: the connection is retried until the forwarder runs, in about a minute."


class ProtocolError(FarcallError):
    code = "PROTOCOL_ERROR"
    fault = Fault.PEER


class FrameMalformed(ProtocolError):
    code = "FRAME_MALFORMED"


class VersionUnsupported(ProtocolError):
    code = "VERSION_UNSUPPORTED"
    default_hint = "Upgrade the older side."


class SessionRefused(FarcallError):
    code = "SESSION_REFUSED"
    fault = Fault.PEER


class TicketInvalid(SessionRefused):
    code = "TICKET_INVALID"
    default_hint = "Ask the API for a ticket for this key and this endpoint."


class EndpointMismatch(SessionRefused):
    code = "ENDPOINT_MISMATCH"
    default_hint = "Connect with the key that was registered for this endpoint."


class EndpointTakenOver(SessionRefused):
    code = "ENDPOINT_TAKEN_OVER"
    default_hint = "No action is needed if you restarted the endpoint."


class Fenced(FarcallError):
    code = "FENCED"


class QueueDataLost(FarcallError):
    code = "QUEUE_DATA_LOST"
    retryable = True


class SerializationError(FarcallError):
    code = "SERIALIZATION_FAILED"
    fault = Fault.CALLER


class EndpointIncompatible(InvalidRequest, SerializationError):
    """The endpoint could not read or run this."""

    code = "ENDPOINT_INCOMPATIBLE"


class DeserializationError(FarcallError):
    code = "DESERIALIZATION_FAILED"
    fault = Fault.PEER


class ResultRefused(DeserializationError):
    """A result is written in a way that this client does not read: it came from an endpoint that is not trusted, or is
    not what was asked for."""

    code = "RESULT_REFUSED"


class ObjectDamaged(DeserializationError):
    code = "OBJECT_DAMAGED"
    default_hint = "Put the object again."


class SealInvalid(DeserializationError):
    """Sealed bytes were changed, belong elsewhere, or are sealed with another key."""

    code = "SEAL_INVALID"


class EndpointKeyChanged(FarcallError):
    """An endpoint shows another identity than this user has seen, or none any more."""

    code = "ENDPOINT_KEY_CHANGED"
    fault = Fault.PEER


class ConfigurationError(FarcallError):
    code = "CONFIGURATION"
    fault = Fault.CALLER


class TaskError(FarcallError):
    """The outcome of a task without a result; ``record`` has the remote traceback and the rest."""

    code = "TASK_ERROR"
    fault = Fault.USER_CODE

    @property
    def remote_traceback(self) -> str | None:
        """The traceback on the worker, as text, or None if user code did not run."""
        return self.record.traceback


class TaskPending(TaskError):
    code = "TASK_PENDING"
    fault = Fault.CALLER
    retryable = True


class TaskFailed(TaskError):
    code = "TASK_FAILED"

    @property
    def remote_data(self) -> str:
        """The text of the error, by the name that programs for Globus Compute read."""
        return str(self)


class TaskDeadLettered(TaskFailed):
    code = "TASK_DEAD_LETTERED"


class TaskCancelled(TaskError):
    code = "TASK_CANCELLED"
    fault = Fault.CALLER


class RightWithdrawn(TaskCancelled):
    code = "RIGHT_WITHDRAWN"
    default_hint = "Ask the owner of the endpoint or the function, or submit the task elsewhere."


class EndpointDeleted(TaskCancelled):
    code = "ENDPOINT_DELETED"
    default_hint = "Submit the task to another endpoint."


class TaskLost(TaskError):
    code = "TASK_LOST"
    fault = Fault.US


class NodesUnavailable(TaskFailed):
    code = "NODES_UNAVAILABLE"
    fault = Fault.PEER
    retryable = True


class ResultTooLarge(TaskFailed):
    code = "RESULT_TOO_LARGE"
    default_hint = "Write large data to a file or object store, and return its location."


class EndpointRequiresSealed(TaskFailed):
    code = "ENDPOINT_REQUIRES_SEALED"
    fault = Fault.CALLER
    default_hint = "Seal the call: Client(sealed='offered'), or FARCALL_SEALED=offered."


class SealedCallRefused(TaskFailed):
    code = "SEALED_CALL_REFUSED"
    fault = Fault.CALLER
    default_hint = "Submit the call again."


class WaitedTooLong(TaskFailed):
    code = "WAITED_TOO_LONG"
    fault = Fault.PEER
    retryable = True
    default_hint = "Start the endpoint, and submit the task again."


#: The built-in exceptions that a :class:`TaskFailed` can be, too. Left out are those with a meaning for code that waits
#: for a result (TimeoutError, StopIteration), that do not take a text alone (UnicodeDecodeError, ExceptionGroup), or
#: that Python prints differently (SyntaxError): of these the next class above is used.
_BUILTIN_TYPES: Final[Mapping[str, type[Exception]]] = {
    cls.__name__: cls
    for cls in (
        *(ArithmeticError, FloatingPointError, OverflowError, ZeroDivisionError),
        *(AssertionError, AttributeError, BufferError, EOFError, MemoryError, ReferenceError, SystemError),
        *(ImportError, ModuleNotFoundError),
        *(LookupError, IndexError, KeyError),
        *(NameError, UnboundLocalError),
        *(OSError, BlockingIOError, ChildProcessError, FileExistsError, FileNotFoundError, InterruptedError),
        *(IsADirectoryError, NotADirectoryError, PermissionError, ProcessLookupError),
        *(ConnectionError, BrokenPipeError, ConnectionAbortedError, ConnectionRefusedError, ConnectionResetError),
        *(RuntimeError, NotImplementedError, RecursionError),
        *(TypeError, ValueError, UnicodeError),
        *(Warning, BytesWarning, DeprecationWarning, EncodingWarning, FutureWarning, ImportWarning),
        *(PendingDeprecationWarning, ResourceWarning, RuntimeWarning, SyntaxWarning, UnicodeWarning, UserWarning),
    )
}


def builtin_type_of(error: BaseException) -> str | None:
    """The name of the nearest class of an exception that is in the closed table of built-in ones, if there is one."""
    return next((cls.__name__ for cls in type(error).__mro__ if _BUILTIN_TYPES.get(cls.__name__) is cls), None)


def error_from_record(record: ErrorRecord, *, default: type[FarcallError] = FarcallError) -> FarcallError:
    """The exception for a received record: the class of its code, or ``default`` for a code of a newer peer.

    A :class:`TaskFailed` is also an instance of the record's ``builtin_type``: ``except ValueError`` catches it.
    """
    cls = _BY_CODE.get(record.code, default)
    builtin = _BUILTIN_TYPES.get(str(record.builtin_type))
    if builtin is not None and issubclass(cls, TaskFailed):
        cls = _also(cls, builtin)
    return cls(record.message, record=record)


_combined: Final[dict[tuple[type[FarcallError], type[Exception]], type[FarcallError]]] = {}


def _also(cls: type[FarcallError], builtin: type[Exception]) -> type[FarcallError]:
    """The class that is both. Pickle cannot find it by name: the reader creates it again."""
    known = _combined.get((cls, builtin))
    if known is not None:
        return known

    def reduce(self: FarcallError) -> tuple[Any, ...]:
        return _remade, (cls, self.record), self.__dict__

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return _combined.setdefault((cls, builtin), type(cls.__name__, (cls, builtin), {**names, "__reduce__": reduce}))


def _remade(cls: type[FarcallError], record: ErrorRecord) -> FarcallError:
    return error_from_record(record, default=cls)


def did_you_mean(typed: str, known: Iterable[str]) -> str | None:
    """A hint for an unknown name: the names that are spelled alike; None if there is none."""
    import difflib  # here, because few programs need it

    alike = difflib.get_close_matches(typed, sorted(set(known)))
    return f"Did you mean {' or '.join(map(repr, alike))}?" if alike else None


class RemoteTraceback(Exception):
    """The cause of an exception that came from a worker: its traceback there, as text."""

    def __str__(self) -> str:
        return plain(f"\n{self.args[0]}")


def original_of(error: BaseException) -> BaseException:
    """The exception of a task's function, with the remote traceback as its cause; the error itself if the exception was
    not sent."""
    if not isinstance(error, TaskFailed) or error.__cause__ is None:
        return error
    original = error.__cause__
    remote = RemoteTraceback(error.remote_traceback or error.record.message)
    BaseException.__setattr__(original, "__cause__", remote)  # not by assignment: a class may forbid that
    return original
