"""The offline tier: start, stop, save and load a cloud tier on LocalStack."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

from farcall_common.errors import ConfigurationError, Conflict, Unavailable
from farcall_common.files import write_whole
from farcall_localstack.assembly import ACCOUNT, REGION, stack_names
from farcall_localstack.bundles import AUTO, target_of
from farcall_localstack.deploy import Deployer, Progress, no_progress
from farcall_localstack.environment import ensure_environment, locked
from farcall_localstack.server import READY_FILE, LocalStackServer, answers, end_group, is_localstack, remove_state
from farcall_localstack.synth import ensure_assembly

DEFAULT_USER: Final = "dev@localhost"
_STATE_FILE: Final = "state.json"
_ANOTHER: Final = "For a second tier name another --directory."
# Identity ids are derived from user names, so a user has the same id in every tier.
_IDENTITIES: Final = uuid.UUID("5e0d6f5c-7a3b-5c6e-9f43-2d1f6f1c7b9a")


@dataclasses.dataclass(frozen=True)
class Tier:
    """A deployed cloud tier. The names of its ``stacks``, in the order of their creation, begin with ``name``.
    ``profile`` and ``target`` are the context of the app.

    A client needs ``api_url`` and ``token``; ``tokens`` has one for each user. ``endpoint_url`` is LocalStack's own
    address, ``localstack_pid`` its process (None if it ran before ``up``), and ``directory`` holds logs and state.
    """

    name: str
    profile: str
    target: str
    stacks: tuple[str, ...]
    api_url: str
    token: str
    tokens: dict[str, str]
    endpoint_url: str
    directory: Path
    localstack_pid: int | None
    database_directory: Path | None

    def parameters(self) -> dict[str, str]:
        """The parameters that the stacks were deployed with."""
        return _parameters(self.tokens)

    def variables(self) -> dict[str, str]:
        """The environment variables for Farcall's programs, and for boto3, the AWS command line and `farcall cloud`.
        boto3 reads only AWS_DEFAULT_REGION."""
        return {
            "FARCALL_API_URL": self.api_url,
            "FARCALL_TOKEN": self.token,
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ACCESS_KEY_ID": ACCOUNT,
            "AWS_SECRET_ACCESS_KEY": "test",
        }

    def forwarder_pids(self) -> list[int]:
        """The process ids of the running forwarders. One that dies is restarted after a second."""
        return [int(pid) for _, pid in self._read_task_files("pid")]

    def forwarder_addresses(self) -> list[str]:
        """The addresses of the running forwarders (``tcp://host:port``)."""
        return [str(json.loads(text)["address"]) for _, text in self._read_task_files(READY_FILE)]

    def environment(self) -> dict[str, str]:
        """The API function's variables, with the addresses of database, queue and bucket, for fault injection."""
        for function in Deployer(self.endpoint_url).client("lambda").list_functions()["Functions"]:
            ours = function["FunctionName"].startswith(f"{self.name}-api-")
            if ours and function["Handler"] == "farcall_lambdas.handlers.api.handle":
                return dict(function["Environment"]["Variables"])
        raise ConfigurationError("there is no API function", hint="Is the tier deployed?")

    def require_healthy(self) -> None:
        """:raises Unavailable: if the API does not answer, or a forwarder is not healthy."""
        if not answers(f"{self.api_url}/v2/version", token=self.token):
            raise Unavailable(f"the API at {self.api_url} does not answer", hint=f"The logs are in {self.directory}.")
        ready = dict(self._read_task_files(READY_FILE))
        for task, _ in self._read_task_files("pid"):
            if task not in ready:
                raise Unavailable("a forwarder is not ready yet", hint=f"Its log is in {task}.")
            url = json.loads(ready[task])["health_url"]
            if not answers(url):
                raise Unavailable(f"the forwarder at {url} is unhealthy", hint=f"Its log is in {task}.")

    def save(self) -> None:
        """Write ``state.json`` into the directory; it holds tokens, so only its owner may read it."""
        state = dataclasses.asdict(self)
        state["directory"] = str(self.directory)
        state["database_directory"] = str(self.database_directory) if self.database_directory else None
        write_whole(self.directory / _STATE_FILE, json.dumps(state, indent=2).encode(), mode=0o600)

    @classmethod
    def load(cls, directory: Path) -> Tier:
        """Read what :meth:`save` wrote.

        :raises ConfigurationError: if no tier was started with this directory, or not by this version.
        """
        path = directory / _STATE_FILE
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            database = state["database_directory"]
            state["stacks"] = tuple(state["stacks"])
            state["directory"] = Path(state["directory"])
            state["database_directory"] = Path(database) if database else None
            return cls(**state)
        except FileNotFoundError as error:
            raise ConfigurationError(
                f"no tier runs with {directory}", hint="Start one with: python -m farcall_localstack up"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{path} is from another version: {error}",
                hint="End the process localstack_pid of that file, if it is a LocalStack, and remove the file.",
            ) from error

    @property
    def is_running(self) -> bool:
        """Whether its LocalStack still runs."""
        if self.localstack_pid is not None:
            return is_localstack(self.localstack_pid)
        return answers(f"{self.endpoint_url}/_localstack/health")

    def destroy(self) -> None:
        """End the LocalStack of a saved tier with all its processes. In a LocalStack that ran before ``up``, delete
        only our stacks.

        :raises Unavailable: if such a LocalStack does not answer.
        """
        if self.localstack_pid is None:
            if not self.is_running:
                raise Unavailable(
                    f"the LocalStack at {self.endpoint_url} does not answer",
                    hint=f"If it no longer exists, neither do its stacks: remove {self.directory / _STATE_FILE}.",
                )
            Deployer(self.endpoint_url).delete_stacks(reversed(self.stacks))
        elif self.is_running or not psutil.pid_exists(self.localstack_pid):  # otherwise another process has the id
            end_group(self.localstack_pid)
        if self.database_directory is not None:
            remove_state(self.directory, self.database_directory)
        (self.directory / _STATE_FILE).unlink(missing_ok=True)

    def _read_task_files(self, name: str) -> Iterator[tuple[Path, str]]:
        """The directories of the running tasks, and the text of their file ``name``. A task that ends meanwhile removes
        its files."""
        for pid_file in sorted(self.directory.glob("tasks/*/pid")):
            with contextlib.suppress(FileNotFoundError):
                yield pid_file.parent, (pid_file.parent / name).read_text(encoding="utf-8")


class LocalStackTier:
    """Starts and stops a cloud tier.

    ::

        with LocalStackTier() as tier:
            client = Client(api_url=tier.api_url, token=tier.token)

    State and logs go to ``directory``, or to a temporary one that is removed with the tier. ``users`` are the names
    that get a token; :attr:`token` is that of the first. With ``endpoint_url`` (or ``AWS_ENDPOINT_URL``, if ``mode`` is
    ``"endpoint"``) the stacks go to a running LocalStack, and only they are removed at the end; ``bundles`` are then
    chosen as in :func:`~farcall_localstack.bundles.target_of`. ``progress`` is called before each step of :meth:`up`.
    However this process ends, the LocalStack that it started ends with it, unless :meth:`stay` was called.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        users: tuple[str, ...] = (DEFAULT_USER,),
        name: str = "farcall",
        profile: str = "lab",
        mode: str = "host",
        endpoint_url: str | None = None,
        assembly: Path | None = None,
        bundles: str = AUTO,
        progress: Progress = no_progress,
    ) -> None:
        if mode not in ("host", "endpoint"):
            raise ConfigurationError(f"unknown mode {mode!r}", hint="Choose one of: host, endpoint.")
        self._endpoint_url = endpoint_url or (os.environ.get("AWS_ENDPOINT_URL") if mode == "endpoint" else None)
        if mode == "endpoint" and not self._endpoint_url:
            raise ConfigurationError("mode endpoint needs a running LocalStack", hint="Set AWS_ENDPOINT_URL.")
        if self._endpoint_url is None and bundles not in (AUTO, "host"):
            raise ConfigurationError(
                f"mode host cannot run bundles for {bundles}", hint="Use them with --mode endpoint."
            )
        self._directory = directory
        self._tokens = {user: secrets.token_urlsafe(24) for user in users}
        self._name = name
        self._profile = profile
        self._assembly = assembly
        self._bundles = bundles
        self._progress = progress
        self._server: LocalStackServer | None = None
        self._undo = contextlib.ExitStack()
        self._tier: Tier | None = None

    def up(self) -> Tier:
        """Start LocalStack, deploy, and wait until the forwarder is healthy. After a failure all processes are ended.

        :raises ConfigurationError: if LocalStack's environment or the assembly cannot be created.
        :raises Unavailable: if LocalStack does not start.
        :raises DeployFailed: if a stack cannot be deployed.
        """
        try:
            self._tier = self._up()
        except BaseException:
            self.close()
            raise
        return self._tier

    def stay(self) -> Tier:
        """Like :meth:`up`, but the tier keeps running when this process ends: :meth:`Tier.load` finds it.

        :raises Conflict: if another tier runs or starts with this directory.
        """
        assert self._directory is not None, "a temporary directory would be removed with this process"
        directory = self._make_directory()
        try:
            with locked(directory / "up", wait=False):
                _clear(directory)
                tier = self.up()
                try:
                    tier.save()
                except BaseException:
                    self.close()
                    raise
                if self._server:
                    self._server.detach()
                return tier
        except BlockingIOError as error:
            raise Conflict(f"another `up` is running with {directory}", hint=_ANOTHER) from error

    def close(self) -> None:
        """End all processes that :meth:`up` started, and remove the directory if it is temporary."""
        self._tier = None
        self._undo.close()

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def tier(self) -> Tier:
        """The running tier.

        :raises ConfigurationError: if it is not up.
        """
        if self._tier is None:
            raise ConfigurationError("the tier is not up")
        return self._tier

    @property
    def api_url(self) -> str:
        """The URL of the API."""
        return self.tier.api_url

    @property
    def token(self) -> str:
        """The first user's token."""
        return self.tier.token

    @property
    def directory(self) -> Path:
        """The directory of logs and state."""
        return self.tier.directory

    def forwarder_pids(self) -> list[int]:
        """The process ids of the running forwarders."""
        return self.tier.forwarder_pids()

    def _up(self) -> Tier:
        directory = self._make_directory()
        target = target_of(self._endpoint_url, bundles=self._bundles) if self._endpoint_url else "localstack"
        self._progress("synthesising the templates and bundles")
        assembly = self._assembly or ensure_assembly(name=self._name, profile=self._profile, target=target)
        if self._endpoint_url is None:
            self._progress("preparing LocalStack's environment")
            self._server = LocalStackServer(ensure_environment(), directory=directory)
            self._undo.callback(self._server.stop)
            self._progress("starting LocalStack")
            self._server.start()
        server = self._server
        endpoint_url = server.url if server else self._endpoint_url
        assert endpoint_url is not None
        deployer = Deployer(endpoint_url, progress=self._progress)
        if server is None:
            self._undo.callback(deployer.delete, assembly)
        outputs = deployer.deploy(assembly, parameters=_parameters(self._tokens))
        tier = Tier(
            name=self._name,
            profile=self._profile,
            target=target,
            stacks=stack_names(assembly),
            api_url=f"{endpoint_url}/_aws/execute-api/{outputs['ApiId']}/{outputs['ApiStage']}",
            token=next(iter(self._tokens.values())),
            tokens=self._tokens,
            endpoint_url=endpoint_url,
            directory=directory,
            localstack_pid=server.pid if server else None,
            database_directory=server.database_directory if server else None,
        )
        self._progress("checking API and forwarder")
        tier.require_healthy()
        return tier

    def _make_directory(self) -> Path:
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            return self._directory.resolve()
        temporary = Path(tempfile.mkdtemp(prefix="farcall-localstack-"))
        self._undo.callback(shutil.rmtree, temporary, ignore_errors=True)
        return temporary


def _clear(directory: Path) -> None:
    """Remove the files and processes of a tier that did not end properly.

    :raises Conflict: if a tier runs with the directory.
    """
    if (directory / _STATE_FILE).exists():
        old = Tier.load(directory)
        if old.is_running:
            raise Conflict(
                f"a tier already runs with {directory}", hint=f"`down` ends it, `deploy` updates it. {_ANOTHER}"
            )
        if old.localstack_pid is not None:
            old.destroy()  # the children of a killed LocalStack
    remove_state(directory)


def _parameters(tokens: dict[str, str]) -> dict[str, str]:
    identities = {
        token: {"identity_id": str(uuid.uuid5(_IDENTITIES, user)), "username": user} for user, token in tokens.items()
    }
    return {"DevTokens": json.dumps(identities)}
