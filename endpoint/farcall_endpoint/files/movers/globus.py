"""Globus Transfer: files of collections, copied to and from the endpoint's own collection.

All files of a batch between two collections are one transfer task at Globus. On this machine they pass through a
directory for each transfer, below the directory that the configuration names: Globus sees that directory alone. A file
that came is linked to its draft; a file that is to be stored is linked there.

A transfer is in the journal (:mod:`~farcall_endpoint.files.movers.globus_journal`) from before its submission until
all of its files are handed on. After a restart its files are found there by URL and version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import posixpath
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import globus_sdk
import msgspec

from farcall_common.credentials import GLOBUS_CLIENT_VARIABLES
from farcall_common.errors import FarcallError
from farcall_common.file_arguments import shown
from farcall_common.login import KeptLogin
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.files.movers import Found, Move, MoveError
from farcall_endpoint.files.movers.globus_documents import (
    Place,
    by_number,
    document_of,
    found_of,
    identity_of,
    parts_of,
    place_of_url,
    value_of,
)
from farcall_endpoint.files.movers.globus_journal import Item, Journal, Transfer
from farcall_endpoint.files.movers.globus_records import Ending, Records, errors_of, is_away, with_words
from farcall_endpoint.files.settings import GlobusSettings

_logger: Final = logging.getLogger(__name__)

_MOST_LISTED: Final = 100_000
"""Maximum entries of a directory that Globus lists."""
_KEEP_S: Final = 86_400.0
"""Time for which the files of a former process wait for tasks that need them."""
_FIRST_POLL_S: Final = 1.0
_MAX_POLL_S: Final = 10.0
_CANCEL_LIMIT_S: Final = 60.0
_PROGRESS: Final = (
    "bytes_transferred", "bytes_checksummed", "files_transferred", "files_skipped", "subtasks_succeeded",
    "subtasks_skipped_errors",
)  # fmt: skip
_ERRORS: Final = (globus_sdk.GlobusError, FarcallError)


def client_from(environ: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Id and secret of a client at Globus from the environment; the secret may be missing."""
    for id_name, secret_name in GLOBUS_CLIENT_VARIABLES:
        if environ.get(id_name):
            return environ[id_name], environ.get(secret_name) or None
    return None, None


def transfer_client(login_file: Path, *, environ: Mapping[str, str]) -> globus_sdk.TransferClient:
    """A client of Globus Transfer that uses and renews the login in a file. Nothing is requested yet."""
    client_id, secret = client_from(environ)
    # Another provider may have a client of its own in the environment; this login is renewed with that of Globus.
    known = {"FARCALL_CLIENT_ID": client_id or "", "FARCALL_CLIENT_SECRET": secret or ""}
    authorizer = KeptLogin(login_file, environ=known)
    return globus_sdk.TransferClient(authorizer=authorizer, app_name="farcall-endpoint")  # type: ignore[arg-type]


@dataclasses.dataclass
class _Active:
    """A transfer that this process looks after. Times are those of the monotonic clock.

    :param left: items that were not handed on yet.
    :param moves: by the number of their item.
    :param ending: why the transfer was cancelled, in the words of Globus; None: it was not.
    """

    transfer: Transfer
    moves: dict[int, Move]
    progress_at: float
    due_at: float
    is_resumed: bool = False
    poll_s: float = _FIRST_POLL_S
    progress: tuple[Any, ...] = ()
    bytes_done: int = 0
    ending: Ending | None = None
    left: dict[int, Item] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.left = dict(self.transfer.items)


def _unlink(directory: int, name: str) -> None:
    os.unlink(name, dir_fd=directory)


class GlobusMover:
    """Moves files of Globus collections; a :class:`~farcall_endpoint.files.movers.BatchMover`.

    :param client: its login is that of the endpoint.
    :param clock, now: monotonic and epoch seconds.
    :param wait: waits for so many seconds.
    :param unlink: removes a file from an open directory; there may be other links to it.
    """

    def __init__(
        self,
        settings: GlobusSettings,
        client: globus_sdk.TransferClient,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        wait: Callable[[float], None] = time.sleep,
        unlink: Callable[[int, str], None] = _unlink,
    ) -> None:
        self._settings = settings
        self._client = client
        self._clock = clock
        self._now = now
        self._wait = wait
        self._unlink = unlink
        self._records = Records(settings)
        self._journal = Journal(Path(settings.journal))
        self._lock = threading.Lock()
        self._verifiable: dict[str, bool] = {}
        self._in_use: set[str] = set()
        """Submission ids, so that calls of :meth:`run` in several threads share no transfer."""

    @classmethod
    def of(
        cls, settings: GlobusSettings, *, environ: Mapping[str, str], unlink: Callable[[int, str], None] = _unlink
    ) -> GlobusMover:
        """A mover with the endpoint's login."""
        return cls(settings, transfer_client(Path(settings.login_file), environ=environ), unlink=unlink)

    # -- look-ups ------------------------------------------------------------------------------------------------------

    def stat_many(self, urls: Collection[str]) -> Mapping[str, Found | MoveError]:
        """Look files up; an entry for each. Several files of one directory are one listing."""
        found: dict[str, Found | MoveError] = {}
        directories: defaultdict[Place, dict[str, str]] = defaultdict(dict)
        for url in urls:
            try:
                place = place_of_url(url)
            except MoveError as error:
                found[url] = error
                continue
            directory, name = posixpath.split(place.path)
            directories[Place(place.collection, directory)][url] = name
        for directory_place, names in directories.items():
            try:
                found |= self._stat_directory(directory_place, names)
            except _ERRORS as error:
                found |= {url: MoveError(self._records.of_error(url, error)) for url in names}
        return found

    def _stat_directory(self, directory: Place, names: Mapping[str, str]) -> dict[str, Found | MoveError]:
        collection, path = directory
        wanted, documents = set(names.values()), dict[str, Mapping[str, Any]]()
        if len(wanted) > 1:
            listed = value_of(self._client.operation_ls(collection, path), "DATA")
            documents = {each["name"]: each for each in listed if each["name"] in wanted}
            wanted = wanted - documents.keys() if len(listed) >= _MOST_LISTED else set()
        for name in wanted:
            answer = self._client.operation_stat(collection, posixpath.join(path, name))
            value_of(answer, "type")
            documents[name] = dict(answer.data)
        return {url: found_of(url, documents.get(name)) for url, name in names.items()}

    # -- batches -------------------------------------------------------------------------------------------------------

    def run(
        self,
        moves: Sequence[Move],
        report: Callable[[int, int], None],
        done: Callable[[int, Found | MoveError], None],
        cancelled: Callable[[int], bool],
    ) -> None:
        """Move files; returns when each was given to ``done`` or is cancelled."""
        waiting = {move.number: move for move in moves}
        try:
            active = self._resume(waiting)
        except OSError as error:
            for move in waiting.values():
                done(move.number, MoveError(self._records.of_error(move.url, error)))
            return
        try:
            active += self._start(waiting.values(), done)
            while active:
                active = [each for each in active if not self._step(each, report, done, cancelled)]
                if active:
                    due_at = min(each.due_at for each in active)
                    self._wait(min(max(due_at - self._clock(), 0.0), _FIRST_POLL_S))  # files may be cancelled meanwhile
        finally:
            with self._lock:
                self._in_use -= {each.transfer.submission_id for each in active}
        self._remove_old()

    def _resume(self, waiting: dict[int, Move]) -> list[_Active]:
        """Transfers of a former process whose files are wanted. Their moves wait no longer."""
        found: list[_Active] = []
        settings = self._settings
        for transfer in self._journal.load():
            if (transfer.own_collection, transfer.own_path) != (settings.collection, settings.path):
                continue
            numbers: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
            for number, item in transfer.items.items():
                numbers[transfer.mode, item.url, item.size_bytes, item.version].append(number)
            resumed: dict[int, Move] = {}
            with self._lock:
                if transfer.submission_id in self._in_use:
                    continue
                for move in list(waiting.values()):
                    if same := numbers.get((move.mode, move.url, *identity_of(move))):
                        resumed[same.pop()] = waiting.pop(move.number)
                if resumed:
                    self._in_use.add(transfer.submission_id)
                    now = self._clock()
                    found.append(_Active(transfer, resumed, progress_at=now, due_at=now, is_resumed=True))
        return found

    def _start(self, moves: Iterable[Move], done: Callable[[int, Found | MoveError], None]) -> list[_Active]:
        """New transfers, in the journal."""
        groups: defaultdict[tuple[Literal["r", "w"], str], list[tuple[Move, Place]]] = defaultdict(list)
        for move in moves:
            try:
                place = place_of_url(move.url)
            except MoveError as error:
                done(move.number, error)
                continue
            groups["w" if move.mode == "w" else "r", place.collection].append((move, place))
        found: list[_Active] = []
        for (mode, collection), group in groups.items():
            for part in parts_of(group, mode):
                try:
                    found.append(self._begin(mode, collection, part))
                except (OSError, *_ERRORS) as error:
                    for move, _ in part:
                        done(move.number, MoveError(self._records.of_error(move.url, error)))
        return found

    def _begin(self, mode: Literal["r", "w"], collection: str, part: Sequence[tuple[Move, Place]]) -> _Active:
        verify = self._can_verify(collection) and self._can_verify(self._settings.collection)
        submission_id = str(value_of(self._client.get_submission_id(), "value"))
        transfer = Transfer(
            submission_id=submission_id,
            mode=mode,
            collection=collection,
            own_collection=self._settings.collection,
            own_path=self._settings.path,
            created_at=self._now(),
            verify=verify,
            items={number: Item(move.url, place.path, *identity_of(move)) for number, (move, place) in enumerate(part)},
        )
        with self._lock:
            self._in_use.add(submission_id)  # first: another thread may read the journal at any time
        try:
            self._journal.write(transfer)
        except OSError:
            with self._lock:
                self._in_use.discard(submission_id)
            raise
        now = self._clock()
        return _Active(transfer, {number: move for number, (move, _) in enumerate(part)}, progress_at=now, due_at=now)

    def _can_verify(self, collection: str) -> bool:
        """Whether Globus can compute checksums at a collection: the storage of some cannot."""
        if collection not in self._verifiable:
            document = self._client.get_endpoint(collection)
            value_of(document, "id")
            self._verifiable[collection] = not document.get("disable_verify")
        return self._verifiable[collection]

    def _step(
        self,
        active: _Active,
        report: Callable[[int, int], None],
        done: Callable[[int, Found | MoveError], None],
        cancelled: Callable[[int], bool],
    ) -> bool:
        """Look after a transfer; whether it has ended."""
        for number in [number for number, move in active.moves.items() if cancelled(move.number)]:
            self._hand_on(active, number)
        if not active.moves:
            self._cancel(active.transfer)
            self._finish(active)
            return True
        if self._clock() < active.due_at:
            return False
        try:
            if not active.transfer.task_id:
                self._submit(active)
            task = self._client.get_task(active.transfer.task_id)
            value_of(task, "status")
            if self._has_ended(active, task, report):
                self._settle(active, task, done)
                self._finish(active)
                return True
            self._schedule(active)
        except (OSError, *_ERRORS) as error:
            return self._fail(active, error, done)
        return False

    def _schedule(self, active: _Active) -> None:
        active.due_at = self._clock() + active.poll_s
        active.poll_s = min(active.poll_s * 1.5, _MAX_POLL_S)

    def _submit(self, active: _Active) -> None:
        transfer, directory = active.transfer, self._directory(active.transfer)
        directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.mkdir(exist_ok=True, mode=0o700)
        for number, move in active.moves.items() if transfer.mode == "w" else ():
            _place(move.path, directory / str(number))
        task_id = value_of(self._client.submit_transfer(document_of(transfer)), "task_id")
        active.transfer = msgspec.structs.replace(transfer, task_id=str(task_id))
        _logger.info(
            "Globus transfer %s: %d files %s collection %s",
            active.transfer.task_id,
            len(transfer.items),
            "from" if transfer.mode == "r" else "to",
            transfer.collection,
        )
        self._journal.write(active.transfer)

    def _has_ended(self, active: _Active, task: Any, report: Callable[[int, int], None]) -> bool:
        """Whether Globus does nothing more. A transfer without progress is cancelled."""
        now = self._clock()
        if (progress := tuple(task.get(name) for name in _PROGRESS)) != active.progress:
            active.progress, active.progress_at = progress, now
            self._report(active, int(task.get("bytes_transferred") or 0), report)
        if task["status"] in ("SUCCEEDED", "FAILED"):
            return True
        if active.ending is not None:
            return now - active.ending.at > _CANCEL_LIMIT_S
        if task["status"] == "INACTIVE" or now - active.progress_at > self._settings.limit_s:
            ending = self._ending(active, task)
            active.ending = dataclasses.replace(ending, is_ours=True, at=now)
            self._cancel(active.transfer)
            active.poll_s = _FIRST_POLL_S
        return False

    def _report(self, active: _Active, bytes_done: int, report: Callable[[int, int], None]) -> None:
        """Globus says how many bytes came of all files: each gets its share."""
        sizes = {number: move.found.size_bytes or 0 for number, move in active.moves.items()}
        total = sum(item.size_bytes or 0 for item in active.transfer.items.values())
        if total and bytes_done != active.bytes_done:
            active.bytes_done = bytes_done
            share = min(bytes_done / total, 1.0)
            for number, move in active.moves.items():
                report(move.number, int(sizes[number] * share))

    # -- the end of a transfer -----------------------------------------------------------------------------------------

    def _settle(self, active: _Active, task: Any, done: Callable[[int, Found | MoveError], None]) -> None:
        """Hand on what came, and say of each other file why it did not."""
        transfer, directory = active.transfer, self._directory(active.transfer)
        side = "destination_path" if transfer.mode == "r" else "source_path"
        paginated, task_id = self._client.paginated, transfer.task_id
        is_whole = task["status"] == "SUCCEEDED"
        skipped: Mapping[int, Mapping[str, Any]] = {}
        came: Collection[int] = ()
        if task["subtasks_skipped_errors"] and task["status"] in ("SUCCEEDED", "FAILED"):
            skipped = by_number(paginated.task_skipped_errors(task_id).items(), side)
        if is_whole:
            came = active.moves.keys() - skipped.keys()
        elif task["status"] == "FAILED":
            came = by_number(paginated.task_successful_transfers(task_id).items(), side).keys()
        ending = active.ending or Ending("", "")
        if not is_whole and active.ending is None:
            ending = self._ending(active, task)
        missing = [number for number in active.moves if number not in skipped and number not in came]
        errors = {number: errors_of(transfer, number, ending) for number in missing}
        for number, move in list(active.moves.items()):
            outcome: Found | MoveError
            if number in skipped:
                outcome = MoveError(self._records.skipped(transfer, move, skipped[number]))
            elif number in came:
                outcome = self._came(active, move, directory / str(number))
            elif errors[number] or not any(errors.values()):
                code, words = errors[number][0] if errors[number] else (ending.code, ending.words)
                outcome = MoveError(
                    self._records.failed(transfer, number, move, dataclasses.replace(ending, code=code, words=words))
                )
            else:
                record = outcomes.file_unreachable(shown(move.url), "other files of its transfer failed")
                outcome = MoveError(with_words(record, ending.words, transfer))
            done(move.number, outcome)
            self._hand_on(active, number)

    def _came(self, active: _Active, move: Move, path: Path) -> Found | MoveError:
        if active.transfer.mode == "w":
            return Found(move.path.stat().st_size)
        try:
            size_bytes = path.stat().st_size
            _place(path, move.path)
        except FileNotFoundError:
            if active.is_resumed:  # handed on before the former process was killed
                return MoveError(outcomes.file_unreachable(shown(move.url), "its transfer was interrupted"))
            return MoveError(self._records.elsewhere(shown(move.url)))
        except OSError as error:
            return MoveError(self._records.of_error(move.url, error))
        return Found(size_bytes, move.found.version)

    def _ending(self, active: _Active, task: Any) -> Ending:
        """What Globus says of a transfer that fails, or makes no progress."""
        task_id = active.transfer.task_id
        events = list(value_of(self._client.task_event_list(task_id, limit=100), "DATA"))
        errors = [each for each in events if each.get("is_error")]
        texts = tuple((str(each.get("code")), f"{each.get('description')}: {each.get('details')}") for each in errors)
        fatal = task.get("fatal_error") or {}
        if task["status"] == "INACTIVE":
            return Ending("INACTIVE", texts[0][1] if texts else "the task is inactive", texts)
        if task.get("is_paused"):
            return Ending("PAUSED", f"the task is paused: {self._pause_message(task_id)}", texts)
        if task["status"] == "FAILED" and any(each.get("code") == "CANCELED" for each in events[:1]):
            by = task.get("canceled_by_admin_message") or events[0].get("details")
            return Ending("CANCELED", str(by), texts)
        if fatal:
            return Ending(str(fatal.get("code")), str(fatal.get("description")), texts)
        if texts:
            return Ending(texts[0][0], texts[0][1], texts)
        nice = task.get("nice_status") or task["status"]
        return Ending(str(nice), str(task.get("nice_status_short_description") or nice))

    def _pause_message(self, task_id: str) -> str:
        info = self._client.task_pause_info(task_id)
        names = ("source_pause_message", "destination_pause_message")
        said = [str(info.get(name)) for name in names if info.get(name)]
        said += [str(rule.get("message")) for rule in info.get("pause_rules") or () if rule.get("message")]
        return "; ".join(said) or "its administrator gives no reason"

    def _cancel(self, transfer: Transfer) -> None:
        """Cancel a transfer at Globus; its deadline ends one that cannot be cancelled."""
        try:
            # Its task is known by submitting it once more, if the answer to the submission was lost.
            task_id = transfer.task_id or value_of(self._client.submit_transfer(document_of(transfer)), "task_id")
            self._client.cancel_task(task_id)
        except _ERRORS as error:
            _logger.warning("Globus transfer %s cannot be cancelled: %s", transfer.task_id, error)

    @staticmethod
    def _hand_on(active: _Active, number: int) -> None:
        """A file of a transfer needs no more attention."""
        del active.moves[number], active.left[number]

    def _fail(self, active: _Active, error: Exception, done: Callable[[int, Found | MoveError], None]) -> bool:
        """A request failed: try again later, or fail the files; whether the transfer has ended.

        A transfer that may continue at Globus stays in the journal, and the next attempt of its files finds it there.
        """
        may_pass = is_away(error)
        if may_pass and self._clock() - active.progress_at <= self._settings.limit_s:
            self._schedule(active)
            return False
        for move in active.moves.values():
            record = self._records.of_error(move.url, error, active.transfer)
            # A new submission may be accepted where that of a former process is not.
            record = dataclasses.replace(record, retryable=record.retryable or active.is_resumed)
            done(move.number, MoveError(record))
        if not may_pass and (not active.transfer.task_id or getattr(error, "http_status", None) == 404):
            active.left.clear()
            self._finish(active)
        with self._lock:
            self._in_use.discard(active.transfer.submission_id)
        return True

    def _finish(self, active: _Active) -> None:
        """Forget a transfer, unless it has files that another task of a former process may want."""
        transfer = msgspec.structs.replace(active.transfer, items=active.left)
        try:
            if transfer.items and transfer.task_id:
                self._journal.write(transfer)
                self._clear(transfer, keep=set(map(str, transfer.items)))
            else:
                self._forget(transfer)
        except OSError as error:
            _logger.warning("The files of Globus transfer %s stay: %s", transfer.task_id, error)
        with self._lock:
            self._in_use.discard(transfer.submission_id)

    def _forget(self, transfer: Transfer) -> None:
        self._clear(transfer, keep=frozenset())
        shutil.rmtree(self._directory(transfer), ignore_errors=True)
        self._journal.remove(transfer.submission_id)

    def _clear(self, transfer: Transfer, *, keep: Collection[str]) -> None:
        """Remove the files of a transfer from the directory that Globus sees; those that came have another link."""
        with contextlib.suppress(FileNotFoundError):
            directory = os.open(self._directory(transfer), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                for name in set(os.listdir(directory)) - set(keep):  # noqa: PTH208 - of a descriptor
                    self._unlink(directory, name)
            finally:
                os.close(directory)

    def _remove_old(self) -> None:
        """Forget what former processes have left, and what was not wanted again."""
        with contextlib.suppress(OSError):
            for transfer in self._journal.load():
                with self._lock:
                    is_in_use = transfer.submission_id in self._in_use
                if not is_in_use and self._now() - transfer.created_at > _KEEP_S:
                    self._cancel(transfer)
                    self._forget(transfer)

    def _directory(self, transfer: Transfer) -> Path:
        """Directory of a transfer's files on this machine."""
        return Path(self._settings.directory) / transfer.submission_id


def _place(source: Path, target: Path) -> None:
    """Make a file appear under another path: a link to it, or a copy where links are impossible.

    :raises OSError: if that is not possible.
    """
    if target.exists() and target.samefile(source):
        return
    draft = target.with_name(f".{target.name}.link")
    draft.unlink(missing_ok=True)
    try:
        # By a descriptor of a directory: only then does Python follow the link of /proc to an open file.
        directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.link(source.absolute(), draft.name, src_dir_fd=directory, dst_dir_fd=directory)
            draft.replace(target)
        finally:
            os.close(directory)
    except OSError:
        draft.unlink(missing_ok=True)
        shutil.copyfile(source, target)
