"""API client: one method for each operation. For many calls, see :class:`farcall.Executor`."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import itertools
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack

from farcall._arguments import as_function_id, as_id, refuse
from farcall._details import fields_by_service, is_signed
from farcall._display import Record, Records
from farcall._settings import Settings, bearer_token
from farcall._sharing import Sharing
from farcall._stages import stages_of
from farcall._task_info import TaskInfo, Why, target_of
from farcall_common.backoff import Backoff
from farcall_common.errors import Conflict, FarcallError, TaskError, TaskUnknown, Unsupported
from farcall_common.progress import PROGRESS, read_progress
from farcall_common.staging import FILES, STAGING, read_files, read_staging

if TYPE_CHECKING:
    from types import TracebackType

    import httpx

    from farcall._api import Api, Blobs
    from farcall._batch import Batch
    from farcall._compatibility import CompatibilityChecker
    from farcall._names import EndpointNames, Ids
    from farcall._qos import LatencyTargets, TargetWarnings
    from farcall._sealing import Sealer, SealMode
    from farcall._settings import Authorizer
    from farcall._task_output import OutputPart, OutputReader, TaskOutput
    from farcall._trust import ResultPolicy
    from farcall_common.payload import Serializer
    from farcall_common.qos import QoS
    from farcall_common.task_options import OwnOptionsDict, TaskOptionsDict


Json = dict[str, Any]
Moment = dt.datetime | float


def _signed(request: Json, key: str | os.PathLike[str]) -> Json:
    from farcall._signing import signed  # here, because cryptography takes a while to import

    return signed(request, key)


class SourceCode:
    """Registers functions as text."""

    _api: Api

    def register_source_code(
        self,
        source: str,
        function_name: str,
        *,
        description: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        public: bool = False,
    ) -> str:
        """Register source text that defines ``function_name``, and return the id of that function.

        The text is run by the worker, whatever its Python version, and may hold imports and other functions.

        :raises SerializationError: if no function can have that name.
        """
        from farcall._functions import source_registration

        return self._api.register_function(
            source_registration(source, function_name, description=description, metadata=metadata, public=public)
        )


#: Entries of one page.
_PAGE: Final = 1000


_PARALLEL_TRANSFERS: Final = 4
_GROUPS_PER_REQUEST: Final = 1000
_FIRST_POLL_S: Final = 0.02
_LONGEST_POLL_S: Final = 2.0


@dataclasses.dataclass(frozen=True)
class Connection:
    """Objects that a client and its executors share."""

    api: Api
    blobs: Blobs
    compatibility: CompatibilityChecker
    policy: ResultPolicy
    sealer: Sealer
    names: EndpointNames
    ids: Ids
    output: OutputReader
    target_warnings: TargetWarnings


class Client(SourceCode, Sharing):
    """Talks to the API of a deployment. May be used from any thread, and in forked children.

    Requests that fail because of the network, or because the API is busy, are repeated with a random back-off. That
    never runs a task twice: its id is made here.

    :param api_url: address of the API; else ``FARCALL_API_URL``, else ``config.toml`` (see :class:`Settings`).
    :param token: bearer token; else ``FARCALL_TOKEN``, else that of `farcall login`, which is renewed automatically.
    :param timeout_s: how long one attempt at a request may wait for the network, in seconds.
    :param retry_timeout_s: how long a request is repeated before its error is raised, in seconds.
    :param code_serialization_strategy: the strategy for functions, instead of the fastest one that works: a strategy,
        its name, or one of Globus Compute's.
    :param data_serialization_strategy: the same for arguments.
    :param allowed_deserializers: the only strategies with which results are read: strategies, their names, or ``*Data``
        for all; else those of ``FARCALL_ALLOWED_DESERIALIZERS``, else all.
    :param trust: ids of endpoints of other owners that may answer with pickles, which run code here when they are read;
        ``"*"`` trusts every endpoint. Else ``FARCALL_TRUST``, else ``trust`` in ``config.toml``. Results of other
        endpoints that are not yours are read if they are plain data.
    :param sealed: whether the cloud can read arguments, results, errors and output: "off" sends them as they are,
        "offered" seals calls to endpoints that open sealed calls, so that only those can read them, "required" seals
        all calls and reads no other results. Else ``FARCALL_SEALED``, else ``sealed`` in ``config.toml``, else "off".
    :param authorizer: a ``globus_sdk`` authorizer, which provides the credentials instead of ``token``.
    :param do_version_check: request the version of the API now, which fails if it cannot be reached.
    :param environment: only None; use ``api_url``.
    :param local_compute_services: only False; start a local tier.
    :param app: only None; use ``authorizer``.
    :param transport: replaces the network, for tests.
    :raises ConfigurationError: if the address or the token is missing.
    :raises Unsupported: for an argument that is not supported.

    Every method raises :class:`FarcallError`: the subclass is the problem, ``hint`` the way to fix it.
    """

    def __init__(
        self,
        api_url: str | None = None,
        token: str | None = None,
        *,
        timeout_s: float = 30.0,
        retry_timeout_s: float = 60.0,
        code_serialization_strategy: object = None,
        data_serialization_strategy: object = None,
        allowed_deserializers: Iterable[object] | None = None,
        trust: Iterable[str | uuid.UUID] | None = None,
        sealed: SealMode | None = None,
        authorizer: Authorizer | None = None,
        do_version_check: bool = False,
        environment: str | None = None,
        local_compute_services: bool = False,
        app: object = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        refuse("environment", environment, hint="Choose the deployment with api_url or FARCALL_API_URL.")
        refuse("local_compute_services", local_compute_services, hint="`farcall local up` starts a local tier.")
        refuse("app", app, hint="Pass authorizer=app.get_authorizer(...) with the resource server of the deployment.")
        settings = Settings.resolve(api_url, token if authorizer is None else bearer_token(authorizer))
        if settings.login is not None:
            from farcall_common.login import KeptLogin

            authorizer = KeptLogin(settings.login, environ=os.environ)
        # Imported here: the network stack takes longer to load than the rest of the package together.
        from farcall._api import Api, Blobs
        from farcall._compatibility import CompatibilityChecker
        from farcall._endpoints import EndpointCache
        from farcall._functions import as_serializer
        from farcall._http import Http
        from farcall._names import EndpointNames, Ids
        from farcall._qos import TargetWarnings
        from farcall._sealing import Sealer, default_mode
        from farcall._task_output import OutputReader
        from farcall._trust import ResultPolicy, allowed_strategies, trusted_endpoints

        self.api_url: str = settings.api_url
        http = Http(
            settings, timeout_s=timeout_s, retry_timeout_s=retry_timeout_s, authorizer=authorizer, transport=transport
        )
        self._api = Api(http)
        endpoints = EndpointCache(self._api)
        allowed = allowed_strategies(allowed_deserializers)
        policy = ResultPolicy(endpoints, allowed=allowed, trusted=trusted_endpoints(trust))
        names = EndpointNames(lambda role: self._api.list_endpoints(role=role))
        sealer = Sealer(endpoints, mode=default_mode(sealed), meanings=names.meanings)
        self._connection = Connection(
            self._api,
            Blobs(self._api),
            CompatibilityChecker(endpoints),
            policy,
            sealer,
            names,
            Ids(self._api, may_be_completed=sealer.may_be_completed),
            OutputReader(self._api, sealer),
            TargetWarnings(),
        )
        self.fx_serializer: Serializer = as_serializer(
            code=code_serialization_strategy, data=data_serialization_strategy
        )
        if do_version_check:
            self.version_check()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.api_url!r})"

    def close(self) -> None:
        """Close the connections."""
        self._api.http.close()

    def version_check(self) -> Json:
        """Return the version of the API, and the oldest versions of the SDK and the endpoint that it supports."""
        return self._api.version()

    def whoami(self) -> Json:
        """``identity_id, username, linked`` (your other identities), ``provider`` (of your identity), ``limits``."""
        return self._api.whoami()

    def get_result_amqp_url(self) -> Json:
        """Raise Unsupported: an :class:`Executor` receives results over the forwarder's stream.

        :raises Unsupported: always.
        """
        raise Unsupported("there is no message broker", hint="An Executor gets its results pushed.")

    def logout(self) -> None:
        """Raise Unsupported: the client takes its token from an argument, the environment or a file.

        :raises Unsupported: always.
        """
        raise Unsupported(
            "this client did not log in", hint="`farcall logout` deletes a login; FARCALL_TOKEN must be unset."
        )

    @property
    def qos(self) -> LatencyTargets:
        """Latency targets: :meth:`~LatencyTargets.report` and :meth:`~LatencyTargets.baseline`."""
        from farcall._qos import LatencyTargets

        return LatencyTargets(self, self._api)

    # -- submitting ----------------------------------------------------------------------------------------------------

    def run(
        self,
        *args: Any,
        endpoint_id: str | uuid.UUID,
        function_id: str | uuid.UUID,
        memoize: bool | None = None,
        container: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Submit one call of a registered function and return the task id.

        :param function_id: an id, ``<id>@<version>``, or an alias of yours.
        :param memoize: as :attr:`Executor.memoize`.
        :param container: id or name of a container of yours to run in. A function with arguments of one of these
            names is called through :meth:`create_batch`.

        :raises SerializationError: if an argument cannot be sent; the message names it.
        :raises PayloadTooLarge: if the arguments take more than 10 MiB.
        """
        endpoint_id = self.find_endpoint(endpoint_id)
        batch = self._batch(endpoint_id, memoize=memoize, container=container)
        task_id = batch.add(function_id, args, kwargs)
        self.batch_run(endpoint_id, batch)
        return task_id

    def get_worker_hardware_details(self, endpoint_id: str | uuid.UUID) -> str:
        """Submit a report of a worker about its machine, and return the id of the task; its result is text."""
        from farcall._functions import hardware_source

        return self.run(endpoint_id=endpoint_id, function_id=self.register_source_code(*hardware_source()))

    def create_batch(
        self,
        task_group_id: str | uuid.UUID | None = None,
        resource_specification: Mapping[str, Any] | None = None,
        user_endpoint_config: Mapping[str, Any] | None = None,
        create_websocket_queue: bool = False,
        result_serializers: Iterable[object] | None = None,
        **options: Unpack[OwnOptionsDict],
    ) -> Batch:
        """A batch to :meth:`Batch.add` calls to; the arguments apply to all of them (see :class:`Executor`).

        :param options: the options of tasks that an :class:`Executor` takes, too.
        :raises Unsupported: for ``create_websocket_queue``: an :class:`Executor` receives results without one.
        """
        from farcall._functions import strategy_names

        refuse("create_websocket_queue", create_websocket_queue, hint="An Executor gets its results pushed.")
        return self._batch(
            None,
            task_group_id,
            resource_specification=resource_specification,
            user_endpoint_config=user_endpoint_config,
            result_serializers=strategy_names(result_serializers),
            **options,
        )

    def _batch(
        self,
        endpoint_id: str | None,
        task_group_id: str | uuid.UUID | None = None,
        **options: Unpack[TaskOptionsDict],
    ) -> Batch:
        """A batch for an endpoint; None if it is not known yet."""
        from farcall._batch import Batch
        from farcall_common.task_options import TaskOptions

        return Batch(
            task_group_id=None if task_group_id is None else as_id(task_group_id),
            options=TaskOptions.of(**options),
            serializer=self.fx_serializer,
            reference_of=self._api.reference_of,
            endpoint_id=self._connection.names.find,
            make_task_id=functools.partial(self._connection.sealer.new_task_id, None, endpoint_id=endpoint_id),
        )

    def batch_run(self, endpoint_id: str | uuid.UUID, batch: Batch) -> Json:
        """Submit a batch: ``request_id, task_group_id, endpoint_id, tasks`` (ids by function id, in order).

        Large batches are sent in several requests. If one fails, the error is raised and the batch may be run again:
        tasks that were taken already are not run twice.

        :raises EndpointIncompatible: if the endpoint could not read an argument; nothing is sent then.
        """
        from farcall._batch import chunks, encode_submit, options_of

        endpoint_id = self.find_endpoint(endpoint_id)
        compatibility = self._connection.compatibility
        options = options_of(batch)
        for function_id, requirements in batch.requirements:
            what = f"an argument of {function_id}"
            compatibility.check(endpoint_id, requirements, what=what, options=options)
        options = compatibility.with_binary_results(endpoint_id, options)
        answer: Json = {"request_id": "", "endpoint_id": endpoint_id, "tasks": {}}

        def seal(payload: bytes, function_id: str, task_id: str) -> bytes:
            return self._connection.sealer.seal(
                payload,
                mode=None,
                endpoint_id=endpoint_id,
                function=function_id,
                task_id=task_id,
                callees=[each.reference for each in options.callees],
                sources=options.sources,
            )

        prepared = batch.prepared(self._connection.blobs, seal, endpoint_id=endpoint_id, parallel=_PARALLEL_TRANSFERS)
        for chunk in chunks(prepared, callees=len(options.callees)):
            body, ids = encode_submit(chunk, task_group_id=batch.task_group_id, options=options)
            part = self._api.submit(endpoint_id, body, task_ids=ids)
            self._connection.target_warnings.show(part.warnings, endpoint_id=endpoint_id, names={})
            answer["request_id"] = part.request_id
            for function_id, task_ids in ids.items():
                answer["tasks"].setdefault(function_id, []).extend(task_ids)
        return answer | {"task_group_id": batch.task_group_id}

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def get_task(self, task_id: str | uuid.UUID) -> TaskInfo:
        """A task as it is now, with its result if it has one. :meth:`get_batch_result` shows those that failed, too.

        Of ids of tasks and groups the first digits are enough, here and in other methods: four or more, if no other one
        of yours begins with them.

        :raises TaskFailed: if the task failed.
        :raises TaskUnknown: if you have no such task.
        """
        info = info_of(self, task_id)
        if info.state == "failed" and info.exception is not None:
            raise info.exception
        return info

    def get_result(self, task_id: str | uuid.UUID, *, wait_s: float = 0.0) -> Any:
        """The value that a task returned, waiting up to ``wait_s`` seconds for it.

        :raises TaskPending: if it has not ended by then.
        :raises TaskFailed, TaskCancelled, TaskLost: if it did not succeed; with the remote traceback.
        """
        task_id, give_up_at = self._connection.ids.task(task_id), time.monotonic() + wait_s
        polling = Backoff(first_s=_FIRST_POLL_S, most_s=_LONGEST_POLL_S)
        while True:
            info = self.get_task(task_id)
            left_s = give_up_at - time.monotonic()
            if not info.pending or left_s <= 0:
                return info.result()
            time.sleep(min(left_s, polling.next_s()))

    def get_batch_result(self, task_ids: Iterable[str | uuid.UUID]) -> dict[str, TaskInfo]:
        """These tasks as they are now, in the given order, in any state.

        For a task that failed, is unknown, or has a result that cannot be read here, :meth:`TaskInfo.result` raises
        ``exception``.
        """
        wanted = list(dict.fromkeys(map(self._connection.ids.task, task_ids)))
        found = self._api.all_status(wanted)
        with ThreadPoolExecutor(_PARALLEL_TRANSFERS, thread_name_prefix="farcall-download") as pool:
            infos = pool.map(self._info, found.values())
            known = dict(zip(found, infos, strict=True))
        return {task_id: known.get(task_id) or _unknown(task_id) for task_id in wanted}

    def get_task_groups(self, *, limit: int = 100) -> list[Json]:
        """Your task groups, newest first: ``task_group_id, created_at`` (epoch seconds), ``tasks`` (how many) and
        ``states`` (how many in each)."""
        groups = Records()
        before = None
        while len(groups) < limit:
            page = self._api.list_groups(before=before, limit=min(limit - len(groups), _GROUPS_PER_REQUEST))
            groups += page["groups"]
            before = page["next"]
            if before is None:
                break
        return groups

    def get_task_group(self, task_group_id: str | uuid.UUID) -> list[str]:
        """The ids of the tasks of a group, in the order of their submission."""
        return [str(task["id"]) for task in self._api.list_group(self._connection.ids.group(task_group_id))]

    def why(self, task_id: str | uuid.UUID) -> Why:
        """Why a task is in its state: the reason, its position in the queue, and the state of its endpoint.

        :raises TaskUnknown: if you have no such task.
        """
        return Why.from_json(self._api.why(self._connection.ids.task(task_id)))

    def get_output(self, task_ids: Iterable[str | uuid.UUID]) -> dict[str, TaskOutput]:
        """The last output of tasks, running or ended, by their ids. Tasks that are not yours are left out.

        :raises FarcallError: if the API does not answer.
        """
        return self._connection.output.last([self._connection.ids.task(each) for each in task_ids])

    def iter_output(self, task_id: str | uuid.UUID) -> Iterator[OutputPart]:
        """Yield the output of a task, starting with its last 16 KiB, and wait for more until the task has ended.

        :raises TaskUnknown: if you have no such task.
        :raises FarcallError: if the API does not answer.
        """
        from farcall._task_output import OutputCursor

        cursor = OutputCursor(self._connection.ids.task(task_id))
        for parts in self._connection.output.follow(cursor):
            yield from parts
        if not cursor.state:
            raise TaskUnknown(f"there is no task {task_id}")

    def cancel(self, task_id: str | uuid.UUID) -> Json:
        """Cancel a task: ``outcome`` is "cancelled" (it never runs), "requested" (its endpoint will stop it)
        or "finished" (too late).

        :raises TaskUnknown: if you have no such task.
        """
        [outcome] = self.cancel_many([task_id]).values()
        if outcome["outcome"] == "unknown":
            raise TaskUnknown(f"there is no task {task_id}")
        return outcome

    def cancel_many(self, task_ids: Sequence[str | uuid.UUID]) -> dict[str, Json]:
        """Cancel tasks; the answers of :meth:`cancel` by id. Tasks that are not yours have the outcome "unknown"."""
        from farcall._api import IDS_PER_REQUEST

        outcomes: dict[str, Json] = {}
        ids = list(map(self._connection.ids.task, task_ids))
        for start in range(0, len(ids), IDS_PER_REQUEST):
            outcomes |= self._api.cancel(ids[start : start + IDS_PER_REQUEST])
        return outcomes

    def cancel_group(self, task_group_id: str | uuid.UUID) -> dict[str, Json]:
        """Cancel the tasks of a group; the answers of :meth:`cancel` by id.

        :raises TaskGroupUnknown: if you have no task in that group.
        """
        return self.cancel_many(self.get_task_group(task_group_id))

    def get_tasks(self, *, state: str | None = None, limit: int = 100) -> list[Json]:
        """Your tasks, newest first, without results; with ``state``, those in that state."""
        return Records(itertools.islice(self.iter_tasks(state=state, page=min(limit, _PAGE)), limit))

    def iter_tasks(
        self,
        *,
        state: str | None = None,
        endpoint_id: str | uuid.UUID | None = None,
        since: Moment | None = None,
        until: Moment | None = None,
        page: int = _PAGE,
    ) -> Iterator[Json]:
        """Your tasks that were submitted from ``since`` to before ``until``, newest first, without results: all of
        them, read page by page.

        In the state ``dead-lettered``, those that were not discarded; with ``endpoint_id``, those of all users if the
        endpoint is yours.
        """
        query = {
            "state": state,
            "endpoint_id": None if endpoint_id is None else self.find_endpoint(endpoint_id),
            "since": _epoch_s(since),
            "until": _epoch_s(until),
            "limit": page,
        }
        return _pages(lambda cursor: self._api.page_of_tasks(query | {"before": cursor}), "tasks")

    def get_task_events(self, task_id: str | uuid.UUID) -> list[Json]:
        """The history of a task: ``state, reporter, at`` (epoch seconds), ``attempt, detail``."""
        return Records(self._api.list_events(self._connection.ids.task(task_id)))

    def retry(self, task_id: str | uuid.UUID) -> str:
        """Run a task that has ended again: the same function, arguments, endpoint and options. Returns the id of the
        new task; the old one stays as it ended. A sealed call cannot be repeated by the cloud: the endpoint refuses
        it, and it has to be submitted again.

        :raises TaskUnknown: if you have no such task.
        :raises Conflict: while it has not ended, and when its arguments are not kept any more.
        :raises FarcallError: whatever a submit raises.
        """
        from farcall_common.wire import new_task_id

        found = self._connection.ids.task(task_id)
        if self._connection.sealer.was_sealed(found):
            raise Conflict(
                f"Task {found} is a sealed call, which its endpoint runs as this task only.",
                hint="Submit the call again.",
            )
        return str(self._api.retry(found, as_task_id=new_task_id())["task_id"])

    def discard(self, task_id: str | uuid.UUID) -> None:
        """Discard a dead letter: it is not listed any more, and its arguments are deleted. May be repeated.

        :raises TaskUnknown: if you have no such task.
        :raises Conflict: if it is not a dead letter.
        """
        self._api.discard(self._connection.ids.task(task_id))

    def iter_audit(self, *, since: Moment | None = None, until: Moment | None = None) -> Iterator[Json]:
        """Your actions, and actions of others on your objects, oldest first: ``at`` (epoch seconds), ``identity_id``,
        ``action``, ``object_id``, ``owner_id``, ``detail``."""
        query = {"since": _epoch_s(since), "until": _epoch_s(until), "limit": _PAGE}
        return _pages(lambda cursor: self._api.page_of_audit(query | {"after": cursor}), "entries")

    def iter_usage(
        self,
        by: Sequence[str] = ("day",),
        *,
        of: str = "mine",
        since: dt.date | None = None,
        until: dt.date | None = None,
        endpoint_id: str | uuid.UUID | None = None,
    ) -> Iterator[Json]:
        """Usage of ended tasks: ``tasks``, ``failed``, ``wall_s`` (seconds of each task's last attempt; for a graph, of
        its calls), ``core_s`` and ``gpu_s`` (these seconds times cores and accelerators) and ``stages`` (calls of
        graphs that ran), for each ``day`` (like ``2026-11-01``, UTC), ``identity_id``, ``endpoint_id``, ``function_id``
        and ``account`` of a scheduler.

        :param by: some of ``day``, ``identity``, ``endpoint``, ``function``, ``account``.
        :param of: ``mine``, your tasks; ``endpoints``, those of all users on your endpoints; ``all``, for
            administrators of the deployment.
        :param since: the first day; by default the first of this month. ``until`` is the day after the last one.
        :raises Forbidden: for ``all``, if you are no administrator.
        """
        query = {
            "by": ",".join(by),
            "of": of,
            "since": None if since is None else since.isoformat(),
            "until": None if until is None else until.isoformat(),
            "endpoint_id": None if endpoint_id is None else self.find_endpoint(endpoint_id),
            "limit": _PAGE,
        }
        return _pages(lambda cursor: self._api.page_of_usage(query | {"after": cursor}), "usage")

    # -- functions -----------------------------------------------------------------------------------------------------

    def register_function(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        public: bool = False,
        group: str | None = None,
        ha_endpoint_id: str | None = None,
        memoize: bool = False,
        qos: QoS | Mapping[str, Any] | None = None,
        container: str | None = None,
        environment: Mapping[str, Any] | None = None,
        requirements: Iterable[str] | None = None,
        sign_with: str | os.PathLike[str] | None = None,
        container_uuid: str | uuid.UUID | None = None,
    ) -> str:
        """Register a function and return its id. ``description`` is the docstring unless given.

        :param container: id or name of a container of yours in which calls of the function run, unless they name
            another one. Its definition is copied: it is the function's, also for others who run the function, and if
            the container is deleted.
        :param container_uuid: the same, as ``globus_compute_sdk`` spells it.
        :param environment: the same without a registration (see :attr:`Executor.environment`).
        :param requirements: the same: packages that the endpoint installs (see :attr:`Executor.requirements`).
        :param memoize: whether equal calls are memoized by default (see :attr:`Executor.memoize`).
        :param qos: the latency that calls are to hold by default (see :class:`QoS`).
        :param sign_with: the file of an SSH private key that signs name and code, for endpoints that run signed
            functions only; or of a public key (``.pub``) that an ssh-agent has.
        :param group: only None, as ``ha_endpoint_id``: share the function with a group (:meth:`share_function`).
        :raises SerializationError: if the function cannot be sent.
        :raises ConfigurationError: if the key cannot sign.
        :raises Unsupported: for other sharing, which is not enforced.
        """
        refuse("group", group, hint='Share the function: client.share_function(function_id, "group:ID").')
        refuse("ha_endpoint_id", ha_endpoint_id, hint="Let the endpoint allow this function only.")
        from farcall._functions import registration

        request = registration(
            function,
            name=name,
            description=description,
            metadata=metadata,
            public=public,
            memoize=memoize,
            qos=qos,
            serializer=self.fx_serializer,
            container=container or (None if container_uuid is None else str(container_uuid)),
            environment=environment,
            requirements=requirements,
        )
        return self._api.register_function(request if sign_with is None else _signed(request, sign_with))

    def update_function(
        self,
        function_id: str | uuid.UUID,
        function: Callable[..., Any] | None = None,
        *,
        name: str | None = None,
        description: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        public: bool | None = None,
        memoize: bool | None = None,
        qos: QoS | Mapping[str, Any] | None = None,
        container: str | None = None,
        environment: Mapping[str, Any] | None = None,
        requirements: Iterable[str] | None = None,
        sign_with: str | os.PathLike[str] | None = None,
    ) -> int:
        """Change a function of yours, and return the number of its newest version.

        Another ``function``, ``metadata``, ``qos``, ``container``, ``environment`` or ``requirements`` make a new
        version, which later calls by the id run; old versions stay, and are called by ``<id>@<version>``. Name,
        description and sharing are the same for all versions. An argument that is None changes nothing; an empty
        ``container`` takes the environment away, and ``QoS()`` the latency target.

        Another name or other code end a signature; ``sign_with`` signs the newest version as it is after the change.

        :raises SerializationError: if the function cannot be sent.
        :raises ConfigurationError: if the key cannot sign.
        """
        from farcall._functions import environment_fields, qos_fields, registration

        body: Json = {"meta": None if metadata is None else dict(metadata)}
        if function is not None:
            whole = registration(function, metadata=metadata, serializer=self.fx_serializer)
            body = {key: whole[key] for key in ("function_code", "meta")}
        body |= {"function_name": name, "description": description, "public": public, "memoize": memoize}
        body |= environment_fields(container=container, environment=environment, requirements=requirements)
        body |= qos_fields(qos)
        given = {key: value for key, value in body.items() if value is not None}
        if sign_with is not None:
            now = {} if {"function_name", "function_code"} <= given.keys() else self.get_function(function_id)
            parts = {key: given.get(key) or now[key] for key in ("function_name", "function_code")}
            given["signature"] = _signed(parts, sign_with)["signature"]
        return int(self._api.update_function(self._function_id(function_id, for_change=True), given)["version"])

    def get_function(self, function_id: str | uuid.UUID, *, version: int | None = None) -> Json:
        """``function_uuid, function_name, function_code, description, metadata`` of a function, or a version of it."""
        return self._api.get_function(self._function_id(function_id), version=version)

    def get_functions(self, *, search: str = "", limit: int = 100) -> list[Json]:
        """Your functions, newest first; with ``search``, those that have it in their name or description.

        ``version`` is the number of the newest version, and so how many there are.
        """
        return Records(self._api.list_functions(search=search, limit=limit))

    def find_function(self, function: str | uuid.UUID) -> Json:
        """The function of an id, ``<id>@<version>`` or an alias of yours: ``function_uuid, version, reference`` (for
        submits), ``function_name``, ``metadata`` and so on.

        Functions of yours are also found by their name, the newest one with it, and by the first digits of their id. A
        method that changes a function takes a name only if one function has it.

        :raises FunctionUnknown: if there is no such function.
        :raises InvalidRequest: if several have an id that begins so.
        """
        return self._api.find_function(self._connection.ids.function(function))

    def _function_id(self, function: str | uuid.UUID, *, for_change: bool = False) -> str:
        return self._connection.ids.function(function, for_change=for_change).partition("@")[0]

    def get_function_versions(self, function_id: str | uuid.UUID, *, limit: int = 100) -> list[Json]:
        """Versions of a function, newest first: ``version, function_hash, metadata, created_at`` (epoch seconds)."""
        return self._api.list_versions(self._function_id(function_id), limit=limit)

    def delete_function(self, function_id: str | uuid.UUID) -> None:
        """Delete a function with its versions and aliases. Open tasks of other users with it are cancelled; of yours,
        those keep running whose endpoint has it."""
        self._api.delete_function(self._function_id(function_id, for_change=True))

    def set_alias(self, name: str, function_id: str | uuid.UUID, *, version: int | None = None) -> None:
        """Set an alias of yours for a function; without ``version``, for its newest version.

        Replaces an alias of the same name.
        """
        self._api.put_alias(
            {"name": name, "function_id": self._function_id(function_id, for_change=True), "version": version}
        )

    def get_aliases(self) -> list[Json]:
        """Your aliases: ``name, function_uuid, version`` (None for the newest)."""
        return self._api.list_aliases()

    def delete_alias(self, name: str) -> None:
        """Delete an alias. The function stays."""
        self._api.delete_alias(name)

    # -- containers ----------------------------------------------------------------------------------------------------

    def register_container(
        self,
        location: str | os.PathLike[str] = "",
        container_type: str = "",
        name: str = "",
        description: str = "",
        *,
        preload: Iterable[str] | None = None,
        requirements: Iterable[str] | None = None,
    ) -> str:
        """Register an environment for tasks and functions, and return its id. Images are built and stored elsewhere;
        the only thing that one needs is Python 3.11 or later.

        ::

            client.register_container("/images/xtal.sif", "apptainer", "xtal", preload=["numpy"])
            client.register_container(requirements=["polars==1.*"], name="frames")

        :param location: the image, in the form of its type; the directory of a root file system (bubblewrap,
            charliecloud) or of a Python installation (venv, conda) on the endpoint's nodes.
        :param container_type: apptainer, bubblewrap, charliecloud, conda, docker, podman, podman-hpc, shifter,
            singularity, uv or venv; with ``requirements`` it is uv.
        :param name: its name in :meth:`Client.run` and elsewhere; else its id.
        :param preload: modules that templates import, for the workers forked from them; else those that earlier tasks
            imported.
        :param requirements: packages that the endpoint installs, as pip takes them; then there is no ``location``.
        :raises InvalidRequest: for a type that there is not, or a location that it cannot have.
        :raises Conflict: for the name of another container of yours.
        """
        body: Json = {
            "name": name,
            "type": container_type or ("uv" if requirements else ""),
            "location": os.fspath(location),
            "description": description or None,
        }
        for field, given in (("preload", preload), ("requirements", requirements)):
            if isinstance(given, str):
                raise TypeError(f"{field}: expected a list, got str")
            body |= {} if given is None else {field: list(given)}
        return self._api.register_container(body)

    def get_container(self, container_uuid: str | uuid.UUID, container_type: str | None = None) -> Json:
        """``container_uuid, name, type, location, requirements, preload, description, created_at`` of a container of
        yours, by id or name; with ``container_type``, only of that type."""
        if container_type is None:
            return Record(self._api.find_container(str(container_uuid)))
        return Record(self._api.get_container(as_id(container_uuid), container_type))

    def get_container_build_status(self, container_id: str | uuid.UUID) -> str:
        """Always "provided": no images are built here.

        :raises ContainerUnknown: if you have no such container.
        """
        return self._api.get_build_status(as_id(container_id))

    def get_containers(self, *, limit: int = 100) -> list[Json]:
        """Your containers, newest first."""
        return Records(self._api.list_containers(limit=limit))

    def delete_container(self, container: str | uuid.UUID) -> None:
        """Delete a container of yours, by id or name. Its image stays."""
        self._api.delete_container(str(container))

    # -- tokens and service accounts -----------------------------------------------------------------------------------

    def create_token(
        self,
        name: str,
        *,
        scopes: Iterable[str],
        endpoints: Iterable[str | uuid.UUID] | None = None,
        functions: Iterable[str | uuid.UUID] | None = None,
        expires_in_s: int | None = None,
        account_id: str | uuid.UUID | None = None,
    ) -> Json:
        """Make a token for a program. Returns ``token``, the secret that is not shown again, ``token_id``,
        ``expires_at`` (epoch seconds) and what it permits.

        :param scopes: operations, such as ``tasks:submit`` and ``tasks:read``.
        :param endpoints: the token permits operations on these only; ``functions`` likewise.
        :param expires_in_s: default 90 days, at most 366.
        :param account_id: a service account of yours, for which the token is.
        :raises Forbidden: with a token: this needs your login.
        """
        body = {
            "name": name,
            "scopes": list(scopes),
            "endpoints": None if endpoints is None else list(map(self.find_endpoint, endpoints)),
            "functions": None if functions is None else list(map(str, functions)),
            "expires_in_s": expires_in_s,
            "account_id": None if account_id is None else str(account_id),
        }
        return self._api.create_token(body)

    def get_tokens(self) -> list[Json]:
        """Your tokens, and those of your service accounts, newest first, without their secrets."""
        return self._api.list_tokens()

    def revoke_token(self, token_id: str | uuid.UUID) -> None:
        """Revoke a token: it is refused within 10 seconds."""
        self._api.revoke_token(str(token_id))

    def create_account(self, name: str) -> Json:
        """Create a service account, an identity for programs that belongs to you: ``account_id, name, owner_id,
        created_at``. It has only tokens and the rights that are given to it."""
        return self._api.create_account(name)

    def get_accounts(self) -> list[Json]:
        """Your service accounts, by name."""
        return self._api.list_accounts()

    def delete_account(self, account_id: str | uuid.UUID) -> None:
        """Delete a service account of yours with its tokens and endpoints."""
        self._api.delete_account(str(account_id))

    # -- endpoints -----------------------------------------------------------------------------------------------------

    def get_endpoints(self, *, role: str = "any") -> list[Json]:
        """``uuid, name, display_name, owner`` of endpoints: ``role`` "any" for all you may use, "owner" for yours."""
        return Records(self._api.list_endpoints(role=role))

    def find_endpoint(self, name: str | uuid.UUID | None = None) -> str:
        """The id of an endpoint: by its name, by its id, or by the first digits of it (4 or more). Without any of them,
        ``FARCALL_ENDPOINT``, else ``endpoint`` in ``config.toml``, else your only one.

        Every method takes these in place of an id. Your own endpoints come before those of others with the same name.

        :raises EndpointUnknown: if there is no such endpoint.
        :raises ConfigurationError: if several are meant, or you have none.
        """
        return self._connection.names.find(name)

    def register_endpoint(
        self,
        name: str,
        endpoint_id: str | uuid.UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        multi_user: bool | None = None,
        display_name: str | None = None,
        allowed_functions: Sequence[str | uuid.UUID] | None = None,
        *,
        public: bool | None = None,
        waiting_tasks: Literal["cancel", "keep"] | None = None,
        subscription_id: str | uuid.UUID | None = None,
        auth_policy: str | uuid.UUID | None = None,
        high_assurance: bool | None = None,
        admins: Sequence[str | uuid.UUID] | None = None,
    ) -> Json:
        """Register an endpoint, or change the one with ``endpoint_id``: its ``endpoint_id`` and how to reach it.

        An argument that is None changes nothing. `farcall-endpoint start` registers its own endpoint.

        :param public: whether all users may use it.
        :param allowed_functions: ids of the only functions that it runs; those of other users as ``<id>@<version>``.
        :param waiting_tasks: with ``endpoint_id``, whether open tasks that would be refused now are cancelled
            ("cancel", the default if rights are taken away) or may still run ("keep").
        :param auth_policy: only None, as ``high_assurance`` and ``admins``, which are not enforced.
        :raises Unsupported: for those.
        """
        for name_of, value in (("auth_policy", auth_policy), ("high_assurance", high_assurance), ("admins", admins)):
            refuse(name_of, value, hint="Call share_endpoint afterwards.")
        body = {
            "endpoint_name": name,
            "metadata": metadata,
            "multi_user": multi_user,
            "display_name": display_name,
            "allowed_functions": None if allowed_functions is None else [as_function_id(f) for f in allowed_functions],
            "public": public,
            "waiting_tasks": waiting_tasks,
            "subscription_uuid": None if subscription_id is None else as_id(subscription_id),
        }
        given = {key: value for key, value in body.items() if value is not None}
        return self._api.put_endpoint(None if endpoint_id is None else as_id(endpoint_id), given)

    def get_endpoint(self, endpoint_id: str | uuid.UUID) -> Json:
        """The registration of an endpoint."""
        return Record(self._api.get_endpoint(self.find_endpoint(endpoint_id)))

    #: Its name in ``globus_compute_sdk``.
    get_endpoint_metadata = get_endpoint

    def get_endpoint_status(self, endpoint_id: str | uuid.UUID) -> Json:
        """``status`` ("online", "offline") and ``details``: numbers of managers, workers, tasks and blocks, which the
        endpoint reported at ``reported_at`` (epoch seconds), ``age_s`` seconds ago. Those two are left out if it has
        reported none. ``problem`` is there if the endpoint reported one and you may use it."""
        return Record(self._api.get_endpoint_status(self.find_endpoint(endpoint_id)))

    def get_allowed_functions(self, endpoint_id: str | uuid.UUID) -> Json:
        """``restricted``, and if so, ``functions``: the only ones that the endpoint runs."""
        return self._api.get_allowed_functions(self.find_endpoint(endpoint_id))

    def iter_endpoint_tasks(
        self,
        endpoint_id: str | uuid.UUID,
        *,
        submitter: str | None = None,
        function_id: str | uuid.UUID | None = None,
    ) -> Iterator[Json]:
        """Open tasks of an endpoint of yours, of all submitters: ``task_id``, ``submitter``, ``function_id``,
        ``function_version``, ``status``, ``age_s``. With ``submitter`` or ``function_id``, those only."""
        query = {
            "submitter": submitter,
            "function_id": None if function_id is None else str(function_id),
            "limit": _PAGE,
        }
        found = self.find_endpoint(endpoint_id)
        return _pages(lambda cursor: self._api.page_of_endpoint_tasks(found, query | {"after": cursor}), "tasks")

    def cancel_endpoint_tasks(
        self,
        endpoint_id: str | uuid.UUID,
        task_ids: Sequence[str] | None = None,
        *,
        submitter: str | None = None,
        function_id: str | uuid.UUID | None = None,
    ) -> dict[str, Json]:
        """Cancel tasks at an endpoint of yours, of any submitters: ``task_ids``, or else the open ones of a
        submitter, of a function, or of both. The answers of :meth:`cancel` by id.

        :raises InvalidRequest: with both, or with nothing.
        """
        from farcall._api import IDS_PER_REQUEST

        found, outcomes = self.find_endpoint(endpoint_id), dict[str, Json]()
        if task_ids:
            for start in range(0, len(task_ids), IDS_PER_REQUEST):
                body: Json = {"task_ids": task_ids[start : start + IDS_PER_REQUEST], "submitter": submitter}
                outcomes |= self._api.cancel_endpoint_tasks(found, body | _function(function_id))["results"]
            return outcomes
        after = None
        while True:
            body = {"submitter": submitter, "after": after}
            answer = self._api.cancel_endpoint_tasks(found, body | _function(function_id))
            outcomes |= answer["results"]
            if (after := answer.get("next")) is None:
                return outcomes

    def get_endpoint_keys(self, endpoint_id: str | uuid.UUID) -> list[Json]:
        """The keys with which the agent of an endpoint of yours may connect, the oldest first: ``public_key``,
        ``added_at`` (epoch seconds)."""
        return list(self._api.endpoint_keys(self.find_endpoint(endpoint_id))["keys"])

    def revoke_endpoint_key(self, endpoint_id: str | uuid.UUID, public_key: str) -> None:
        """Revoke a key of an endpoint of yours. The session of an agent with this key ends."""
        self._api.revoke_endpoint_key(self.find_endpoint(endpoint_id), public_key)

    def delete_endpoint(self, endpoint_id: str | uuid.UUID) -> None:
        """Delete an endpoint of yours."""
        self._api.delete_endpoint(self.find_endpoint(endpoint_id))

    def stop_endpoint(self, endpoint_id: str | uuid.UUID) -> None:
        """Raise Unsupported: an endpoint is stopped on its machine.

        :raises Unsupported: always.
        """
        raise Unsupported(
            f"endpoint {endpoint_id} cannot be stopped from here",
            hint="Run `farcall-endpoint stop` on its machine.",
        )

    def _info(self, task: Json) -> TaskInfo:
        from farcall._functions import as_serializer
        from farcall._results import ResultReader, origin_from_json, result_from_json
        from farcall._sealing import without_seal

        result, data = result_from_json(task)
        connection = self._connection
        reader = ResultReader(
            self._api,
            connection.blobs,
            connection.policy,
            connection.sealer,
            allowed=as_serializer(self.fx_serializer).allowed,
        )
        value, exception, origin = None, None, origin_from_json(task)
        is_proven = bool((result.error or {}).get("sealed"))
        try:
            result, opened = reader.opened(result, data, origin)
        except FarcallError as error:
            result, exception, is_proven = without_seal(result), error, False
        else:
            try:
                value, is_proven = reader.read(result, opened, origin), True
            except FarcallError as error:
                exception = error
        details = result.details
        load = functools.partial(
            reader.read_other, origin=origin, task_id=result.task_id, signed=is_signed(details, "values")
        )
        return TaskInfo(
            task_id=result.task_id,
            state=None if isinstance(exception, TaskUnknown) else result.state,
            task_group_id=result.task_group_id,
            endpoint_id=task.get("endpoint_id") or "",
            function_id=task.get("function_id") or "",
            attempt=result.attempt,
            finished_at=result.finished_at,
            retry_of=task.get("retry_of") or "",
            environment=task.get("environment") or "",
            timings=result.timings,
            details=details,
            value=value,
            exception=exception,
            stages=stages_of(details, lambda data, what: load(data, what=what)),
            progress=read_progress(details.get(PROGRESS)),
            staging=read_staging(details.get(STAGING)),
            files=read_files(details.get(FILES)),
            target=target_of(task),
            by_service=fields_by_service(
                details, state=not is_proven, error=not is_proven and isinstance(exception, TaskError)
            ),
        )


def info_of(client: Client, task_id: str | uuid.UUID) -> TaskInfo:
    """A task as it is now, in any state, with its stages if it is a graph.

    :raises TaskUnknown: if the caller has no such task.
    """
    return client._info(client._api.get_task(client._connection.ids.task(task_id)))


def connection_of(client: Client) -> Connection:
    """The connection of a client, for its executors and commands."""
    return client._connection


def _unknown(task_id: str) -> TaskInfo:
    return TaskInfo(task_id, None, exception=TaskUnknown(f"there is no task {task_id}"))


def _pages(request: Callable[[str | None], Json], name: str) -> Iterator[Json]:
    """The entries of an answer and of all later pages."""
    answer = request(None)
    yield from answer[name]
    while (cursor := answer.get("next")) is not None:
        answer = request(cursor)
        yield from answer[name]


def _function(function_id: str | uuid.UUID | None) -> Json:
    return {} if function_id is None else {"function_id": str(function_id)}


def _epoch_s(at: Moment | None) -> float | None:
    return at.timestamp() if isinstance(at, dt.datetime) else at
