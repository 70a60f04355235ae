"""Versions: of the API, and the oldest clients that it supports."""

from typing import Final

API_VERSION: Final = "0.1.0"

#: The oldest ``globus-compute-sdk`` that uses the routes served here (``/v3/endpoints/{id}/submit``).
MIN_SDK_VERSION: Final = "2.0.0"
MIN_ENDPOINT_VERSION: Final = "0.1.0"
