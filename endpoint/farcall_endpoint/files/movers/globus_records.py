"""Errors of Globus as records of tasks: a code of ours, the id of the task and the words of Globus. Nothing here speaks
with the service."""

from __future__ import annotations

import dataclasses
import errno
import re
from collections.abc import Mapping
from typing import Any, Final

import globus_sdk

from farcall_common.errors import ErrorRecord, FarcallError, Unauthenticated
from farcall_common.file_arguments import shown
from farcall_common.plain_text import plain
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.files.movers import Move
from farcall_endpoint.files.movers.globus_journal import Transfer
from farcall_endpoint.files.settings import GlobusSettings

_MAX_WORDS: Final = 400
_COLLECTION: Final = re.compile(r"scopes/([0-9a-fA-F-]{36})/data_access")
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a transfer ended that did not succeed: the code of Globus, its words, and codes and texts of its errors.

    :param is_ours: it was cancelled because it made no progress, at ``at``.
    """

    code: str
    words: str
    errors: tuple[tuple[str, str], ...] = ()
    is_ours: bool = False
    at: float = 0.0


class Records:
    """Records of files that cannot be moved."""

    def __init__(self, settings: GlobusSettings) -> None:
        self._settings = settings

    def of_error(self, url: str, error: Exception, transfer: Transfer | None = None) -> ErrorRecord:
        """The record of a file that an error of the service or of this machine concerns."""
        url = shown(url)
        if isinstance(error, OSError):
            reason = str(error.strerror or error)
            if error.errno in _NO_ROOM:
                return outcomes.files_no_room(reason)
            return outcomes.file_unsupported(url, f"the directory of the endpoint for Globus: {reason}")
        words = str(getattr(error, "message", "") or error)
        record = outcomes.file_unreachable(url, "Globus does not answer")
        if isinstance(error, Unauthenticated):
            record, words = self.login_needed(url, "the endpoint has no valid login at Globus"), error.record.message
        elif isinstance(error, globus_sdk.GlobusAPIError):
            code, status = error.code or "", error.http_status
            if code == "ConsentRequired" or error.info.consent_required:
                needed = _COLLECTION.findall(" ".join(error.info.consent_required.required_scopes or []))
                options = "".join(f" --collection {each}" for each in needed)
                record = self.login_needed(url, "its collection needs the consent of the endpoint's owner", options)
            elif status == 401:
                record = self.login_needed(url, "Globus refuses the endpoint's login")
            elif "EndpointNotFound" in code:
                record = outcomes.file_unsupported(url, "Globus does not know its collection")
            elif status == 404 and transfer is not None:
                record = outcomes.file_unreachable(url, "Globus does not know the transfer any more")
            elif status == 404:
                record = outcomes.file_not_found(url)
            elif status == 403:
                record = outcomes.file_denied(url, "its collection refuses it")
            elif status < 500 and status not in (408, 409, 425, 429):
                record = outcomes.file_unsupported(url, "Globus refuses it")
        return with_words(record, words, transfer)

    def login_needed(self, url: str, reason: str, options: str = "") -> ErrorRecord:
        command = f"farcall-endpoint globus login {self._settings.endpoint_name}{options}"
        hint = f"The endpoint's owner has to run `{command}`."
        return dataclasses.replace(outcomes.file_denied(url, reason), hint=hint)

    def elsewhere(self, url: str) -> ErrorRecord:
        settings = self._settings
        return outcomes.file_unsupported(
            url,
            f"files.globus of config.yaml is wrong: {settings.path} of collection {settings.collection} is not "
            f"{settings.directory} of the endpoint",
        )

    def skipped(self, transfer: Transfer, move: Move, document: Mapping[str, Any]) -> ErrorRecord:
        words = str(document.get("error_details") or document.get("error_code"))
        if transfer.mode == "w":  # its source is on this machine
            return self.elsewhere(shown(move.url))
        record = (
            outcomes.file_not_found(shown(move.url))
            if document.get("error_code") == "FILE_NOT_FOUND"
            else outcomes.file_denied(shown(move.url), "its collection refuses it")
        )
        return with_words(record, words, transfer)

    def failed(self, transfer: Transfer, number: int, move: Move, ending: Ending) -> ErrorRecord:
        """Why a file of a failed transfer did not come."""
        url, code, words = shown(move.url), ending.code, ending.words
        if is_in(f"{transfer.submission_id}/{number}", words):  # it is the file on this machine
            return with_words(self.elsewhere(url), words, transfer)
        if code in ("FILE_NOT_FOUND", "PATH_NOT_FOUND") and transfer.mode == "r":
            record = outcomes.file_not_found(url)
        elif code in ("FILE_NOT_FOUND", "PATH_NOT_FOUND", "PERMISSION_DENIED"):
            record = outcomes.file_denied(url, "its collection refuses it")
        elif code in ("CREDENTIALS_EXPIRED", "INACTIVE"):
            record = self.login_needed(url, "the endpoint's login at Globus has expired")
        elif code == "CANCELED":
            record = outcomes.file_unsupported(url, "the transfer was cancelled at Globus")
        elif "QUOTA" in code:
            record = (
                outcomes.files_no_room("the quota of the endpoint's collection is exhausted")
                if transfer.mode == "r"
                else outcomes.file_denied(url, "the quota of its collection is exhausted")
            )
        elif ending.is_ours:
            record = outcomes.file_timeout(url, self._settings.limit_s)
        else:
            record = outcomes.file_unreachable(url, "the transfer failed")
        return with_words(record, words, transfer)


def errors_of(transfer: Transfer, number: int, ending: Ending) -> list[tuple[str, str]]:
    """Codes and texts of the errors that name a file."""
    paths = (transfer.items[number].path, f"{transfer.submission_id}/{number}")
    return [(code, text) for code, text in ending.errors if any(is_in(path, text) for path in paths)]


def is_in(path: str, text: str) -> bool:
    """Whether a text names a path, and not only a longer one."""
    return path in text and re.search(rf"{re.escape(path)}(?![\w.-])", text) is not None


def is_away(error: Exception) -> bool:
    """Whether the service does not answer for now."""
    if isinstance(error, globus_sdk.GlobusAPIError):
        return error.http_status >= 500 or error.http_status in (408, 425, 429)
    if isinstance(error, FarcallError):
        return error.retryable
    return isinstance(error, globus_sdk.GlobusError)


def _words(text: str) -> str:
    words = " ".join(plain(text).replace("\\r\\n", " ").replace("\\n", " ").split())
    return words if len(words) <= _MAX_WORDS else words[:_MAX_WORDS] + "..."


def with_words(record: ErrorRecord, words: str, transfer: Transfer | None) -> ErrorRecord:
    """The record with the task and the words of Globus."""
    task = f"task {transfer.task_id}: " if transfer is not None and transfer.task_id else ""
    return dataclasses.replace(record, message=f"{record.message} Globus: {task}{_words(words)}")
