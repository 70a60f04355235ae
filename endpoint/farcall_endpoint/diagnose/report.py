"""Diagnosis report. Each part is collected separately; if one fails, its place has the reason."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
import shutil
import sqlite3
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from farcall_common.credentials import Credentials, stored_values
from farcall_common.errors import ConfigurationError, FarcallError
from farcall_endpoint.config.providers import LocalProviderConfig
from farcall_endpoint.config.reader import check_binds, read_config
from farcall_endpoint.config.schema import Config
from farcall_endpoint.diagnose import environments, machine, network, readable
from farcall_endpoint.diagnose.scrub import Scrubber, is_secret_name
from farcall_endpoint.files.settings import GlobusSettings
from farcall_endpoint.host.isolation.paths import SHARED_MEMORY, readable_paths
from farcall_endpoint.host.logs import tail
from farcall_endpoint.services import daemon
from farcall_endpoint.services.directory import EndpointDirectory
from farcall_endpoint.services.valkey import find_program

_LOG_BYTES: Final = 256 * 1024
_MAX_LOGS: Final = 12
_MOST_WRITABLE: Final = 20
"""Findings of one kind; the file has all."""
_EXPECTED: Final = (OSError, ValueError, sqlite3.Error, psutil.Error, FarcallError, yaml.YAMLError, RecursionError)
_ENVIRONMENT: Final = (
    "FARCALL_", "SLURM", "PBS", "LSB_", "LSF_", "SGE_", "CONDOR", "_CONDOR", "KUBE", "CONDA_", "OMP_", "CUDA_", "ROCR_",
    "ZE_", "MODULE", "LOADED", "XDG_", "PYTHON", "http", "https", "no_proxy", "HTTP", "HTTPS", "NO_PROXY", "SSL_",
)  # fmt: skip
_VARIABLES: Final = (
    "PATH",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "HOME",
    "USER",
    "SHELL",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "TZ",
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line for the user. ``good`` is None if it is neither good nor bad."""

    good: bool | None
    text: str


@dataclasses.dataclass(frozen=True)
class Report:
    """Files by name, without secrets, and findings."""

    files: dict[str, str]
    findings: tuple[Finding, ...]

    def write_archive(self, path: Path) -> None:
        """One ``.tar.gz`` that only its owner may read.

        :raises OSError: if it is there already, or cannot be written.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        folder = path.name.removesuffix(".tar.gz")
        try:
            with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
                for name, text in self.files.items():
                    data = text.encode()
                    member = tarfile.TarInfo(f"{folder}/{name}")
                    member.size, member.mode, member.mtime = len(data), 0o600, int(time.time())
                    archive.addfile(member, io.BytesIO(data))
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def write_directory(self, path: Path) -> None:
        """A directory that only its owner may read.

        :raises OSError: if it is there already, or cannot be written.
        """
        path.mkdir(mode=0o700)
        try:
            for name, text in self.files.items():
                file = path / name
                file.parent.mkdir(mode=0o700, exist_ok=True)
                file.write_text(text)
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise


def gather(
    directory: EndpointDirectory,
    *,
    home: Path,
    environ: Mapping[str, str],
    with_network: bool = True,
    with_environments: bool = True,
) -> Report:
    """Collect a report; takes a few seconds. It connects to the API, the forwarder and uv's index only
    ``with_network``, and starts containers only ``with_environments``."""
    return _Gathering(directory, home, environ, with_network, with_environments).run()


class _Gathering:
    def __init__(
        self,
        directory: EndpointDirectory,
        home: Path,
        environ: Mapping[str, str],
        with_network: bool,
        with_environments: bool,
    ) -> None:
        self._directory = directory
        self._home = home
        self._environ = environ
        self._with_network = with_network
        self._with_environments = with_environments
        self._findings: list[Finding] = []
        self._scrubber = Scrubber(self._secrets())

    def run(self) -> Report:
        parts: dict[str, Callable[[], object]] = {
            "versions.json": machine.versions,
            "machine.json": machine.machine,
            "schedulers.json": lambda: machine.schedulers(self._environ),
            "environment.json": self._environment,
            "config.yaml": self._config,
            "valkey.json": self._valkey,
            "status.json": self._status,
            "processes.json": self._processes,
            "spool.json": self._spool,
            "disk.json": self._disk,
            "files.json": self._files,
            "readable.json": self._readable,
        }
        if self._with_network:
            parts["network.json"] = self._network
        if self._with_environments:
            parts["environments.json"] = self._environments
        files = {name: self._text(part) for name, part in parts.items()}
        for name in ("tasks", "connection"):
            if (path := self._directory.events_file(name)).exists():
                files[path.name] = self._events(path)
        for name, path in self._logs():
            if not os.access(path, os.R_OK):
                self._add_finding(False, f"{path} cannot be read")
            files[f"logs/{name}"] = self._scrubber.clean(tail(path, _LOG_BYTES))
        findings = tuple(Finding(each.good, self._scrubber.clean(each.text)) for each in self._findings)
        marks = {True: "good", False: "BAD", None: "-"}
        files["findings.txt"] = "".join(f"{marks[each.good]:>4}  {each.text}\n" for each in findings)
        return Report(files, findings)

    def _text(self, part: Callable[[], object]) -> str:
        try:
            data = part()
        except _EXPECTED as error:
            data = f"This could not be determined: {error}\n"
        text = data if isinstance(data, str) else json.dumps(data, indent=1, default=str) + "\n"
        return self._scrubber.clean(text)

    def _add_finding(self, good: bool | None, text: str) -> None:
        self._findings.append(Finding(good, text))

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _environment(self) -> dict[str, str]:
        wanted = {
            name: value for name, value in self._environ.items() if name in _VARIABLES or name.startswith(_ENVIRONMENT)
        }
        return self._scrubber.clean_environment(wanted)

    def _config(self) -> str:
        text = self._directory.config_file.read_text(errors="replace")
        try:
            check_binds(read_config(self._directory.config_file), self._directory.config_file)
        except ConfigurationError as error:
            self._add_finding(False, str(error))
        else:
            self._add_finding(True, "config.yaml is good")
        return text

    def _valkey(self) -> dict[str, Any]:
        program = find_program()
        if program is None:
            hint = "`pip install 'farcall-endpoint[valkey]'` adds it"
            self._add_finding(None, f"no Valkey for tasks that ask for one (current().redis()): {hint}")
        else:
            self._add_finding(True, f"Valkey for tasks that ask for one: {program}")
        return {"program": program}

    def _environments(self) -> dict[str, Any]:
        try:
            engine = read_config(self._directory.config_file).engine
        except ConfigurationError:
            engine = Config().engine
        facts = environments.environments(
            self._environ, index_url=engine.environments.index_url, with_network=self._with_network
        )
        is_node = isinstance(engine.provider, LocalProviderConfig)
        needed = engine.container_type if is_node and engine.container_type else ""
        for good, text in environments.findings(facts, needed=needed):
            self._add_finding(good, text)
        if not is_node:
            self._add_finding(None, "what works on the nodes may be different: `farcall-endpoint status` reports them")
        return facts

    def _status(self) -> dict[str, Any]:
        state = daemon.read_state(self._directory)
        good = {"Running": True, "Blocked": False}.get(state.state)
        self._add_finding(good, f"the endpoint is {state.state}{f': {state.note}' if state.note else ''}")
        return dataclasses.asdict(state)

    def _processes(self) -> list[dict[str, Any]]:
        agent = self._directory.read_agent()
        process = agent.find() if agent is not None and agent.is_here() else None
        if process is None:
            return []
        return [machine.process_facts(each) for each in (process, *process.children(recursive=True))]

    def _spool(self) -> dict[str, Any]:
        path = self._directory.spool_file
        if not path.exists():
            return {"exists": False}
        files = [*path.parent.glob(f"{path.name}*"), *self._directory.bodies_directory.glob("*")]
        facts: dict[str, Any] = {"bytes": sum(file.stat().st_size for file in files)}
        agent = self._directory.read_agent()
        if agent is not None and (not agent.is_here() or agent.find() is not None):
            return facts | {"note": "the running agent holds it; status.json has its numbers"}
        database = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=2)
        try:
            tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            for table in tables:
                (facts[table],) = database.execute(f'SELECT count(*) FROM "{table}"').fetchone()  # noqa: S608
            if "tasks" in tables:
                (oldest,) = database.execute("SELECT min(at) FROM tasks").fetchone()
                facts["oldest_task_age_s"] = None if oldest is None else round(time.time() - oldest, 1)
        finally:
            database.close()
        return facts

    def _disk(self) -> list[dict[str, Any]]:
        places = {"endpoint": self._directory.path, "home": self._home, "temporary": machine.temporary()}
        with contextlib.suppress(ConfigurationError):
            working_dir = self._directory.path / read_config(self._directory.config_file).engine.working_dir
            if working_dir.is_dir():
                places["working_dir"] = working_dir
                if working_dir.stat().st_dev != self._directory.path.stat().st_dev:
                    self._add_finding(
                        None,
                        f"each task gets a copy of each file that it reads, as {working_dir} and "
                        f"{self._directory.path} are on different file systems",
                    )
        memory = Path(SHARED_MEMORY)
        if memory.is_dir():
            places["memory"] = memory
        found = machine.disks(places)
        for disk in found:
            if disk["free_share"] < machine.SCARCE:
                self._add_finding(False, f"{disk['path']} is nearly full: {disk['free_bytes'] // 2**20} MiB are free")
        return found

    def _files(self) -> list[dict[str, Any]]:
        secret = self._directory.path / "curve.secret"
        if secret.exists() and secret.stat().st_mode & 0o077:
            self._add_finding(False, f"{secret} is readable by other users: chmod 600 {secret}")
        return machine.listing(self._directory.path)

    def _readable(self) -> dict[str, str]:
        """Paths that other submitters' tasks read at ``landlock`` and ``bubblewrap``, and other accounts can change."""
        engine = Config().engine
        with contextlib.suppress(ConfigurationError):
            engine = read_config(self._directory.config_file).engine
        home = Path(self._environ.get("HOME", "/"))
        paths = readable_paths(engine.readable_paths, private=[self._home], home=home, environ=self._environ)
        found = readable.writable_by_others(
            (path for path in paths if not path.startswith(("/proc", "/sys"))), user=os.geteuid()
        )
        for path, reason in itertools.islice(found.items(), _MOST_WRITABLE):
            self._add_finding(
                False,
                f"tasks of other submitters read {path}, which other accounts may change ({reason}): their servers can "
                "pass files to tasks there. Take that right away, or the path out of PATH and engine.readable_paths",
            )
        if len(found) > _MOST_WRITABLE:
            self._add_finding(False, f"{len(found) - _MOST_WRITABLE} more such paths are in readable.json")
        if not found:
            self._add_finding(True, "no other account may change what tasks of other submitters read")
        return found

    def _network(self) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        credentials = self._credentials()
        if credentials is not None:
            facts["api"] = answer = network.check_api(credentials, self._directory.read_endpoint_id())
            self._add_finding(answer.good, f"the API at {credentials.api_url}: {answer.text}")
        address = self._forwarder_address()
        if address is None:
            self._add_finding(None, "no forwarder address yet: the endpoint has never connected")
        else:
            facts["forwarder"] = reached = network.check_port(address)
            self._add_finding(reached.good, f"the forwarder at {address}: {reached.text}")
        facts |= self._globus()
        return {name: dataclasses.asdict(value) for name, value in facts.items()}

    def _globus(self) -> dict[str, network.Reached]:
        """Whether the endpoint can copy files with Globus, if it has a collection."""
        try:
            settings = GlobusSettings.of_config(read_config(self._directory.config_file), self._directory)
            if settings is None:
                return {}
            from farcall_endpoint.files.globus_login import check  # here, because globus-sdk is an extra

            answer = network.Reached(*check(settings, environ=self._environ))
        except ConfigurationError as error:
            answer = network.Reached(False, str(error))
        self._add_finding(answer.good, f"Globus: {answer.text}")
        return {"globus": answer}

    def _credentials(self) -> Credentials | None:
        try:
            return Credentials.resolve(environ=self._environ, home=self._home)
        except ConfigurationError as error:
            try:
                self._directory.find_login(environ=self._environ, home=self._home)
                self._add_finding(None, "no login of the owner: the endpoint has a credential, which checks nothing")
            except ConfigurationError:
                self._add_finding(False, str(error))
            return None

    def _forwarder_address(self) -> str | None:
        """The last one that the agent has connected to."""
        said = self._directory.read_status().get("forwarder")
        return str(said) if said else network.last_address(tail(self._directory.log_file, _LOG_BYTES))

    def _events(self, path: Path) -> str:
        """An event log. Its texts are cleaned one by one, so that it can be replayed."""
        try:
            turns = [json.loads(line) for line in path.read_text().splitlines()]
        except _EXPECTED as error:
            return self._scrubber.clean(f"This could not be determined: {error}\n")
        return "".join(json.dumps(self._scrubber.clean_values(turn)) + "\n" for turn in turns)

    def _secrets(self) -> Iterator[str]:
        """All known secrets."""
        for name, value in [*self._environ.items(), *stored_values(self._home)]:
            if is_secret_name(name) and not _is_public(value):
                yield value
        for path in self._directory.path.iterdir():
            if path.suffix in (".secret", ".keys", ".key") and path.is_file():
                try:
                    yield from path.read_text(errors="replace").split()
                except OSError as error:
                    self._add_finding(False, f"{path} cannot be read, so its keys were not removed: {error.strerror}")
        with contextlib.suppress(OSError, ValueError):
            login = json.loads(self._directory.globus_login_file.read_bytes())
            yield from (str(login[name]) for name in ("access_token", "refresh_token") if login.get(name))

    def _logs(self) -> Iterator[tuple[str, Path]]:
        directory = self._directory
        yield from ((path.name, path) for path in sorted(directory.path.glob("endpoint.log*"))[:2])
        newest = sorted(directory.log_dir.glob("*.log"), key=_modified_at, reverse=True)
        yield from ((path.name, path) for path in newest[:_MAX_LOGS])


def _modified_at(path: Path) -> float:
    """In seconds since the epoch; 0 if the file does not exist any more: managers delete old logs."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _is_public(value: str) -> bool:
    """Variables with names such as SSH_AUTH_SOCK or SLURM_KEY_PATH hold paths, which are in every log line."""
    return value.startswith("/") or value.lower() in ("true", "false", "0", "1", "yes", "no")
