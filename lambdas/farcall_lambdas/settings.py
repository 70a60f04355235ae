"""API settings: of the API and its authorizer, read once from the environment.

======================================= ==============================================================================
variable                                meaning (default)
======================================= ==============================================================================
``FARCALL_AUTH_PROVIDER``               ``dev``, ``globus`` or ``oidc``
``FARCALL_DEV_TOKENS``                  for dev: JSON ``{token: {"identity_id": uuid, "username": text}}``
``FARCALL_GLOBUS_CLIENT_ID``            for globus: this service's client at Globus Auth,
``FARCALL_GLOBUS_CLIENT_SECRET``        its secret; or instead of it:
``FARCALL_GLOBUS_SECRET_ARN``           a secret of Secrets Manager with ``{"client_secret": …}``, read again every five
                                        minutes,
``FARCALL_GLOBUS_SCOPE``                and the scope that a token must carry; for the API, to name it to Globus Flows
``FARCALL_OIDC_ISSUER``                 for oidc: the issuer's URL, exactly as it writes it,
``FARCALL_OIDC_AUDIENCE``               the audience that a token must be meant for,
``FARCALL_OIDC_CLIENTS``                the clients whose tokens are accepted, by their ids, with commas; ``*`` for any;
``FARCALL_OIDC_SCOPE``                  or, or also, the scope that a token must carry
``FARCALL_OIDC_GROUPS_CLAIM``           the claim with the user's groups (groups)
``FARCALL_ALLOWED_IDENTITIES``          who may use the deployment: identity ids and verified user names, with commas;
                                        ``*`` for everyone with a valid token (no one),
``FARCALL_ALLOWED_DOMAINS``             domains of verified user names (none),
``FARCALL_ALLOWED_GROUPS``              groups: ids of Globus Groups, or names in the issuer's claim of groups (none),
``FARCALL_ADMINS``                      and administrators, by identity id or verified user name (none)
``FARCALL_READ_GROUPS``                 ``true``: read the groups of users, to share objects with them, also if none is
                                        named (false)
``FARCALL_CALLER_SECRET_ARN``           a secret with ``{"key": …}``: the authorizer signs callers with it, and the
                                        API's function verifies that, and signs credentials of endpoints with one made
                                        from it; for the canary's function, its own; or instead:
``FARCALL_CALLER_KEY``                  the key, at least 32 characters
``FARCALL_CANARY_SECRET_ARN``           the canary's key, for the API's function (no canary)
``FARCALL_MAX_PAYLOAD_BYTES``           of one payload or function (10 MiB)
``FARCALL_MAX_INLINE_BYTES``            of a payload in the database (64 KiB)
``FARCALL_MAX_REQUEST_BYTES``           of a request (4 MiB)
``FARCALL_MAX_RESPONSE_BYTES``          of the results in one answer, as it is sent (5 MB)
``FARCALL_MAX_TASKS_PER_REQUEST``       submitted, read or cancelled at once (10,000)
``FARCALL_MAX_QUEUE_DEPTH``             tasks that may wait for one endpoint (100,000)
``FARCALL_MAX_WAITING``                 tasks that may wait for all endpoints of one identity (1,000,000)
``FARCALL_MAX_MEMORY_PERCENT``          of the queue's memory that may be in use when tasks are submitted (80)
``FARCALL_MAX_IDENTITY_MEMORY_PERCENT`` of the queue's memory for the tasks of one identity (25)
``FARCALL_MAX_QUEUE_OUTAGE_S``          how long tasks are accepted while the queue cannot be reached (30)
``FARCALL_MAX_FUNCTIONS``               of one identity, each version counted (20,000)
``FARCALL_MAX_FUNCTION_BYTES``          of all functions of one identity (2 GiB)
``FARCALL_MAX_VERSIONS``                of one function (1,000)
``FARCALL_MAX_ENDPOINTS``               of one identity (1,000)
``FARCALL_MAX_CONTAINERS``              of one identity (1,000)
``FARCALL_MAX_SHARES``                  of one endpoint or function (1,000)
``FARCALL_MAX_TEAMS``                   of one identity (100)
``FARCALL_MAX_MEMBERS``                 of one team (1,000)
``FARCALL_MAX_STORED_BYTES_PER_DAY``    arguments that one identity adds in a day (100 GiB)
``FARCALL_MAX_IDENTITY_STORAGE_PERCENT`` the same, in the database, as a part of its bytes (25)
``FARCALL_DATABASE_BYTES``              that the database's disk holds, or may grow to; 0 if unknown (0)
``FARCALL_RATE_PER_S``                  requests of one identity per second, in the long run (500)
``FARCALL_RATE_BURST``                  requests of one identity at once (2,000)
``FARCALL_KEY_RATE_PER_S``              new keys of agents and clients of one identity per second, in the long run (1)
``FARCALL_KEY_BURST``                   such keys at once (10,000)
``FARCALL_HEARTBEAT_S``                 heartbeat interval of agents and clients (30)
``FARCALL_ONLINE_WINDOW_S``             how old the last heartbeat of an online endpoint may be (120)
``FARCALL_TICKET_TTL_S``                how long a ticket lets a peer in (86400)
``FARCALL_URL_TTL_S``                   how long a pre-signed URL works (3600)
``FARCALL_SETTLE_S``                    see :class:`ApiSettings` (10)
``FARCALL_RECONCILE_PERIOD_S``          see :class:`ApiSettings` (60)
``FARCALL_RETENTION_DAYS``              how long a finished task is kept (30)
``FARCALL_MAX_WAIT_DAYS``               how long after its submission a task may start (30)
``FARCALL_PURGE_BATCH``                 tasks that one statement deletes (500)
``FARCALL_PURGE_UNTIL_S``               see :class:`ApiSettings` (20)
``FARCALL_REPAIR_UNTIL_S``              see :class:`ApiSettings` (45)
``FARCALL_AUDIT_DAYS``                  how long the audit is kept (400)
======================================= ==============================================================================
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Mapping
from typing import Literal, TypeVar

from farcall_common.addresses import is_safe_address
from farcall_common.errors import ConfigurationError
from farcall_common.limits import MAX_INLINE_BYTES, MAX_PAYLOAD_BYTES, MAX_REQUEST_BYTES, MAX_TASKS_PER_REQUEST, MIB
from farcall_lambdas.allowed_users import AllowedUsers
from farcall_lambdas.identity import Identity

Number = TypeVar("Number", int, float)


@dataclasses.dataclass(frozen=True)
class ApiSettings:
    """Limits and periods of the API.

    A payload over ``max_payload_bytes`` is refused, one over ``max_inline_bytes`` goes to the blob store instead of
    the database. ``max_response_bytes`` bounds the results in one answer, counted as Lambda sends them: a body is text
    inside JSON, in which quotes take two bytes. Lambda's own limit for the whole answer is 6,291,556 bytes.
    More than ``max_queue_depth`` tasks do not wait for one endpoint, nor ``max_waiting`` for all those of one owner. No
    task is accepted while more than ``max_memory_percent`` of the queue's memory are used, for an identity whose tasks
    take ``max_identity_memory_percent`` of it, or after ``max_queue_outage_s`` in which the queue did not answer. An
    identity owns ``max_functions``, each version counted (with as many aliases, and ``max_versions`` of each) of
    ``max_function_bytes`` together, ``max_endpoints``, ``max_containers``, ``max_teams``, ``max_tokens`` and
    ``max_accounts`` (service accounts) at most. An
    object has ``max_shares``, a team ``max_members``. In a day an identity adds
    payloads of ``max_stored_bytes_per_day`` in database and blob store together, and in the database of
    ``max_identity_storage_percent`` of ``database_bytes``. Nothing is added while the
    database has 85 % of ``database_bytes``. An identity may make ``rate_per_s``
    requests per second, and ``rate_burst`` at once after a pause; ``key_rate_per_s`` and ``key_burst`` are the same for
    new keys of agents and clients.
    ``online_window_s`` is how old an endpoint's last heartbeat may be. ``settle_s`` is how long the
    reconciler leaves a submit or a forwarder to finish its work, ``reconcile_period_s`` is the period of its rounds
    where no schedule runs it. A finished task is deleted after ``retention_days``: ``purge_batch`` in one short
    transaction, repeated until none is left or the round is ``purge_until_s`` old; audit entries likewise after
    ``audit_days``. Then a round repairs until it is ``repair_until_s`` old, and the next one continues there. A task
    that has not started ``max_wait_days`` after its submission fails; the blobs of payloads have to be kept for
    longer than that. ``globus_scope`` is that of the deployment in Globus Auth, empty if it does not use that.
    """

    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    max_inline_bytes: int = MAX_INLINE_BYTES
    max_request_bytes: int = MAX_REQUEST_BYTES
    max_response_bytes: int = 5_000_000
    max_tasks_per_request: int = MAX_TASKS_PER_REQUEST
    max_queue_depth: int = 100_000
    max_waiting: int = 1_000_000
    max_memory_percent: float = 80.0
    max_identity_memory_percent: float = 25.0
    max_queue_outage_s: float = 30.0
    max_functions: int = 20_000
    max_function_bytes: int = 2048 * MIB
    max_versions: int = 1_000
    max_endpoints: int = 1_000
    max_containers: int = 1_000
    max_shares: int = 1_000
    max_teams: int = 100
    max_members: int = 1_000
    max_tokens: int = 100
    max_accounts: int = 20
    max_stored_bytes_per_day: int = 100 * 1024 * MIB
    max_identity_storage_percent: float = 25.0
    database_bytes: int = 0
    rate_per_s: float = 500.0
    rate_burst: int = 2_000
    key_rate_per_s: float = 1.0
    key_burst: int = 10_000
    heartbeat_s: float = 30.0
    online_window_s: float = 120.0
    ticket_ttl_s: int = 86_400
    url_ttl_s: int = 3_600
    settle_s: float = 10.0
    reconcile_period_s: float = 60.0
    retention_days: float = 30.0
    purge_batch: int = 500
    purge_until_s: float = 20.0
    repair_until_s: float = 45.0
    max_wait_days: float = 30.0
    audit_days: float = 400.0
    globus_scope: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> ApiSettings:
        """Read ``FARCALL_<FIELD>`` for every field that is set: numbers, and the scope.

        :raises ConfigurationError: when a value is not a positive number.
        """
        defaults = cls()
        values = {
            field.name: positive_number(environ, f"FARCALL_{field.name.upper()}", getattr(defaults, field.name))
            for field in dataclasses.fields(cls)
            if field.name != "globus_scope"
        }
        return cls(**values, globus_scope=environ.get("FARCALL_GLOBUS_SCOPE", ""))


@dataclasses.dataclass(frozen=True)
class AuthSettings:
    """The identity provider and its settings; ``repr`` hides the secrets."""

    provider: Literal["dev", "globus", "oidc"]
    dev_identities: Mapping[str, Identity] = dataclasses.field(default_factory=dict, repr=False)
    globus_client_id: str = ""
    globus_client_secret: str = dataclasses.field(default="", repr=False)
    globus_secret_arn: str = ""
    globus_scope: str = ""
    oidc_issuer: str = ""
    oidc_audience: str = ""
    oidc_clients: frozenset[str] = frozenset()
    oidc_scope: str = ""
    oidc_groups_claim: str = "groups"
    allowed: AllowedUsers = dataclasses.field(default_factory=AllowedUsers)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> AuthSettings:
        """Read FARCALL_AUTH_PROVIDER and the settings of that provider.

        :raises ConfigurationError: when something is missing or malformed.
        """
        provider = environ.get("FARCALL_AUTH_PROVIDER", "")
        allowed = AllowedUsers.from_environment(environ)
        if provider == "dev":
            identities = _dev_identities(environ.get("FARCALL_DEV_TOKENS", "{}"))
            return cls(provider="dev", dev_identities=identities, allowed=allowed)
        if provider == "globus":
            secret_arn = environ.get("FARCALL_GLOBUS_SECRET_ARN", "")
            return cls(
                provider="globus",
                globus_client_id=_required(environ, "FARCALL_GLOBUS_CLIENT_ID"),
                globus_client_secret="" if secret_arn else _required(environ, "FARCALL_GLOBUS_CLIENT_SECRET"),
                globus_secret_arn=secret_arn,
                globus_scope=_required(environ, "FARCALL_GLOBUS_SCOPE"),
                allowed=allowed,
            )
        if provider == "oidc":
            clients = filter(None, (part.strip() for part in environ.get("FARCALL_OIDC_CLIENTS", "").split(",")))
            found = cls(
                provider="oidc",
                oidc_issuer=_issuer(environ),
                oidc_audience=_required(environ, "FARCALL_OIDC_AUDIENCE"),
                oidc_clients=frozenset(clients),
                oidc_scope=environ.get("FARCALL_OIDC_SCOPE", ""),
                oidc_groups_claim=environ.get("FARCALL_OIDC_GROUPS_CLAIM") or "groups",
                allowed=allowed,
            )
            if not found.oidc_clients and not found.oidc_scope:
                raise ConfigurationError(
                    "Neither FARCALL_OIDC_CLIENTS nor FARCALL_OIDC_SCOPE is set.",
                    hint="Without them, a token that was made for another program would be accepted.",
                )
            return found
        raise ConfigurationError(f"FARCALL_AUTH_PROVIDER is {provider!r}; it must be 'dev', 'globus' or 'oidc'.")


def _dev_identities(text: str) -> Mapping[str, Identity]:
    """``{token: {"identity_id": uuid, "username": str}}``; the message of an error must not show the tokens."""
    try:
        return {
            token: Identity(str(uuid.UUID(entry["identity_id"])), str(entry.get("username", "")), provider="dev")
            for token, entry in json.loads(text).items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"FARCALL_DEV_TOKENS is not a JSON object of token to identity ({type(error).__name__})."
        ) from None


def _issuer(environ: Mapping[str, str]) -> str:
    issuer = _required(environ, "FARCALL_OIDC_ISSUER")
    if is_safe_address(issuer):
        return issuer
    raise ConfigurationError(f"FARCALL_OIDC_ISSUER is {issuer!r}; it must be an https address.")


def _required(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise ConfigurationError(f"{name} is not set.")
    return value


def positive_number(environ: Mapping[str, str], name: str, default: Number) -> Number:
    """Read a number of the type of ``default``, which is the value of a variable that is not set.

    :raises ConfigurationError: if the variable is not a positive number.
    """
    text = environ.get(name)
    if text is None:
        return default
    try:
        value = type(default)(text)
    except ValueError:
        raise ConfigurationError(f"{name} is {text!r}, not a number.") from None
    if not 0 < value < float("inf"):
        raise ConfigurationError(f"{name} is {text!r}; it must be positive.")
    return value
