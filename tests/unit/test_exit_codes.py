"""Exit codes: one table, and both commands end with its codes."""

from __future__ import annotations

import ast
import os
import re
from typing import Any, Final, cast

import pytest
import typer
from typer.testing import CliRunner

from farcall.cli._app import COMMANDS, app
from farcall.cli._lazy import Deferred
from farcall_common.errors import (
    ConfigurationError,
    Conflict,
    EndpointIncompatible,
    EndpointInUse,
    EndpointUnknown,
    FarcallError,
    Forbidden,
    LimitExceeded,
    NodesUnavailable,
    NoForwarder,
    PayloadTooLarge,
    SessionRefused,
    SpoolOutdated,
    TaskCancelled,
    TaskPending,
    Unauthenticated,
    Unavailable,
    VersionUnsupported,
)
from farcall_common.exit_codes import BROKEN_PIPE, EXIT_CODES, Terminated, exit_code, exit_code_of
from farcall_endpoint.app import cli, systemd
from farcall_endpoint.services.daemon import StartFailed
from tests.unit.product import ROOT, error_classes, modules

CLASSES: Final = error_classes()
raised = FarcallError("set by a test")


def fail() -> None:
    """Fail."""
    raise raised


def end_of_farcall(error: FarcallError, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of `farcall` after an error in one of its commands."""
    monkeypatch.setitem(globals(), "raised", error)
    monkeypatch.setitem(cast("dict[str, Any]", COMMANDS), "fail", Deferred(f"{__name__}:fail", "Fail."))
    return CliRunner().invoke(app, ["fail"], prog_name="farcall").exit_code


def end_of_endpoint(error: FarcallError) -> int:
    """The exit code of `farcall-endpoint` after an error in one of its commands."""
    with pytest.raises(typer.Exit) as ended, cli._errors():
        raise error
    return ended.value.exit_code


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_both_commands_exit_with_a_code_of_the_table(cls: type[FarcallError], monkeypatch: pytest.MonkeyPatch) -> None:
    error = cls("it broke")
    expected = exit_code(error)
    assert end_of_farcall(error, monkeypatch) == end_of_endpoint(error) == expected == exit_code_of(cls)
    assert expected in EXIT_CODES


@pytest.mark.parametrize(
    ("cls", "code"),
    [
        (TaskPending, 75),
        (TaskCancelled, 1),
        (NodesUnavailable, 1),
        (PayloadTooLarge, os.EX_DATAERR),
        (EndpointIncompatible, os.EX_DATAERR),
        (SpoolOutdated, os.EX_DATAERR),
        (EndpointUnknown, os.EX_NOINPUT),
        (NoForwarder, os.EX_UNAVAILABLE),
        (Unavailable, os.EX_UNAVAILABLE),
        (FarcallError, os.EX_SOFTWARE),
        (EndpointInUse, os.EX_CANTCREAT),
        (Conflict, os.EX_CANTCREAT),
        (LimitExceeded, os.EX_TEMPFAIL),
        (VersionUnsupported, os.EX_PROTOCOL),
        (Unauthenticated, os.EX_NOPERM),
        (Forbidden, os.EX_NOPERM),
        (SessionRefused, os.EX_NOPERM),
        (ConfigurationError, os.EX_CONFIG),
    ],
)
def test_the_codes_are_those_of_sysexits(cls: type[FarcallError], code: int) -> None:
    assert exit_code(cls("x")) == code


def test_an_interruption_decides_the_exit_code_of_its_error() -> None:
    for interruption, code in ((KeyboardInterrupt(), 130), (Terminated(), 143)):
        error = Unavailable("was waiting")
        error.__cause__ = interruption
        assert exit_code(error) == code


def test_failed_start_has_the_exit_code_of_the_daemon() -> None:
    failed = StartFailed("its words")
    failed.exit_code = 76
    assert end_of_endpoint(failed) == 76


def test_systemd_restarts_an_endpoint_after_retriable_exit_codes() -> None:
    final = {exit_code_of(cls) for cls in systemd._FINAL}
    assert final == {65, 66, 73, 77, 78}
    for cls in (Unavailable, LimitExceeded, VersionUnsupported, FarcallError):
        assert exit_code_of(cls) not in final


def rows(page: str) -> dict[int, str]:
    """The table of exit codes of a page."""
    section = (ROOT / "docs" / page).read_text(encoding="utf-8").partition("\n## Exit codes\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| ([\d, ]+) \| (.*) \|$", section, flags=re.MULTILINE)
    return {int(code): text for codes, text in found for code in codes.split(",")}


def test_the_tables_of_the_documentation_are_the_codes_tables() -> None:
    assert rows("cli.md") == EXIT_CODES
    assert rows("endpoint/troubleshooting.md").keys() == cli._EXIT_CODES.keys() == EXIT_CODES.keys() - {BROKEN_PIPE}


def test_the_tables_are_in_the_help() -> None:
    for command, name, table in ((app, "farcall", EXIT_CODES), (cli.app, "farcall-endpoint", cli._EXIT_CODES)):
        shown = CliRunner().invoke(command, ["--help"], prog_name=name, env={"COLUMNS": "100"}).output
        text = " ".join(shown.split())
        assert all(f"{code} {meaning}" in text for code, meaning in table.items())


def test_no_other_module_numbers_exits_as_sysexits_does() -> None:
    """What this finds: constants of ``os.EX_...``, and such numbers in an exit or next to an error class."""
    names = {cls.__name__ for cls in CLASSES.values()}
    numbers = {code for code in EXIT_CODES if os.EX_USAGE <= code <= os.EX_CONFIG}

    def is_number(node: ast.AST | None) -> bool:
        return isinstance(node, ast.Constant) and type(node.value) is int and node.value in numbers

    def is_error(node: ast.AST | None) -> bool:
        return isinstance(node, ast.Name) and node.id in names

    def is_exit_code(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr.startswith("EX_")
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            return name in ("Exit", "exit", "SystemExit") and any(map(is_number, node.args))
        if isinstance(node, ast.Dict):
            pairs = list(zip(node.keys, node.values, strict=True))
        elif isinstance(node, ast.Tuple) and len(node.elts) == 2:
            pairs = [(node.elts[0], node.elts[1])]
        else:
            return False
        return any((is_error(one) and is_number(other)) or (is_number(one) and is_error(other)) for one, other in pairs)

    found = {name for name, tree in modules() if any(map(is_exit_code, ast.walk(tree)))}
    assert found == {"farcall_common.exit_codes"}
