"""Upload grants: checks and answers requests to upload results that are too big to travel inline."""

from __future__ import annotations

from farcall_common.errors import ErrorRecord, Fault, ProtocolError, ResultTooLarge, TaskUnknown
from farcall_common.wire import BlobGrant, BlobRequest, is_uuid
from farcall_forwarder.core.actions import GrantUpload
from farcall_forwarder.core.events import UploadGranted
from farcall_forwarder.core.policy import Policy
from farcall_forwarder.core.results import is_sha256


def refusal(request: BlobRequest, *, is_leased: bool, policy: Policy) -> ErrorRecord | None:
    """The error for an upload that is not granted, or None. Tasks that are not leased here are looked up later."""
    if request.size_bytes > policy.max_result_bytes:
        limit = f"the limit is {policy.max_result_bytes}"
        return ResultTooLarge(f"The result has {request.size_bytes} bytes; {limit}.").record
    if not is_sha256(request.sha256) or not (is_leased or is_uuid(request.task_id)):
        return ErrorRecord(
            code=ProtocolError.code,
            message="The request names no task, or no SHA-256 in lower-case hex.",
            fault=Fault.PEER,
        )
    return None


def refused(request: BlobRequest, error: ErrorRecord) -> BlobGrant:
    """The refusal of a request."""
    return BlobGrant(task_id=request.task_id, attempt=request.attempt, error=error.to_json())


def order(request: BlobRequest, endpoint_id: str, generation: int, *, owner_id: str | None, ttl_s: int) -> GrantUpload:
    """The store step for a request that may be granted."""
    return GrantUpload(
        endpoint_id=endpoint_id,
        generation=generation,
        task_id=request.task_id,
        attempt=request.attempt,
        owner_id=owner_id,
        size_bytes=request.size_bytes,
        sha256=request.sha256,
        url_ttl_s=ttl_s,
    )


def granted(event: UploadGranted) -> BlobGrant:
    """The answer after the upload was prepared, or the task was not found."""
    if event.url is None:
        error = ErrorRecord(
            code=TaskUnknown.code,
            message=f"This endpoint has no task {event.task_id}.",
            hint="Drop the task from the spool.",
            fault=Fault.PEER,
        )
        return BlobGrant(task_id=event.task_id, attempt=event.attempt, error=error.to_json())
    return BlobGrant(
        task_id=event.task_id,
        attempt=event.attempt,
        blob_key=event.ref.blob_key,
        upload_url=event.url,
        headers=dict(event.headers),
    )
