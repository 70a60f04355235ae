"""Calls with files, as a client submits them to the fake cloud of an endpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from farcall_common.file_arguments import File
from farcall_common.staged_files import FileUse, pack_files
from tests.support.endpoint import EndpointProcess


def submit(endpoint: EndpointProcess, function: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Submit a call for the endpoint's owner; the files are arguments themselves. The task's id."""
    files = [each for each in args if isinstance(each, File)]
    uses = [FileUse(each.url, each.mode, each.size_bytes, each.sha256 or "") for each in files]
    serializer = endpoint.cloud.serializer
    payload = pack_files(uses, serializer.pack_call(args))
    [task_id] = endpoint.cloud.submit_raw(serializer.pack_function(function), [payload], **{"submitter": "", **options})
    return task_id
