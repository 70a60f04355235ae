"""The API as methods, for one call at a time. For many calls, see :class:`farcall.Executor`."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Unpack

from farcall._authorizer import bearer_token
from farcall._catalogue import Catalogue
from farcall._history import History
from farcall._ids import as_id
from farcall._settings import Settings
from farcall._tasks import TaskInfo
from farcall._unsupported import refuse
from farcall._why import Why
from farcall_common.backoff import Backoff
from farcall_common.errors import FarcallError, TaskUnknown, Unsupported

if TYPE_CHECKING:
    from types import TracebackType

    import httpx

    from farcall._authorizer import Authorizer
    from farcall._batch import Batch
    from farcall_common.payload import Serializer
    from farcall_common.task_options import OwnOptionsDict

_PARALLEL_TRANSFERS: Final = 4
_IDS_PER_REQUEST: Final = 500
_GROUPS_PER_REQUEST: Final = 1000
_FIRST_POLL_S: Final = 0.02
_LONGEST_POLL_S: Final = 2.0

Json = dict[str, Any]


class Client(Catalogue, History):
    """Talks to the API of a deployment. May be used from any thread, and in forked children.

    Requests that fail for want of a network, or because the API asks to come again later, are repeated with a random
    back-off. Repeating is harmless: tasks carry ids that are made here.

    :param api_url: address of the API; else ``FARCALL_API_URL``, else ``config.toml`` (see :class:`Settings`).
    :param token: bearer token; else ``FARCALL_TOKEN``, else that of `farcall login`, which is renewed by itself.
    :param timeout_s: how long one attempt at a request may wait for the network, in seconds.
    :param patience_s: how long a request is repeated before its error is raised, in seconds.
    :param code_serialization_strategy: how functions travel, instead of the fastest way that works: a strategy, its
        name, or one of Globus Compute's.
    :param data_serialization_strategy: the same for arguments.
    :param authorizer: a ``globus_sdk`` authorizer, which says who is calling instead of ``token``.
    :param do_version_check: ask the API for its version at once, and so whether it can be reached.
    :param environment: only None, as the next two: what ``globus_compute_sdk`` has them for is said by ``api_url``,
    :param local_compute_services: by a local tier,
    :param app: and by ``authorizer``.
    :param transport: replaces the network, for tests.
    :raises ConfigurationError: if address or token are not to be found.
    :raises Unsupported: for an argument that cannot be honoured.

    Every method raises :class:`FarcallError`: the subclass says what is wrong, ``hint`` what to do about it.
    """

    def __init__(
        self,
        api_url: str | None = None,
        token: str | None = None,
        *,
        timeout_s: float = 30.0,
        patience_s: float = 60.0,
        code_serialization_strategy: object = None,
        data_serialization_strategy: object = None,
        authorizer: Authorizer | None = None,
        do_version_check: bool = False,
        environment: str | None = None,
        local_compute_services: bool = False,
        app: object = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        refuse("environment", environment, hint="Say with api_url, or FARCALL_API_URL, which deployment you mean.")
        refuse("local_compute_services", local_compute_services, hint="`farcall local up` starts a local tier.")
        refuse("app", app, hint="Pass authorizer=app.get_authorizer(...) with the resource server of the deployment.")
        settings = Settings.resolve(api_url, token if authorizer is None else bearer_token(authorizer))
        if settings.login is not None:
            from farcall_common.login import KeptLogin

            authorizer = KeptLogin(settings.login, environ=os.environ)
        # Imported at the first use: the network stack takes longer to load than the rest of the package together.
        from farcall._api import Api
        from farcall._blobs import Blobs
        from farcall._http import Http
        from farcall._strategies import as_serializer
        from farcall._verdict import Judge

        self.api_url: str = settings.api_url
        self._http = Http(
            settings, timeout_s=timeout_s, patience_s=patience_s, authorizer=authorizer, transport=transport
        )
        self._api = Api(self._http)
        self._blobs = Blobs(self._api)
        self._judge = Judge(self._api)
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
        """Give back the connections."""
        self._http.close()

    def version_check(self) -> Json:
        """Ask the API for its version and those of the oldest SDK and endpoint that it serves."""
        return self._api.version()

    def whoami(self) -> Json:
        """``identity_id, username, linked`` (your other identities), ``provider`` (who vouches for you), ``limits``."""
        return self._api.whoami()

    def get_result_amqp_url(self) -> Json:
        """There is no message broker: results come over the forwarder's stream, to an :class:`Executor`.

        :raises Unsupported: always.
        """
        raise Unsupported("there is no message broker", hint="An Executor gets its results pushed.")

    def logout(self) -> None:
        """Forget who is calling.

        :raises Unsupported: always: this client was told, by argument, environment or file, and logged nobody in.
        """
        raise Unsupported(
            "nobody was logged in here", hint="`farcall logout` forgets a login; FARCALL_TOKEN is yours to take away."
        )

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
        :param container: id or name of a container of yours to run in. A function that takes arguments of one of these
            names is called by way of :meth:`create_batch`.

        :raises SerializationError: if an argument cannot be sent; it says which.
        :raises PayloadTooLarge: if the arguments take more than 10 MiB.
        """
        batch = self.create_batch(memoize=memoize, container=container)
        task_id = batch.add(function_id, args, kwargs)
        self.batch_run(endpoint_id, batch)
        return task_id

    def get_worker_hardware_details(self, endpoint_id: str | uuid.UUID) -> str:
        """Ask a worker of an endpoint for its machine: the id of a task whose result is the answer as text."""
        from farcall._hardware import SOURCE

        return self.run(endpoint_id=endpoint_id, function_id=self.register_source_code(*SOURCE))

    def create_batch(
        self,
        task_group_id: str | uuid.UUID | None = None,
        resource_specification: Mapping[str, Any] | None = None,
        user_endpoint_config: Mapping[str, Any] | None = None,
        create_websocket_queue: bool = False,
        result_serializers: Iterable[object] | None = None,
        **options: Unpack[OwnOptionsDict],
    ) -> Batch:
        """A batch to :meth:`Batch.add` calls to; the arguments hold for all of them (see :class:`Executor`).

        :param options: the options of tasks that an :class:`Executor` takes, too.
        :raises Unsupported: for ``create_websocket_queue``: there are none, an :class:`Executor` listens by itself.
        """
        from farcall._batch import Batch
        from farcall._strategies import strategy_names
        from farcall_common.task_options import TaskOptions

        refuse("create_websocket_queue", create_websocket_queue, hint="An Executor gets its results pushed.")
        task_options = TaskOptions.of(
            resource_specification=resource_specification,
            user_endpoint_config=user_endpoint_config,
            result_serializers=strategy_names(result_serializers),
            **options,
        )
        group_id = None if task_group_id is None else as_id(task_group_id)
        return Batch(
            task_group_id=group_id,
            options=task_options,
            serializer=self.fx_serializer,
            reference_of=self._api.reference_of,
        )

    def batch_run(self, endpoint_id: str | uuid.UUID, batch: Batch) -> Json:
        """Submit a batch: ``request_id, task_group_id, endpoint_id, tasks`` (ids by function id, in order).

        Large batches go out in several requests. If one fails, the error is raised and the batch may be run again:
        tasks that were taken already are not taken twice.

        :raises EndpointIncompatible: if the endpoint could not read an argument; nothing is sent then.
        """
        from farcall._submission import check_answer, chunks, encode_submit

        endpoint_id = str(endpoint_id)
        for function_id, needs in batch.needs:
            self._judge.check(endpoint_id, needs, what=f"an argument of {function_id}")
        options = self._judge.asking(endpoint_id, batch._options)
        answer: Json = {"request_id": "", "endpoint_id": endpoint_id, "tasks": {}}
        for chunk in chunks(batch.prepared(self._blobs, parallel=_PARALLEL_TRANSFERS)):
            body, ids = encode_submit(chunk, task_group_id=batch.task_group_id, options=options)
            part = self._api.submit(endpoint_id, body)
            check_answer(part, ids)
            answer["request_id"] = part.get("request_id", "")
            for function_id, task_ids in ids.items():
                answer["tasks"].setdefault(function_id, []).extend(task_ids)
        return answer | {"task_group_id": batch.task_group_id}

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def get_task(self, task_id: str | uuid.UUID) -> TaskInfo:
        """A task as it is now, with its result if it has one. :meth:`get_batch_result` shows those that failed, too.

        :raises TaskFailed: if the task failed.
        :raises TaskUnknown: if you have no such task.
        """
        info = self._info(self._api.get_task(str(task_id)))
        if info.state == "failed" and info.exception is not None:
            raise info.exception
        return info

    def get_result(self, task_id: str | uuid.UUID, *, wait_s: float = 0.0) -> Any:
        """What a task returned, waiting up to ``wait_s`` seconds for it.

        :raises TaskPending: if it has not ended by then.
        :raises TaskFailed, TaskCancelled, TaskLost: if it did not succeed; with the remote traceback.
        """
        give_up_at = time.monotonic() + wait_s
        polling = Backoff(first_s=_FIRST_POLL_S, most_s=_LONGEST_POLL_S)
        while True:
            info = self.get_task(task_id)
            left_s = give_up_at - time.monotonic()
            if not info.pending or left_s <= 0:
                return info.result()
            time.sleep(min(left_s, polling.next_s()))

    def get_batch_result(self, task_ids: Iterable[str | uuid.UUID]) -> dict[str, TaskInfo]:
        """All of these tasks as they are now, in the order asked for, whatever they ended with.

        A task that failed, is unknown, or has a result that cannot be read here is there like any other: its
        :meth:`TaskInfo.result` raises, and ``exception`` says why.
        """
        wanted = list(dict.fromkeys(map(str, task_ids)))
        found: dict[str, Json] = {}
        for start in range(0, len(wanted), _IDS_PER_REQUEST):
            asked = wanted[start : start + _IDS_PER_REQUEST]
            while asked:  # an answer has a largest size; what it left out is asked for again
                answer = self._api.batch_status(asked)
                if not answer:
                    break
                found |= answer
                asked = [task_id for task_id in asked if task_id not in found]
        with ThreadPoolExecutor(_PARALLEL_TRANSFERS, thread_name_prefix="farcall-download") as pool:
            infos = pool.map(self._info, found.values())
            known = dict(zip(found, infos, strict=True))
        return {task_id: known.get(task_id) or _unknown(task_id) for task_id in wanted}

    def get_task_groups(self, *, limit: int = 100) -> list[Json]:
        """Your task groups, newest first: ``task_group_id, created_at`` (epoch seconds), ``tasks`` (how many) and
        ``states`` (how many in each)."""
        groups: list[Json] = []
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
        return [str(task["id"]) for task in self._api.list_group(str(task_group_id))]

    def why(self, task_id: str | uuid.UUID) -> Why:
        """Why a task is where it is: what it waits for, its place in the queue, and how its endpoint is.

        :raises TaskUnknown: if you have no such task.
        """
        return Why.from_json(self._api.why(str(task_id)))

    def cancel(self, task_id: str) -> Json:
        """Cancel a task: ``outcome`` is "cancelled" (it never runs), "requested" (its endpoint was told to stop it)
        or "finished" (too late).

        :raises TaskUnknown: if you have no such task.
        """
        outcome = self.cancel_many([task_id])[task_id]
        if outcome["outcome"] == "unknown":
            raise TaskUnknown(f"there is no task {task_id}")
        return outcome

    def cancel_many(self, task_ids: Sequence[str]) -> dict[str, Json]:
        """Cancel tasks; what :meth:`cancel` returns, by id. Tasks that are not yours have the outcome "unknown"."""
        outcomes: dict[str, Json] = {}
        for start in range(0, len(task_ids), _IDS_PER_REQUEST):
            outcomes |= self._api.cancel(task_ids[start : start + _IDS_PER_REQUEST])
        return outcomes

    def _info(self, task: Json) -> TaskInfo:
        from farcall._ends import ResultReader, end_from_json

        end, data = end_from_json(task)
        value, exception = None, None
        try:
            value = ResultReader(self._api, self._blobs).read(end, data)
        except FarcallError as error:
            exception = error
        return TaskInfo(
            task_id=end.task_id,
            state=None if isinstance(exception, TaskUnknown) else end.state,
            task_group_id=end.task_group_id,
            endpoint_id=task.get("endpoint_id") or "",
            function_id=task.get("function_id") or "",
            attempt=end.attempt,
            finished_at=end.finished_at,
            retry_of=task.get("retry_of") or "",
            timings=end.timings,
            details=end.details,
            value=value,
            exception=exception,
        )


def _unknown(task_id: str) -> TaskInfo:
    return TaskInfo(task_id, None, exception=TaskUnknown(f"there is no task {task_id}"))
