"""``farcall-endpoint``: run functions on this machine. The commands are those of Globus Compute."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich import markup
from rich.console import Console

from farcall_common.console import check_number, new_group, prepare_streams, show_table, versions
from farcall_common.credentials import Credentials, config_path, find_home
from farcall_common.errors import ConfigurationError, EndpointInUse, EndpointUnknown, FarcallError
from farcall_common.exit_codes import (
    BROKEN_PIPE,
    EXIT_CODES,
    FAILED,
    TERMINATED,
    UNHEALTHY,
    epilog,
    exit_code,
    exit_status,
    raise_on_sigterm,
)
from farcall_common.files import write_whole
from farcall_common.plain_text import escaped, plain
from farcall_common.standard_streams import drop_output, output_error
from farcall_common.wire import is_uuid
from farcall_endpoint.app import systemd
from farcall_endpoint.app.status import facts_of, show_status, status_exit_code, watch_status
from farcall_endpoint.config.from_globus import read_globus
from farcall_endpoint.config.providers import LocalProviderConfig
from farcall_endpoint.config.reader import read_config
from farcall_endpoint.config.schema import Config, EngineConfig
from farcall_endpoint.config.site_template import SiteTemplate, find_template, list_templates
from farcall_endpoint.config.template import write_config
from farcall_endpoint.contracts.agent_manager import PrewarmRequest
from farcall_endpoint.files.settings import GlobusSettings
from farcall_endpoint.services import daemon
from farcall_endpoint.services.directory import EndpointDirectory, list_endpoints

_EXIT_CODES: Final = {code: meaning for code, meaning in EXIT_CODES.items() if code != BROKEN_PIPE} | {
    FAILED: "not connected (status)",
    UNHEALTHY: "connected, and no task can run (status)",
    TERMINATED: "terminated by a signal (a running endpoint exits with 0)",
}

app = new_group("Run functions on this machine. The commands are those of Globus Compute.", epilog=epilog(_EXIT_CODES))
globus = new_group("Log in at Globus, to copy files of tasks from and to its collections.")
app.add_typer(globus, name="globus")
_out = Console(highlight=False)
_err = Console(stderr=True, highlight=False)


def _names(context: typer.Context) -> list[str]:
    """Return the names of endpoints, for the shell's completion."""
    home = context.find_root().params.get("config_dir") or find_home(os.environ)
    return [directory.name for directory in list_endpoints(home)]


Name = Annotated[str, typer.Argument(help="The endpoint's local name.", autocompletion=_names)]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON for programs.")]


@dataclasses.dataclass(frozen=True)
class _Options:
    config_dir: Path | None
    debug: bool

    @property
    def home(self) -> Path:
        """The directory of Farcall's files.

        :raises ConfigurationError: if the user has no home directory.
        """
        return self.config_dir or find_home(os.environ)


def main() -> None:
    """The console script."""
    prepare_streams()
    raise_on_sigterm()
    try:
        app()
    except OSError as error:
        if (known := output_error(error)) is None:
            raise
        drop_output()
        _show_error(str(known))
        sys.exit(exit_code(known))


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"farcall-endpoint {importlib.metadata.version('farcall-endpoint')}")
        raise typer.Exit


@app.callback()
def _global(
    context: typer.Context,
    config_dir: Annotated[
        Path | None, typer.Option("--config-dir", "-c", help="Instead of $FARCALL_HOME or ~/.farcall.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Log more.")] = False,
    version: Annotated[  # noqa: ARG001 - its callback exits
        bool, typer.Option("--version", "-V", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    context.obj = _Options(config_dir, debug)


@app.command()
def configure(
    context: typer.Context,
    name: Name = "default",
    display_name: Annotated[str | None, typer.Option(help="Name shown to others. [default: the name]")] = None,
    max_workers: Annotated[
        int | None, typer.Option(min=1, help="Tasks at a time. [default: one for each core]")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            metavar="TEMPLATE|list",
            help="Start from the file for a scheduler or a kind of machine; `list` shows all.",
            autocompletion=lambda: [each.name for each in list_templates()],
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the template, such as partition=gpu."),
    ] = None,
    from_globus: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Start from a configuration of Globus Compute; lists what is left out."),
    ] = None,
) -> None:
    """Create an endpoint: a directory with a configuration file and a key pair."""
    with _errors():
        if template == "list":
            show_table(("template", "for"), [(each.name, each.description) for each in list_templates()])
            return
        directory = _directory(context, name)
        if from_globus is not None:
            if template is not None or set_:
                raise ConfigurationError("--from-globus has a file of its own.", hint="Leave out --template and --set.")
            _configure_from_globus(directory, from_globus, display_name, max_workers)
        elif template is None:
            if set_:
                raise ConfigurationError("--set changes a template.", hint="Name one with --template.")
            directory.create()
            write_config(
                directory.config_file,
                Config(display_name=display_name or name, engine=EngineConfig(max_workers_per_node=max_workers)),
            )
        else:
            _configure_from(directory, find_template(template), display_name or name, max_workers, set_ or [])
        _out.print(f"Configured [bold]{name}[/] in {directory.path}\nStart it with: farcall-endpoint start {name}")


@app.command()
def start(
    context: typer.Context,
    name: Name = "default",
    detach: Annotated[bool, typer.Option("--detach", help="Start a daemon, and return when it is connected.")] = False,
    timeout: Annotated[
        float, typer.Option(callback=check_number, help="With --detach: seconds to wait for the connection.")
    ] = 30.0,
    endpoint_uuid: Annotated[
        str | None, typer.Option(help="On the first start: use this existing registration.")
    ] = None,
    new_spool: Annotated[
        bool, typer.Option("--new-spool", help="Rename the spool and start with an empty one.")
    ] = False,
) -> None:
    """Start an endpoint. The first start registers it."""
    with _errors():
        directory = _directory(context, name)
        directory.require()
        if new_spool and (kept := directory.archive_spool()):
            _out.print(f"The old spool is kept as {kept}")
        _adopt(directory, endpoint_uuid)
        if detach:
            _start_detached(context, directory, timeout)
            return
        options = ["--console", *(["--debug"] if _options(context).debug else [])]
        command = daemon.agent_command(directory, home=_options(context).home, options=options)
        os.execv(command[0], command)  # noqa: S606 - the agent is this process: signals and exit code are its own


@app.command()
def stop(context: typer.Context, name: Name = "default") -> None:
    """Stop an endpoint. Unfinished tasks stay in its spool."""
    with _errors():
        directory = _directory(context, name)
        directory.require()
        was_running = daemon.stop_agent(directory, grace_s=_grace_s(directory))
        _out.print(f"Stopped [bold]{name}[/]" if was_running else f"[bold]{name}[/] was not running")


@app.command()
def restart(
    context: typer.Context,
    name: Name = "default",
    timeout: Annotated[float, typer.Option(callback=check_number, help="Seconds to wait for the connection.")] = 30.0,
) -> None:
    """Stop an endpoint if it is running, then start it as a daemon."""
    with _errors():
        directory = _directory(context, name)
        directory.require()
        daemon.stop_agent(directory, grace_s=_grace_s(directory))
        _start_detached(context, directory, timeout)


@app.command("list")
def list_(context: typer.Context, as_json: AsJson = False) -> None:
    """List the endpoints of this machine; to a pipe, one tab-separated line for each."""
    with _errors():
        listed = [(directory, daemon.read_state(directory)) for directory in list_endpoints(_options(context).home)]
        if as_json:
            _print_json([facts_of(directory.name, state, now=time.time()) for directory, state in listed])
            return
        rows = [(state.endpoint_id or "-", state.state, directory.name, state.note) for directory, state in listed]
        show_table(("endpoint", "status", "name", "note"), rows, empty="There are no endpoints on this machine.")


@app.command()
def status(
    context: typer.Context,
    name: Name = "default",
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again each second, until Ctrl-C; to a pipe, at each change.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the status of an endpoint. Exit code 0 if it is running and connected, 3 if it is connected and can run
    nothing (its note says why), 1 if it is not running."""
    with _errors():
        directory = _directory(context, name)
        read = functools.partial(_read_facts, directory)
        if watch:
            watch_status(read, console=_out, as_json=as_json)
        facts = read()
        show_status(facts, console=_out, as_json=as_json)
    raise typer.Exit(status_exit_code(facts))


@app.command()
def prewarm(
    context: typer.Context,
    name: Name,
    environment: Annotated[
        str, typer.Argument(help="Its name or key, as `status` or a task named it; or TYPE:LOCATION.")
    ],
    count: Annotated[int, typer.Option(min=0, help="Workers to keep warm, on all nodes together; 0 ends it.")] = 1,
    node: Annotated[str, typer.Option(help="Only on the node with this host name.")] = "",
    timeout: Annotated[float, typer.Option(callback=check_number, help="Seconds to wait until they are warm.")] = 600.0,
) -> None:
    """Keep workers of an environment warm, spread over the nodes, until further notice. Waits until they are."""
    with _errors():
        directory = _directory(context, name)
        directory.require()
        found = daemon.find_environment(directory, environment)
        request = PrewarmRequest(environment=found, count=count, node=node, requested_at=time.time())
        outcome = daemon.prewarm(
            directory, request, timeout_s=timeout, echo=lambda text: _err.print(escape(text), soft_wrap=True)
        )
        _out.print(f"[bold]{escape(found.label)}[/]: {escape(outcome)}", soft_wrap=True)


@app.command()
def diagnose(
    context: typer.Context,
    name: Name = "default",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A new .tar.gz file, or a new directory for single files.")
    ] = None,
    network: Annotated[bool, typer.Option(help="Check the connections to the API and the forwarder.")] = True,
    environments: Annotated[
        bool, typer.Option(help="Try what tasks can run in: each container technology, namespaces, uv.")
    ] = True,
) -> None:
    """Collect data for a bug report, without secrets: versions, configuration, logs, machine, spool, network, container
    technologies."""
    from farcall_endpoint.diagnose import gather  # here, because an HTTP client would slow every other command down

    with _errors():
        directory = _directory(context, name)
        directory.require()
        report = gather(
            directory,
            home=_options(context).home,
            environ=os.environ,
            with_network=network,
            with_environments=environments,
        )
        path = output or Path(f"farcall-diagnose-{name}-{time.strftime('%Y%m%dT%H%M%S')}.tar.gz")
        marks = {True: "[green]good[/]", False: "[red]BAD[/] ", None: "  - "}
        for finding in report.findings:
            _out.print(f"{marks[finding.good]}  {escape(finding.text)}", soft_wrap=True)
        try:
            (report.write_archive if path.name.endswith(".tar.gz") else report.write_directory)(path)
        except OSError as error:
            message = f"{path} cannot be written: {error.strerror}."
            raise ConfigurationError(message, hint="Name another path with --output.") from error
        _out.print(f"Written to {escape(str(path))}. Review it before you share it.", soft_wrap=True)


@app.command("enable-on-boot")
def enable_on_boot(context: typer.Context, name: Name = "default") -> None:
    """Start an endpoint at boot, by this user's systemd. Needs no root."""
    with _errors():
        directory, home = _directory(context, name), _options(context).home
        directory.require()
        _require_stored_credentials(directory, home)
        text = systemd.unit_text(
            name,
            command=daemon.agent_command(directory, home=home.absolute()),
            working_dir=directory.path.absolute(),
            environ=os.environ,
            stop_s=_grace_s(directory) + daemon.STOP_MARGIN_S,
        )
        outcome = systemd.enable_on_boot(systemd.unit_file(os.environ, name), text, environ=os.environ)
        _out.print(f"Wrote {escape(str(outcome.unit))}", soft_wrap=True)
        if outcome.done:
            _out.print(f"[bold]{name}[/] starts with your systemd. For a start at boot, before you log in, run once:")
        else:
            _out.print(
                f"systemd was not updated: {escape(outcome.reason)}. Where your systemd runs, run:", soft_wrap=True
            )
        for command in outcome.to_do:
            _out.print(f"  {command}", soft_wrap=True)


@app.command("disable-on-boot")
def disable_on_boot(context: typer.Context, name: Name = "default") -> None:
    """Undo enable-on-boot. A running endpoint continues."""
    with _errors():
        _directory(context, name)
        outcome = systemd.disable_on_boot(systemd.unit_file(os.environ, name), environ=os.environ)
        if outcome is None:
            _out.print(f"[bold]{name}[/] was not started at boot")
            return
        _out.print(f"Removed {escape(str(outcome.unit))}", soft_wrap=True)
        if not outcome.done:
            _out.print(f"systemd was not updated: {escape(outcome.reason)}", soft_wrap=True)


@app.command()
def delete(
    context: typer.Context,
    name: Name = "default",
    force: Annotated[bool, typer.Option("--force", help="Stop it first; continue if the API is unreachable.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete an endpoint: its registration and its directory with the spool."""
    with _errors():
        directory = _directory(context, name)
        directory.require()
        if not yes:
            typer.confirm(f"Delete {directory.path} and all that is in it?", abort=True)
        if force:
            daemon.stop_agent(directory, grace_s=0)
        with directory.lock():
            _forget(directory, home=_options(context).home, force=force)
            systemd.disable_on_boot(systemd.unit_file(os.environ, name), environ=os.environ)
            shutil.rmtree(directory.path)
        _out.print(f"Deleted [bold]{name}[/]")


@app.command()
def fingerprint(
    context: typer.Context,
    name: Name = "default",
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Make a new sealing key first; the agent takes it at its next start.")
    ] = False,
) -> None:
    """Show the identity to which calls of an endpoint are sealed, for its users to compare."""
    with _errors():
        directory = _directory(context, name)
        directory.require()
        _out.print(directory.make_sealing(rotate=rotate).fingerprint, soft_wrap=True, highlight=False)


@app.command("revoke-credential")
def revoke_credential(
    context: typer.Context,
    endpoint: Annotated[str, typer.Argument(help="The endpoint's local name, or its id.", autocompletion=_names)],
) -> None:
    """Revoke the credential of an endpoint, and disconnect its agent: for example if its host was stolen."""
    from farcall_endpoint.services.cloud import (
        Cloud,  # here, because an HTTP client would slow every other command down     )
    )

    with _errors():
        endpoint_id: str | None = endpoint
        if not is_uuid(endpoint):
            directory = _directory(context, endpoint)
            directory.require()
            endpoint_id = directory.read_endpoint_id()
        if endpoint_id is None:
            raise ConfigurationError(f"The endpoint {endpoint} was never started: it has no credential.")
        with contextlib.closing(Cloud(Credentials.resolve(home=_options(context).home))) as cloud:
            cloud.revoke_credential(endpoint_id)
        _out.print(f"Revoked the credential of [bold]{endpoint}[/]")


@globus.command("login")
def globus_login(
    context: typer.Context,
    name: Name = "default",
    client_id: Annotated[
        str | None,
        typer.Option(help="Id of your application at Globus. [default: FARCALL_GLOBUS_CLIENT_ID, or that of before]"),
    ] = None,
    collection: Annotated[
        list[str] | None,
        typer.Option(metavar="UUID", help="Consent to the use of the data of this collection, too. May be repeated."),
    ] = None,
    browser: Annotated[bool, typer.Option("--browser", help="Log in with a browser on this machine.")] = False,
) -> None:
    """Log in, so that an endpoint can copy files with Globus. With FARCALL_GLOBUS_CLIENT_SECRET, as that client."""
    with _errors():
        from farcall_endpoint.files.globus_login import log_in

        directory = _directory(context, name)
        directory.require()
        path = directory.globus_login_file
        log_in(path, client_id=client_id, collections=collection or (), browser=browser, environ=os.environ)
        _out.print(f"[bold]{name}[/] is logged in at Globus: {escape(str(path))}", soft_wrap=True)
        _check_globus(directory)


@globus.command("logout")
def globus_logout(context: typer.Context, name: Name = "default") -> None:
    """Revoke and delete the login of an endpoint at Globus."""
    with _errors():
        from farcall_endpoint.files.globus_login import log_out

        directory = _directory(context, name)
        directory.require()
        was_logged_in = log_out(directory.globus_login_file, environ=os.environ)
        _out.print(f"[bold]{name}[/] {'is logged out of' if was_logged_in else 'was not logged in at'} Globus")


def _check_globus(directory: EndpointDirectory) -> None:
    """Try the login, and say what is missing."""
    from farcall_endpoint.files.globus_login import check

    settings = GlobusSettings.of_config(read_config(directory.config_file), directory)
    if settings is None:
        _out.print("Name the endpoint's own collection in config.yaml: files.globus", soft_wrap=True)
        return
    is_good, text = check(settings, environ=os.environ)
    _out.print(f"{'[green]good[/]' if is_good else '[red]BAD[/] '}  {escape(text)}", soft_wrap=True)
    if not is_good:
        raise typer.Exit(FAILED)


@app.command()
def version(as_json: AsJson = False) -> None:
    """Show versions, for a bug report: of the packages of Farcall that are installed here, of Python, of the
    platform."""
    found = versions()
    if as_json:
        _print_json(found)
    else:
        for name, value in found.items():
            typer.echo(f"{name} {value}")


def _read_facts(directory: EndpointDirectory) -> dict[str, Any]:
    directory.require()
    return facts_of(directory.name, daemon.read_state(directory), now=time.time())


def _configure_from(
    directory: EndpointDirectory, template: SiteTemplate, display_name: str, max_workers: int | None, given: list[str]
) -> None:
    settings = {"display_name": display_name}
    if max_workers is not None:
        settings["max_workers_per_node"] = str(max_workers)
    for each in given:
        field, separator, value = each.partition("=")
        if not separator:
            raise ConfigurationError(f"--set {each}: there is no value.", hint="Write --set FIELD=VALUE.")
        settings[field.strip()] = value.strip()
    text = template.fill(settings)
    directory.create()
    write_whole(directory.config_file, text.encode(), mode=0o600)
    if review := template.to_review(settings):
        _out.print(f"Review in {directory.config_file}: {', '.join(review)}", soft_wrap=True)


def _configure_from_globus(
    directory: EndpointDirectory, path: Path, display_name: str | None, max_workers: int | None
) -> None:
    config, notes = read_globus(path)
    engine = config.engine
    if max_workers is not None:
        engine = msgspec.structs.replace(engine, max_workers_per_node=max_workers)
    name = display_name or config.display_name or directory.name
    directory.create()
    write_config(directory.config_file, msgspec.structs.replace(config, display_name=name, engine=engine))
    for note in notes:
        _out.print(escape(str(note)), soft_wrap=True)
    if not isinstance(engine.provider, LocalProviderConfig):
        _out.print(
            f"Review in {directory.config_file}: nodes need farcall-endpoint of this version, from worker_init or the "
            "image of pods.",
            soft_wrap=True,
        )


def escape(text: str) -> str:
    """Text of other people, as the markup of rich takes it."""
    return markup.escape(plain(text))


def _print_json(value: object) -> None:
    typer.echo(escaped(json.dumps(value, indent=2)))


def _start_detached(context: typer.Context, directory: EndpointDirectory, timeout_s: float) -> None:
    options = _options(context)
    pid = daemon.start_detached(directory, home=options.home, debug=options.debug, timeout_s=timeout_s, echo=_err.print)
    _out.print(f"[bold]{directory.name}[/] is connected: endpoint {directory.read_endpoint_id()}, process {pid}")


def _adopt(directory: EndpointDirectory, endpoint_uuid: str | None) -> None:
    if endpoint_uuid is None:
        return
    if not is_uuid(endpoint_uuid):
        raise ConfigurationError(f"{endpoint_uuid!r} is not a UUID.")
    known = directory.read_endpoint_id()
    if known not in (None, endpoint_uuid):
        raise EndpointInUse(f"The endpoint {directory.name} is registered as {known}.", hint="Configure a new one.")
    if known is None:  # otherwise the file has more than the id
        directory.write_endpoint_id(endpoint_uuid)


def _forget(directory: EndpointDirectory, *, home: Path, force: bool) -> None:
    from farcall_endpoint.services.cloud import (
        Cloud,  # here, because an HTTP client would slow every other command down     )
    )

    endpoint_id = directory.read_endpoint_id()
    if endpoint_id is None:
        return
    try:
        cloud = Cloud(Credentials.resolve(home=home))
        with contextlib.closing(cloud), contextlib.suppress(EndpointUnknown):
            cloud.delete(endpoint_id)
    except FarcallError as error:
        if not force:
            raise
        _err.print(f"[yellow]The registration was not deleted:[/] {escape(str(error))}")


def _require_stored_credentials(directory: EndpointDirectory, home: Path) -> None:
    """At boot there are no environment variables of a login."""
    try:
        directory.find_login(home=home, environ={})
    except ConfigurationError as error:
        raise ConfigurationError(
            "At boot the API's address and the token must come from a file, and "
            f"{error.record.message.removesuffix('.')}.",
            hint="Start the endpoint once: it gets a credential of its own. Or `farcall login` writes the file, or "
            f'write {config_path(home)} yourself: [default], api_url = "...", token = "..."; chmod 600.',
        ) from error


def _directory(context: typer.Context, name: str) -> EndpointDirectory:
    return EndpointDirectory.of(_options(context).home, name)


def _options(context: typer.Context) -> _Options:
    options = context.find_root().obj
    assert isinstance(options, _Options)
    return options


def _grace_s(directory: EndpointDirectory) -> float:
    return read_config(directory.config_file).shutdown_grace


def _show_error(message: str) -> None:
    _err.print(f"[red]Error:[/] {escape(message)}", soft_wrap=True)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Farcall's errors end the command with their text and their exit code."""
    try:
        yield
    except daemon.StartFailed as error:
        _show_error(error.record.message)
        raise typer.Exit(error.exit_code) from error
    except FarcallError as error:
        _show_error(str(error))
        raise typer.Exit(exit_code(error)) from error
    except KeyboardInterrupt as interruption:
        raise typer.Exit(exit_status(interruption)) from None
