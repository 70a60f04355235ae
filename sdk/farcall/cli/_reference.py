"""The reference of the command line, written from the commands: ``python -m farcall.cli._reference docs``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from farcall.cli._app import COMMANDS
from farcall_common.exit_codes import EXIT_CODES

MAIN_PAGE: Final = "cli.md"
_CALLS: Final = ("run", "map", "tasks", "groups")
_RESOURCES: Final = ("functions", "containers", "endpoints", "shared", "teams", "tokens", "accounts")
#: Commands by the page that describes them.
PAGES: Final[Mapping[str, tuple[str, ...]]] = {
    MAIN_PAGE: tuple(name for name in COMMANDS if name not in _CALLS + _RESOURCES),
    "cli/calls.md": _CALLS,
    "cli/resources.md": _RESOURCES,
}
_BEGIN: Final = "<!-- written by `python -m farcall.cli._reference docs`, from here -->"
_END: Final = "<!-- to here -->"


def with_reference(text: str, page: str) -> str:
    """The text of a page with new descriptions of its commands between its two markers."""
    before, _, rest = text.partition(_BEGIN)
    after = rest.partition(_END)[2]
    codes = _exit_codes() if page == MAIN_PAGE else ()
    return "\n".join([f"{before}{_BEGIN}", "", *codes, *_commands(PAGES[page]), f"{_END}{after}"])


def _exit_codes() -> Iterator[str]:
    yield from ("## Exit codes", "", "| code | meaning |", "|---|---|")
    yield from (f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())
    yield ""


def _commands(names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        command = COMMANDS[name].load(name)
        leaves = getattr(command, "commands", None)
        yield from (f"## farcall {name}", "")
        if leaves is None:
            yield from _command(f"farcall {name}", command)
            continue
        yield from (command.help, "")
        for leaf_name, leaf in leaves.items():
            if not leaf.hidden:
                yield from (f"### farcall {name} {leaf_name}", "")
                yield from _command(f"farcall {name} {leaf_name}", leaf)


def _command(path: str, command: Any) -> Iterator[str]:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    yield from ("```", " ".join([path, "[OPTIONS]", *(_usage(each) for each in arguments)]), "```", "")
    yield from (" ".join(paragraph.split()) + "\n" for paragraph in command.help.split("\n\n"))
    rows = [(f"`{_name(each)}`", each.help) for each in arguments if each.help]
    rows += [(", ".join(f"`{name}`" for name in _names(each)) + _value(each), each.help) for each in options]
    yield from ("| | |", "|---|---|")
    yield from (f"| {_cell(what)} | {_cell(help_)} |" for what, help_ in rows)
    yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _usage(argument: Any) -> str:
    name = _name(argument)
    many = "..." if argument.nargs == -1 and not name.endswith(("...", "S")) else ""
    return f"{name}{many}" if argument.required else f"[{name}]{many}"


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _names(option: Any) -> list[str]:
    return [*sorted(option.opts, key=len, reverse=True), *option.secondary_opts]


def _value(option: Any) -> str:
    return f" {option.metavar}" if option.metavar else ""


def main() -> None:
    """Write the pages below the folder that is named on the command line again."""
    for page in PAGES:
        path = Path(sys.argv[1]) / page
        path.write_text(with_reference(path.read_text(), page))


if __name__ == "__main__":
    main()
