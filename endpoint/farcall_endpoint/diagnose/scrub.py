"""Redaction: removes known secrets from text, and everything that looks like one. When in doubt, it removes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

_REMOVED: Final = "<removed>"
_MIN_LENGTH: Final = 5
"""Shorter values are not secrets, and would match ordinary words."""

_WORD: Final = (
    r"secret|token|passw(?:or)?d|passphrase|passwd|pwd|api[_-]?key|access[_-]?key|private[_-]?key|client[_-]?key"
    r"|credential|authori[sz]ation|signature|cookie|session[_-]?key|ticket"
)
_NAME: Final = re.compile(rf"{_WORD}|(?:^|_)(?:key|auth|pass|pat)(?:$|_)", re.IGNORECASE)

_PATTERNS: Final = (
    # PEM blocks, also of a file that was cut off
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), _REMOVED),
    # user:password@ in an address
    (re.compile(r"(?<![A-Za-z0-9+.-])(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^\s/'\"]+@"), rf"\g<scheme>{_REMOVED}@"),
    # Bearer and Basic headers
    (re.compile(r"(?P<kind>\b(?:Bearer|Basic)\s+)[A-Za-z0-9+/._~=-]{5,}", re.IGNORECASE), rf"\g<kind>{_REMOVED}"),
    # name = value, name: value, "name": "value"; also X-Amz-Signature and its kin in an address
    (
        re.compile(
            rf"(?P<name>(?:{_WORD})[\w.-]{{0,80}}[\"']?(?:\s{{0,20}}[:=]\s{{0,20}}|\s{{1,20}}(?=[\"'])))"
            rf"(?:\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|(?!{_REMOVED})[^\s,;&\"'#]+)",
            re.IGNORECASE,
        ),
        rf"\g<name>{_REMOVED}",
    ),
    # --name value
    (
        re.compile(
            rf"(?P<name>(?<!-)--(?=\w)[\w-]{{0,80}}?(?:{_WORD})[\w-]{{0,80}}\s+)(?!{_REMOVED})\S+", re.IGNORECASE
        ),
        rf"\g<name>{_REMOVED}",
    ),
    # tokens that show what they are
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*){1,2}"), _REMOVED),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), _REMOVED),
    (re.compile(r"\b(?:gh[pousr]_|github_pat_|glpat-|xox[abprs]-|sk-)[A-Za-z0-9_-]{10,}"), _REMOVED),
)


class Scrubber:
    """Removes given secrets, and text that looks like one."""

    def __init__(self, secrets: Iterable[str]) -> None:
        plain = {secret.strip() for secret in secrets}
        escaped = {json.dumps(secret)[1:-1] for secret in plain}
        self._secrets = sorted((each for each in plain | escaped if len(each) >= _MIN_LENGTH), key=len, reverse=True)

    def clean(self, text: str) -> str:
        """The text without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, _REMOVED)
        for pattern, instead in _PATTERNS:
            text = pattern.sub(instead, text)
        return text

    def clean_values(self, value: Any) -> Any:
        """JSON whose texts are without secrets, and whose structure is as before."""
        match value:
            case str():
                return self.clean(value)
            case dict():
                return {key: self.clean_values(each) for key, each in value.items()}
            case list():
                return [self.clean_values(each) for each in value]
            case _:
                return value

    def clean_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Variables; without the value if the name looks secret."""
        return {
            name: _REMOVED if is_secret_name(name) else self.clean(value) for name, value in sorted(environ.items())
        }


def is_secret_name(name: str) -> bool:
    """Whether the name of a variable suggests a secret."""
    return bool(_NAME.search(name))
