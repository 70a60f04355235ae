"""Takes secrets out of text: those that are known, and whatever looks like one. Rather too much than too little."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

_GONE: Final = "<removed>"
_SHORTEST: Final = 5
"""Shorter values are no secrets, and would be found in every second word."""

_WORD: Final = (
    r"secret|token|passw(?:or)?d|passphrase|passwd|pwd|api[_-]?key|access[_-]?key|private[_-]?key|client[_-]?key"
    r"|credential|authori[sz]ation|signature|cookie|session[_-]?key|ticket"
)
_NAME: Final = re.compile(rf"{_WORD}|(?:^|_)(?:key|auth|pass|pat)(?:$|_)", re.IGNORECASE)

_PATTERNS: Final = (
    # PEM blocks, also of a file that was cut off
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), _GONE),
    # user:password@ in an address
    (re.compile(r"(?<![A-Za-z0-9+.-])(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^\s/'\"]+@"), rf"\g<scheme>{_GONE}@"),
    # Bearer and Basic headers
    (re.compile(r"(?P<kind>\b(?:Bearer|Basic)\s+)[A-Za-z0-9+/._~=-]{5,}", re.IGNORECASE), rf"\g<kind>{_GONE}"),
    # name = value, name: value, "name": "value"; also X-Amz-Signature and its kin in an address
    (
        re.compile(
            rf"(?P<name>(?:{_WORD})[\w.-]{{0,80}}[\"']?(?:\s{{0,20}}[:=]\s{{0,20}}|\s{{1,20}}(?=[\"'])))"
            rf"(?:\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|(?!{_GONE})[^\s,;&\"'#]+)",
            re.IGNORECASE,
        ),
        rf"\g<name>{_GONE}",
    ),
    # --name value
    (
        re.compile(rf"(?P<name>(?<!-)--(?=\w)[\w-]{{0,80}}?(?:{_WORD})[\w-]{{0,80}}\s+)(?!{_GONE})\S+", re.IGNORECASE),
        rf"\g<name>{_GONE}",
    ),
    # tokens that show what they are
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*){1,2}"), _GONE),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), _GONE),
    (re.compile(r"\b(?:gh[pousr]_|github_pat_|glpat-|xox[abprs]-|sk-)[A-Za-z0-9_-]{10,}"), _GONE),
)


class Scrubber:
    """Knows some secrets by their text."""

    def __init__(self, secrets: Iterable[str]) -> None:
        plain = {secret.strip() for secret in secrets}
        escaped = {json.dumps(secret)[1:-1] for secret in plain}
        self._secrets = sorted((each for each in plain | escaped if len(each) >= _SHORTEST), key=len, reverse=True)

    def clean(self, text: str) -> str:
        """The text without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, _GONE)
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
        """Variables; of those with a name that sounds secret only the name."""
        return {name: _GONE if is_secret_name(name) else self.clean(value) for name, value in sorted(environ.items())}


def is_secret_name(name: str) -> bool:
    """Whether a variable sounds as if it held a secret."""
    return bool(_NAME.search(name))
