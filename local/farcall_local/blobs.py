"""The S3 of the tier: moto's server, with a journal on disk so that no accepted object is lost.

moto keeps objects in memory. A tier that a user works with must not: this process writes every successful ``PUT``
to disk before it answers, and hands the recorded request to moto again the first time that the object is asked for
after a restart. It serves only requests made with the tier's own access key.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from farcall_local.journal import Journal

__all__ = ["main"]


class _QuietHandler(WSGIRequestHandler):
    """A web server's access log would hold signed addresses."""

    protocol_version = "HTTP/1.1"  # connections stay open between objects

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing."""


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    arguments = parser.parse_args()
    journal = Journal(
        create_backend_app("s3"), directory=arguments.directory, access_key=os.environ["AWS_ACCESS_KEY_ID"]
    )
    journal.make_bucket(arguments.bucket)
    make_server("127.0.0.1", arguments.port, journal, threaded=True, request_handler=_QuietHandler).serve_forever()


if __name__ == "__main__":
    main()
