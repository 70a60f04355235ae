"""What the service says of its own version and of those that it works with."""

from typing import Final

API_VERSION: Final = "0.1.0"

#: The oldest ``globus-compute-sdk`` that speaks the routes served here (``/v3/endpoints/{id}/submit``).
MIN_SDK_VERSION: Final = "2.0.0"
MIN_ENDPOINT_VERSION: Final = "0.1.0"
