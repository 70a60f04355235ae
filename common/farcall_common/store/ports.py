"""Ports of the stores. Each has a real adapter and an in-memory fake; one test suite runs on both.

Every call blocks: Lambda handlers call them directly, the forwarder from a small pool of threads. All calls may raise
:class:`~farcall_common.errors.Unavailable` when the store cannot be reached. No call of
:class:`Queue` takes the time: its clock is the server's, so that callers' clocks may differ. Other calls take it as an
argument, so that a test controls the clock.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Protocol, Self

from farcall_common.errors import EndpointInUse, ErrorRecord, Fenced, QueueDataLost
from farcall_common.qos_report import QosReport
from farcall_common.store.model import (
    Action,
    ApiToken,
    AuditEntry,
    BlobRef,
    CancelOutcome,
    Container,
    Endpoint,
    EndpointKey,
    FileAnswer,
    FileAsk,
    FileMessage,
    ForwarderInfo,
    Function,
    FunctionAlias,
    FunctionBody,
    HeldLeases,
    LeasedTask,
    MaintenanceResult,
    OpenTask,
    OutputAnswer,
    OutputAsk,
    PeerKey,
    Presence,
    QueuedTask,
    QueueMemory,
    QueuePosition,
    Quota,
    Right,
    RunningLimit,
    ServiceAccount,
    Share,
    SharedObject,
    SharedResults,
    SpoolMark,
    Task,
    TaskEvent,
    TaskGroup,
    TaskResult,
    Team,
    TeamMember,
    TokensTaken,
    Usage,
    UsageBy,
    Withdrawal,
)
from farcall_common.wire.states import TaskState


class Database(Protocol):
    """The server of the records, and named locks."""

    def ping(self) -> None:
        """Raise Unavailable unless the database answers."""

    def close(self) -> None:
        """Close the connections; no port of this database can be used afterwards."""

    def size_bytes(self) -> int:
        """Bytes of all tables and indexes on the disk."""

    def try_lock(self, name: str, *, ttl_s: float) -> bool:
        """Whether the caller got the lock: it is held until :meth:`unlock`, or for ``ttl_s`` seconds on the database's
        clock."""

    def unlock(self, name: str) -> None:
        """Release a lock."""


class Audited(Protocol):
    """Records whose changes are audited."""

    def audited(self, *entries: AuditEntry, quota: Quota | None = None) -> Self:
        """The same records, for one call that changes something: it appends the entries in its own transaction. A call
        that raises appends nothing.

        With ``quota``, for one call that adds something of an owner: it raises QuotaExceeded instead if the owner has
        as many already. Of two calls at the same moment, the second counts what the first added.
        """


class Functions(Audited, Protocol):
    """Functions with their versions and aliases, and containers."""

    def add_function(self, function: Function) -> None:
        """Add a function, or a version of one. Versions never change; name, description and sharing of the function are
        replaced.

        :raises Conflict: if it has that version already, or belongs to another owner.
        """

    def get_functions(self, function_ids: Sequence[str], *, with_bodies: bool = True) -> Mapping[str, Function]:
        """The newest versions of functions, by id. Without bodies, which may be megabytes, those are empty."""

    def update_function(self, function: Function) -> None:
        """Change name, description and sharing of a function that exists."""

    def get_version(self, function_id: str, version: int, *, with_body: bool = True) -> Function | None: ...
    def get_bodies(self, wanted: Collection[tuple[str, str]]) -> Mapping[str, Mapping[str, FunctionBody]]:
        """Names, bodies and signatures by function id and body hash; ``wanted`` are ids of functions, each with the
        hash of one of its versions. Functions with equal bodies have their own names; the newest version with a body
        has its signature."""

    def list_versions(self, function_id: str, *, limit: int = 100) -> Sequence[Function]:
        """Versions of a function, newest first, without bodies; ``created_at`` is when a version was added."""

    def list_functions(self, owner_id: str, *, search: str = "", limit: int = 100) -> Sequence[Function]:
        """Functions of an owner, newest first, whose name or description contains ``search``."""

    def count_functions(self, owner_id: str, *, limit: int) -> int:
        """How many functions an owner has, each version counted; counting stops at ``limit``."""

    def delete_function(self, function_id: str) -> bool:
        """Delete a function, all its versions, its aliases and its shares."""

    def put_alias(self, alias: FunctionAlias) -> None:
        """Add or replace an alias.

        :raises FunctionUnknown: if the function does not exist.
        """

    def get_alias(self, owner_id: str, name: str) -> FunctionAlias | None: ...
    def list_aliases(self, owner_id: str) -> Sequence[FunctionAlias]:
        """An owner's aliases by name."""

    def delete_alias(self, owner_id: str, name: str) -> bool: ...

    # containers
    def add_container(self, container: Container) -> None:
        """:raises Conflict: if its owner has one with that name already."""

    def get_container(self, container_id: str) -> Container | None: ...
    def find_container(self, owner_id: str, name: str) -> Container | None: ...
    def list_containers(self, owner_id: str, *, limit: int = 100) -> Sequence[Container]:
        """An owner's containers, newest first."""

    def count_containers(self, owner_id: str, *, limit: int) -> int:
        """How many containers an owner has; counting stops at ``limit``."""

    def delete_container(self, container_id: str) -> bool: ...


class Endpoints(Audited, Protocol):
    """Endpoints: registration, presence, keys, spools, withdrawn rights."""

    def put_endpoint(self, endpoint: Endpoint) -> None:
        """Insert, or update what the owner may change; ownership never changes."""

    def change_endpoint(self, endpoint_id: str, changes: Mapping[str, object]) -> None:
        """Set these of the fields that the owner may change, and no others. A deleted endpoint stays deleted."""

    def get_endpoint(self, endpoint_id: str) -> Endpoint | None: ...
    def list_endpoints(
        self, owner_id: str, *, shared: Collection[str] | None = None, limit: int = 1000
    ) -> Sequence[Endpoint]:
        """Endpoints of an owner; with ``shared``, also those with these ids, and public ones. Newest first; only ids,
        names, and whether they are online."""

    def count_endpoints(self, owner_id: str, *, limit: int) -> int:
        """How many endpoints an owner has; counting stops at ``limit``."""

    def delete_endpoint(self, endpoint_id: str) -> bool:
        """Delete an endpoint with its keys, shares and reports."""

    def set_presence(self, presences: Sequence[Presence]) -> None:
        """Record presence, in one transaction. The last of an endpoint counts; unknown endpoints are skipped."""

    def get_qos_report(self, endpoint_id: str) -> QosReport | None:
        """The last report of latency targets that came with a presence; None if there was none."""

    # keys
    def add_endpoint_key(self, endpoint_id: str, public_key: str, *, at: dt.datetime, most: int = 2) -> Sequence[str]:
        """Assign a CURVE key to an endpoint. Repeating it is harmless. Of more than ``most`` keys, those that were
        added first are deleted; returns them.

        :raises Conflict: if it belongs to another endpoint, or was revoked.
        :raises EndpointUnknown: if the endpoint does not exist.
        """

    def list_endpoint_keys(self, endpoint_id: str) -> Sequence[EndpointKey]:
        """The keys of an endpoint that are not revoked, the oldest first."""

    def revoke_endpoint_key(self, endpoint_id: str, public_key: str, *, at: dt.datetime) -> bool:
        """Revoke a key for ever, or as long as the endpoint has not revoked 100 others. False if it has no such key."""

    def find_endpoints_by_key(self, public_keys: Sequence[str]) -> Mapping[str, str]:
        """The endpoints of CURVE public keys (Z85) that are not revoked, by key."""

    # spools
    def find_spools(self, endpoint_ids: Sequence[str]) -> Mapping[str, SpoolMark]:
        """The last known spools of these endpoints, without those that are not registered."""

    def claim_spools(self, marks: Mapping[str, SpoolMark]) -> None:
        """Record the spools of the agents of these endpoints. The generation of a spool never falls."""

    def raise_spools(self, marks: Mapping[str, SpoolMark]) -> None:
        """Record higher generations of these spools, where they are still those of their endpoints."""

    def find_restricted(self, endpoint_ids: Sequence[str]) -> frozenset[str]:
        """Return the endpoints that run certain functions only."""

    # withdrawn rights
    def put_withdrawal(self, withdrawal: Withdrawal) -> None:
        """Add a withdrawal, or replace that of the same object. Tasks that the former one cancels are still to be
        cancelled."""

    def list_withdrawals(self, *, limit: int = 100) -> Sequence[Withdrawal]:
        """Withdrawals: first the oldest one of each identity, then the second one of each, and so on."""

    def note_ended_sessions(self, withdrawal: Withdrawal) -> None:
        """The sessions have ended for this withdrawal. For one that has replaced it, they are still to be ended."""

    def delete_withdrawal(self, withdrawal: Withdrawal) -> None:
        """Nothing is left to be done for this withdrawal. One that has replaced it stays."""

    # limits of submitters in the queue
    def put_running_limit(self, endpoint_id: str, owner_id: str, limit: RunningLimit) -> None:
        """Record the limit of a submitter at an endpoint, from which the queue's is restored; without limit and weight,
        delete it. Nothing for an unknown endpoint."""

    def find_running_limits(self, endpoint_ids: Sequence[str]) -> Mapping[str, Mapping[str, RunningLimit]]:
        """The recorded limits, by endpoint and owner id; every one of these endpoints is there."""


class Shares(Audited, Protocol):
    """Rights to endpoints and functions of others: shares, teams, and by which names and groups people are known.

    ``principals`` of a person are texts as the ``grantee`` of a share has them: ``identity …``, ``name …``,
    ``group …``. Those of the person's teams are found by the store. A share that has ended gives no right.
    """

    def put_share(self, share: Share) -> Share:
        """Add a share, or replace that of the same object and grantee, which keeps its id. Returns it as it is now."""

    def get_share(self, object_id: str, share_id: str) -> Share | None: ...
    def find_share(self, object_id: str, grantee: str) -> Share | None: ...
    def list_shares(self, object_id: str, *, limit: int = 1000) -> Sequence[Share]:
        """Shares of an object, the oldest first; with those that have ended, and were not deleted yet."""

    def delete_share(self, object_id: str, share_id: str, *, if_ended: bool = False) -> bool:
        """Delete a share; ``if_ended``: only if its time has ended."""

    def list_ended_shares(self, *, limit: int = 100) -> Sequence[Share]:
        """Shares whose time has ended, those that ended first before others."""

    def find_rights(self, object_ids: Collection[str], principals: Collection[str]) -> Mapping[str, Right]:
        """The greatest right to each of these objects that a share gives; without those to which there is none."""

    def find_allowances(self, object_id: str, principals: Collection[str]) -> Sequence[Mapping[str, Any]]:
        """The allowances of the shares that let a person use an object."""

    def get_principals(self, identity_id: str, *, groups_since: dt.datetime) -> frozenset[str]:
        """The principals of an identity that :meth:`put_person` recorded last, and the identity itself. Without groups
        if that was before ``groups_since``."""

    def find_objects(self, principals: Collection[str], *, limit: int = 1000) -> Sequence[SharedObject]:
        """Shares that give a person rights, with their objects, newest first. One object may be there many times."""

    def list_shares_with(self, grantees: Collection[str]) -> Sequence[Share]:
        """Shares with one of these grantees, or with a team of which one of them is a member."""

    def put_person(self, identity_id: str, principals: Collection[str]) -> frozenset[str]:
        """Record the principals of an identity, in place of the former ones. Returns those that it has lost."""

    # teams
    def add_team(self, team: Team) -> None: ...
    def get_team(self, team_id: str) -> Team | None: ...
    def list_teams(self, owner_id: str, principals: Collection[str], *, limit: int = 1000) -> Sequence[Team]:
        """Teams that belong to an owner, then others of which a person is a member, by name."""

    def delete_team(self, team_id: str) -> bool:
        """Delete a team with its members, and what is shared with it."""

    def put_member(self, member: TeamMember) -> None:
        """Add a member. Repeating it is harmless.

        :raises NotFound: if there is no such team.
        """

    def list_members(self, team_id: str, *, limit: int = 1000) -> Sequence[TeamMember]:
        """Members of a team, by name."""

    def delete_member(self, team_id: str, member: str) -> bool: ...


class Tasks(Audited, Protocol):
    """Tasks: submission, results, history, and the reads of the reconciler."""

    def add_tasks(
        self,
        tasks: Sequence[Task],
        *,
        memoized: Mapping[str, Task] | None = None,
        audit: AuditEntry | None = None,
        endpoint_id: str | None = None,
    ) -> Mapping[str, Task]:
        """Write tasks ahead, all or none, in one transaction, each with its RECEIVED event.

        ``memoized`` has, by task id, earlier tasks whose success is theirs too: those are written as finished, with the
        result and details of the earlier one and a SUCCESS event of the API. They are not queued.
        ``audit`` is appended, with the number of new ``tasks`` in its detail, unless there are none.
        A task id that exists already stays as it is. Returns the existing tasks by id (usually none), so that the
        caller can distinguish a repeated submit from a reused id.

        :raises EndpointUnknown: if ``endpoint_id`` is given and there is no such endpoint; then nothing is written.
        """

    def read_for_submit(
        self, endpoint_id: str, references: Sequence[str], task_ids: Sequence[str]
    ) -> tuple[Endpoint | None, Mapping[str, Function], Mapping[str, Task]]:
        """Read the data that a submit is checked against: its endpoint, its functions without bodies, and its existing
        tasks. A reference is an id, for the newest version, or ``id@version``. One round trip, if no task exists."""

    def find_memoized(self, owner_id: str, memo_keys: Sequence[str]) -> Mapping[str, Task]:
        """Return the owner's newest successful task with each key, if there is one."""

    def get_tasks(
        self, task_ids: Sequence[str], *, with_bodies: bool = True, for_answers: bool = False
    ) -> Mapping[str, Task]:
        """Tasks by id. Without bodies, ``payload`` and ``result`` are None; for answers, ``payload`` is None and the
        options have no callees."""

    def list_tasks(
        self,
        owner_id: str | None = None,
        *,
        endpoint_id: str | None = None,
        state: TaskState | None = None,
        since: dt.datetime | None = None,
        until: dt.datetime | None = None,
        before: tuple[dt.datetime, str] | None = None,
        limit: int = 100,
    ) -> Sequence[Task]:
        """Tasks of an owner, or of an endpoint, submitted from ``since`` to before ``until``, newest first; with
        ``before``, those before the task of that time and id. Without payloads, results, details and options.

        In the state DEAD_LETTERED, those that were not discarded. An endpoint's tasks are listed in that state only.
        """

    def find_ids(
        self, kind: Literal["task", "group"], beginning: str, *, owner_ids: Collection[str], limit: int = 20
    ) -> tuple[Sequence[str], bool]:
        """Ids of tasks or task groups of these owners that begin with a text, highest first; and whether those are all
        that there can be: with a short text and many tasks, only the highest ids are looked at."""

    def names_of(self, ids: Collection[str]) -> Mapping[str, str]:
        """Names of functions and endpoints, by their ids; those that do not exist are left out."""

    def discard_tasks(self, task_ids: Sequence[str]) -> Sequence[str]:
        """Remove dead letters from the list, and delete their payloads. Returns the ids of those that were listed."""

    def get_group(
        self, task_group_id: str, *, owner_ids: Collection[str] | None = None, limit: int | None = None
    ) -> Sequence[Task]:
        """Tasks of a group, of these owners only, in submission order; without payloads, results, details, options and
        errors."""

    def list_groups(self, owner_id: str, *, before: str | None = None, limit: int = 100) -> Sequence[TaskGroup]:
        """Task groups of an owner, newest first; with ``before``, those older than the group with that id."""

    # transitions and results
    def record_transitions(self, events: Sequence[TaskEvent]) -> Sequence[str]:
        """Append events and change the tasks' states; a transition that is not legal any more (the task is finished,
        further, or at a later attempt) only leaves its event. ``event.attempt`` raises the task's attempt.

        Of an attempt, an agent may report MAX_TRANSITIONS; later ones are dropped.
        Returns the ids of the tasks whose attempt rose. For a task with ``idempotent=False`` that is the permit to
        dispatch it: without it, some forwarder had it before, and it may have started.

        :raises InvalidRequest: for a terminal state, or one that its reporter may not report.
        """

    def record_results(self, results: Sequence[TaskResult], *, at: dt.datetime) -> Mapping[str, TaskResult]:
        """Record results: the first one of a task counts. One transaction; ``at`` becomes the timing ``recorded_at``.

        A result of another endpoint than the task's is ignored. Returns those that were first, by task id, completed
        with the task's group and owner.

        :raises InvalidRequest: for a state that is not terminal, or one that its reporter may not report.
        """

    def list_events(self, task_id: str, *, after: int = 0, limit: int | None = None) -> Sequence[TaskEvent]:
        """The history of a task, oldest first, after the first ``after`` events: they never change."""

    # open and old tasks
    def list_open_tasks(self, endpoint_id: str, *, after: str = "", limit: int = 1000) -> Sequence[Task]:
        """Open tasks of an endpoint, by task id, after ``after``: to rebuild the queue."""

    def find_open_tasks(
        self,
        *,
        endpoint_id: str | None = None,
        function_id: str | None = None,
        owner_id: str | None = None,
        after: str = "",
        limit: int = 1000,
        with_options: bool = False,
    ) -> Sequence[Task]:
        """Open tasks of an endpoint, of a function (or that may call it), or of an owner there, by task id, after
        ``after``; without payloads, details and, unless those are wanted, options. An endpoint or a function must be
        given."""

    def list_open_ids_of(self, endpoint_id: str, *, limit: int) -> Sequence[str]:
        """Ids of open tasks of an endpoint, in order. Reads no payload."""

    def find_busy_endpoints(self, endpoint_ids: Sequence[str]) -> frozenset[str]:
        """Return the endpoints that have open tasks."""

    def list_endpoints_with_open_tasks(self) -> Sequence[str]:
        """Endpoints that have open tasks. The work is in proportion to them, however many tasks each has."""

    def list_open_ids(self, *, after: tuple[int, str] = (0, ""), limit: int = 1000) -> Sequence[OpenTask]:
        """Open tasks of all endpoints, in the order of the transactions that added them, after the one with this
        ``added_in`` and id. Reads no payload, and no more rows than it returns."""

    def first_unfinished_transaction(self) -> int:
        """Every task of a transaction before this one is visible now, or never will be."""

    def purge_tasks(self, *, ended_before: dt.datetime, limit: int) -> int:
        """Delete up to ``limit`` tasks that were finished before a time, oldest first, with their events, and groups
        without tasks. Returns how many tasks. Concurrent calls share the work."""


class UsageSums(Protocol):
    """Usage by day (UTC), submitter, function, endpoint and account. :meth:`Tasks.record_results` adds to it in its own
    transaction, and the end of a task is recorded once; purged tasks stay counted."""

    def read_usage(
        self,
        by: Collection[UsageBy],
        *,
        since: dt.date,
        until: dt.date,
        owner_ids: Collection[str] | None = None,
        endpoint_id: str | None = None,
        endpoint_owner_ids: Collection[str] | None = None,
        after: int = 0,
        limit: int = 1000,
    ) -> Sequence[Usage]:
        """Sums from the day ``since`` to before the day ``until``, in the order of :class:`UsageBy`; the first
        ``after`` are skipped. Only of these submitters, of this endpoint, and of endpoints that belong to these owners,
        where given. No row if there is no usage."""

    def fold_usage(self, *, limit: int) -> int:
        """Combine up to ``limit`` batches of results into the sums of their days, which changes no answer. Returns how
        many. Concurrent calls share the work."""

    def purge_usage(self, *, before: dt.date, limit: int) -> int:
        """Delete up to ``limit`` sums of earlier days. Returns how many."""


class Audit(Protocol):
    """The audit log: who changed what."""

    def add_entries(self, entries: Sequence[AuditEntry]) -> None:
        """Append entries about changes outside of the database."""

    def list_entries(
        self,
        identity_ids: Collection[str],
        *,
        since: dt.datetime | None = None,
        until: dt.datetime | None = None,
        after: tuple[dt.datetime, int] | None = None,
        limit: int = 100,
    ) -> Sequence[AuditEntry]:
        """Entries by these identities (without refusals), and by others on their objects, from ``since`` to before
        ``until``, oldest first; with ``after``, those after the entry of that time and id."""

    def purge_entries(self, *, before: dt.datetime, limit: int) -> int:
        """Delete up to ``limit`` older entries. Returns how many."""


class Tokens(Audited, Protocol):
    """Tokens, and service accounts."""

    def add_token(self, token: ApiToken) -> None:
        """Add a token. Others of its owner that expired or were revoked 30 days before are forgotten."""

    def get_token(self, token_id: str) -> ApiToken | None: ...
    def list_tokens(self, owner_ids: Collection[str], *, limit: int = 1000) -> Sequence[ApiToken]:
        """Tokens that these identities made, newest first."""

    def revoke_token(self, token_id: str, *, at: dt.datetime) -> bool:
        """Revoke a token for ever. False if there is none, or it is revoked already."""

    def note_token_use(self, token_id: str, *, at: dt.datetime) -> None: ...

    # service accounts
    def add_account(self, account: ServiceAccount) -> None:
        """:raises Conflict: if its owner has one with that name already."""

    def get_account(self, account_id: str) -> ServiceAccount | None: ...
    def list_accounts(self, owner_ids: Collection[str], *, limit: int = 1000) -> Sequence[ServiceAccount]:
        """Accounts of these owners, by name."""

    def delete_account(self, account_id: str) -> bool:
        """Delete an account and its tokens. What it has used counts for its creator as before."""

    def quota_group(self, identity_id: str) -> Sequence[str]:
        """The identities that share quotas with this one: first the payer, then all service accounts of the payer,
        deleted ones too."""


class Actions(Audited, Protocol):
    """Actions of Globus Flows: what their tasks do not have."""

    def add_action(self, action: Action) -> Action:
        """Add an action. If its owner has one of that request id already, nothing changes, and that one is
        returned."""

    def get_action(self, action_id: str) -> Action | None: ...
    def list_actions(self, owner_ids: Collection[str], *, limit: int = 100) -> Sequence[Action]:
        """Actions of these owners, newest first."""

    def delete_action(self, action_id: str) -> bool: ...
    def find_overdue(self, *, at: dt.datetime, limit: int = 100) -> Sequence[Action]:
        """Actions whose deadline has passed, the earliest deadline first."""

    def forget_deadline(self, action_id: str) -> None:
        """Nothing is left to be done at the deadline of an action."""

    def purge_actions(self, *, created_before: dt.datetime, limit: int) -> int:
        """Delete up to ``limit`` older actions. Returns how many."""


@dataclasses.dataclass(frozen=True)
class Records:
    """PostgreSQL, by subject: what is recorded has happened; what is not recorded has not been promised."""

    database: Database
    functions: Functions
    endpoints: Endpoints
    shares: Shares
    tasks: Tasks
    audit: Audit
    tokens: Tokens
    usage: UsageSums
    actions: Actions

    def close(self) -> None:
        """Close every connection."""
        self.database.close()


class Registry(Protocol):
    """Forwarders, peers and wake-ups: the part of the queue that holds no tasks. All of it is lossy."""

    def announce(self, info: ForwarderInfo, *, ttl_s: float) -> None: ...
    def withdraw(self, forwarder_id: str) -> None: ...
    def forwarders(self) -> Sequence[ForwarderInfo]:
        """Live forwarders, without those that drain."""

    def admit(self, key: PeerKey, *, ttl_s: float) -> bool:
        """Let a CURVE key connect for a while. Returns whether it may: one that is admitted for another peer stays
        that peer's."""

    def dismiss(self, public_keys: Sequence[str]) -> None:
        """Stop admitting these CURVE keys."""

    def find_peers(self, public_keys: Sequence[str]) -> Mapping[str, PeerKey]:
        """The admitted ones of these keys. One round trip."""

    def listen(self, forwarder_id: str) -> WakeUps:
        """Subscribe to the wake-ups of a forwarder, and to the results that others share with it."""

    # result sharing between forwarders, for clients that are connected elsewhere than the endpoint
    def watch(self, owner_ids: Sequence[str], forwarder_id: str, *, ttl_s: float) -> frozenset[str]:
        """Record for ``ttl_s`` seconds that clients of these owners wait at a forwarder. Return the owners that are new
        there: their results were not shared with it until now."""

    def watchers(self, owner_ids: Sequence[str]) -> Mapping[str, Sequence[str]]:
        """Return the forwarders at which clients of these owners wait, each with its owners. One round trip."""

    def share(self, results: Mapping[str, Sequence[SharedResults]]) -> None:
        """Publish recorded results to forwarders, by id. One round trip."""

    # output of tasks, between the API and the forwarders
    def request_output(self, asks: Sequence[OutputAsk]) -> Sequence[bool]:
        """Send requests to the forwarders that own the endpoints: for each, whether one does. One round trip."""

    def answer_output(self, request_id: str, answer: OutputAnswer, *, ttl_s: float) -> None:
        """Answer a request, or a part of it. The answer is gone after ``ttl_s``."""

    def take_output(self, request_id: str, *, timeout_s: float) -> OutputAnswer | None:
        """Take the next answer to a request; None if there is none within ``timeout_s``."""

    # files that an endpoint reads from another one, between the forwarders
    def ask_file(self, ask: FileAsk) -> bool:
        """Send a request to the forwarder that owns the endpoint; whether one has received it."""

    def answer_file(self, forwarder_id: str, answer: FileAnswer) -> None:
        """Send the answer to the forwarder that asked."""


class Queue(Registry, Protocol):
    """Valkey: which tasks wait, and which forwarder works on them. It may lose its data at any moment; no task is lost.

    One slot per endpoint. Every method is one atomic step, or steps of which each may be the last one that happens.

    Forwarders call for many endpoints at once, in one round trip. A refusal concerns one endpoint and stands in the
    place of its answer: :class:`Fenced` for a stale fence, :class:`QueueDataLost` while the queue may lack tasks: after
    a wipe, and for a new endpoint, until :meth:`mark_restored`. Calls for one endpoint raise it.
    """

    def ping(self) -> None: ...
    def close(self) -> None: ...

    # producing
    def enqueue(self, tasks: Sequence[QueuedTask]) -> int:
        """Queue tasks of ONE endpoint; ids that the queue holds already are skipped. Wakes the endpoint's owner.

        Wake-ups are lossy; the owner's sweep finds what they miss. Returns how many tasks wait now, 0 for no tasks.
        """

    def cancel(
        self, endpoint_id: str, task_ids: Sequence[str], *, error: ErrorRecord | None = None
    ) -> Mapping[str, CancelOutcome]:
        """Remove waiting tasks; mark leased ones and wake their owner, which informs the endpoint. ``error`` is that of
        the removed ones.

        A REMOVED task is CANCELLED: its result is in the outbox until the caller has recorded it and called
        :meth:`flushed`.
        """

    # ownership
    def claim(
        self, forwarder_id: str, wanted: Sequence[tuple[str, str, Mapping[str, int]]], *, ttl_s: float
    ) -> Sequence[int | EndpointInUse]:
        """Take endpoints over, in order: each with the spool of its agent and the weights of submitters (by owner id; 1
        for others). Returns for each its fencing number, higher than any given before, even across a wipe.

        EndpointInUse stands there instead while another forwarder owns the endpoint and has a session with an agent
        with another spool. The same agent may connect elsewhere: its former forwarder is fenced.
        """

    def renew_ownership(
        self, forwarder_id: str, owned: Mapping[str, tuple[int, str]], *, ttl_s: float
    ) -> Sequence[str]:
        """Renew the ownership of endpoints, by fence and spool. Returns those that need :meth:`maintain`: with expired
        leases, with results in the outbox, or refused."""

    def mark_disconnected(
        self, forwarder_id: str, owned: Sequence[tuple[str, int]], *, ttl_s: float
    ) -> Sequence[Fenced | QueueDataLost | None]:
        """Renew the ownership of endpoints whose agents are disconnected, so that any agent may connect elsewhere."""

    def maintain(
        self, forwarder_id: str, held: Mapping[str, HeldLeases], *, ttl_s: float, lease_s: float
    ) -> Mapping[str, MaintenanceResult | Fenced | QueueDataLost]:
        """Renew ownership and the leases that are named, reap up to 500 expired leases, and read the outbox.

        An idempotent task with attempts left returns to the queue. Others are returned as reaped, for the caller to end
        (cancelled if that was requested, lost, or failed after its last attempt), and stay leased until acked."""

    def release(self, endpoint_id: str, forwarder_id: str, fence: int) -> None:
        """Give up ownership; harmless without it."""

    def evict(self, endpoint_id: str) -> None:
        """Fence the owner of an endpoint."""

    def forget_endpoint(self, endpoint_id: str, *, limit: int) -> bool:
        """Remove up to ``limit`` tasks of a deleted endpoint, waiting or not, and what else is known of it. Returns
        whether all is removed. From the first call on, for an hour, its owner is fenced and nothing is queued for
        it."""

    # consuming
    def lease(
        self, wanted: Mapping[str, tuple[int, int, int]], *, lease_s: float
    ) -> Mapping[str, Sequence[LeasedTask] | Fenced | QueueDataLost]:
        """Lease waiting tasks of endpoints, by fence, limit (of 500 at most) and reserve, each with attempt + 1: oldest
        first of each submitter, and in turn of the submitters with the fewest leased tasks, in proportion to their
        weights. Up to ``reserve`` more belong to submitters with fewer leased tasks than their weight. For all of this
        a submitter's tasks with a latency target are those of one more submitter."""

    def unlease(self, endpoint_id: str, fence: int, task_ids: Sequence[str]) -> None:
        """Put leased tasks that never reached the endpoint back to the front, and do not count the attempt."""

    def leased(self, owned: Sequence[tuple[str, int]]) -> Sequence[Mapping[str, int] | Fenced | QueueDataLost]:
        """The leased tasks of endpoints, by fence: ids with their attempts."""

    def cancel_requests(self, owned: Sequence[tuple[str, int]]) -> Sequence[Sequence[str] | Fenced | QueueDataLost]:
        """The leased tasks of endpoints, by fence, that should stop; the same ids are returned until the tasks end."""

    def endpoints_with_activity(self, fences: Mapping[str, int]) -> Sequence[str]:
        """Return the endpoints, owned under these fences, that have waiting tasks or requests to cancel. Endpoints
        whose owner or data has changed are among them: the next call refuses those."""

    def ack(self, results: Sequence[tuple[int, Sequence[TaskResult]]]) -> Sequence[Fenced | QueueDataLost | None]:
        """End tasks, each endpoint's under its fence. The first result of a task counts and enters the outbox. Some
        results of a refused endpoint may have been taken all the same."""

    def outbox(self, endpoint_id: str) -> Sequence[TaskResult]:
        """Up to 200 results that were acked and may not have reached the database, oldest first."""

    def flushed(self, task_ids: Mapping[str, Sequence[str]]) -> None:
        """The database has these results, by endpoint: drop them from the outbox and let their task hashes expire."""

    def restore(
        self,
        endpoint_id: str,
        fence: int,
        tasks: Sequence[QueuedTask],
        *,
        held: Mapping[str, int],
        lease_s: float,
    ) -> None:
        """One page of a rebuild: queue tasks that the queue lacks; those in ``held`` (id -> attempt, reported by the
        endpoint) become leases, also when they were queued. A task that may have started and must not start
        again becomes a lease too, for :meth:`maintain` to reap."""

    def mark_restored(self, owned: Sequence[tuple[str, int]]) -> Sequence[Fenced | QueueDataLost | None]:
        """The rebuild of these endpoints, by fence, is complete: from now on lease and ack work again."""

    # the reconciler's reads
    def find_missing(self, task_ids: Mapping[str, Sequence[str]]) -> frozenset[str]:
        """Return the tasks, given by endpoint, that the queue does not hold: they do not wait, have no lease, and did
        not end a moment ago. One round trip for many."""

    def find_outboxes(self, endpoint_ids: Sequence[str]) -> Sequence[str]:
        """Return the endpoints whose outbox is not empty. One round trip for many."""

    def read_checkpoint(self, name: str) -> str:
        """A position that holds for the queue as it is; empty at first, and after a wipe."""

    def write_checkpoint(self, name: str, value: str, *, expected: str) -> bool:
        """Replace a checkpoint that is as ``expected``; False if it is not. A copy of the queue that has the checkpoint
        has all that was queued before."""

    # depth, position, rate limits
    def depth(self, endpoint_ids: Sequence[str]) -> int:
        """How many tasks wait for these endpoints together."""

    def depth_of(self, endpoint_id: str, owner_id: str) -> tuple[int, int]:
        """How many tasks wait for an endpoint, and how many of them this owner submitted."""

    def reserve(self, endpoint_id: str, owner_id: str, count: int, *, most: int) -> int | None:
        """Reserve room for tasks that this owner will queue, if no more than ``most`` wait then, with those for which
        room is reserved already; else the number of these. It is valid until :meth:`free`, or for a minute."""

    def free(self, endpoint_id: str, owner_id: str, count: int) -> None:
        """The tasks are queued, or will not be."""

    def position(self, endpoint_id: str, task_id: str) -> QueuePosition:
        """Return the position of a task in the queue, for people. Takes time with the number of waiting tasks."""

    def set_limits(self, limits: Mapping[str, Mapping[str, RunningLimit]], *, complete: bool) -> None:
        """Set limits of submitters, by endpoint and owner id; ``complete``: others of these endpoints have none. A
        submitter with as many leased tasks as its limit, with and without latency targets, is passed over until one of
        them ends, which wakes the endpoint's owner; its weight replaces that of :meth:`claim`. A wipe deletes the
        limits."""

    def bytes_of(self, owner_id: str) -> int:
        """Bytes of all tasks of a submitter in the queue, as they are stored there."""

    def recount_bytes(self, cursor: int) -> int:
        """One step of a walk over all endpoints, which corrects what :meth:`bytes_of` adds up: a release that does not
        count may have added or removed tasks. It starts with 0 and ends with 0; each step takes milliseconds. Endpoints
        with very many tasks are left as they are."""

    def memory(self) -> QueueMemory: ...

    def take_tokens(
        self, bucket: str, tokens: int, *, rate_per_s: float, burst: int, in_debt: bool = False
    ) -> TokensTaken:
        """Take up to ``tokens`` from a bucket that holds ``burst`` and fills by ``rate_per_s``. A new one is full.

        With ``in_debt``, take all of them: a bucket that had fewer gives none until it has filled up to one again.
        0 tokens: how long to wait for one; not at all if ``wait_s`` is 0 or less.
        """


class WakeUps(Protocol):
    """A subscription. Owned by one thread."""

    def get(self, timeout_s: float) -> Sequence[str] | None:
        """Endpoint ids that have work or cancellations; empty after ``timeout_s``, or as soon as something else has
        come. Raises Unavailable when the connection is lost."""

    def take_shared(self) -> Sequence[SharedResults]:
        """The shared results that :meth:`get` has received since the last call. Never waits."""

    def take_asks(self) -> Sequence[OutputAsk]:
        """The requests for output that :meth:`get` has received since the last call. Never waits."""

    def take_file_messages(self) -> Sequence[FileMessage]:
        """The requests for files, and their answers, that :meth:`get` has received since the last call. Never waits."""

    def close(self) -> None: ...


class Blobs(Protocol):
    """S3: large payloads and results."""

    def ping(self) -> None: ...
    def upload_url(self, ref: BlobRef, *, ttl_s: int) -> tuple[str, Mapping[str, str]]:
        """A pre-signed PUT bound to the blob's length and SHA-256, and the headers that the uploader must send."""

    def download_url(self, blob_key: str, *, ttl_s: int) -> str: ...
    def size_bytes(self, blob_key: str) -> int | None:
        """The size of a blob; None when it does not exist."""

    def renew(self, blob_key: str, *, older_than_s: float) -> int | None:
        """:meth:`size_bytes`; a blob that was written longer ago is written again, because lifecycle rules count from
        the last time."""

    def read_part(self, blob_key: str, *, offset_bytes: int, length_bytes: int) -> bytes:
        """Bytes of a blob from an offset within it; fewer than asked for at its end.

        :raises BlobUnknown: if it does not exist.
        """

    def read(self, blob_key: str) -> bytes:
        """The blob's bytes. Raises BlobUnknown."""

    def write(self, blob_key: str, data: bytes) -> BlobRef: ...
    def delete(self, blob_keys: Sequence[str]) -> None:
        """Delete pieces of files (:data:`~farcall_common.store.model.PIECES`); unknown ones are ignored."""
