"""Routes of blobs."""

from farcall_lambdas.models.tasks import BlobGranted, RequestBlob
from farcall_lambdas.routes.call import CurrentCall, new_router

router = new_router()


@router.post("/v3/blobs", summary="Ask for the upload of a payload that is too big to go inline", tags=["blobs"])
def grant_blob(body: RequestBlob, call: CurrentCall) -> BlobGranted:
    ref, url, headers = call.services.blobs.grant_upload(call.identity, size_bytes=body.size_bytes, sha256=body.sha256)
    return BlobGranted(blob_key=ref.blob_key, upload_url=url, headers=dict(headers))
