"""Access of an agent to the API: with the endpoint's own credential, and with its owner's login to get one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from farcall_common.credentials import Credentials
from farcall_common.errors import FarcallError, Unauthenticated, UserNotAllowed
from farcall_endpoint.services.cloud import Cloud, ConnectAnswer
from farcall_endpoint.services.directory import EndpointDirectory

_logger = logging.getLogger(__name__)


class Access:
    """The requests of one agent, one at a time. ``login`` may be None if the endpoint has a credential."""

    def __init__(
        self,
        directory: EndpointDirectory,
        login: Credentials | None,
        *,
        cloud_of: Callable[[Credentials], Cloud] = Cloud,
    ) -> None:
        self._directory = directory
        self._login = login
        self._cloud_of = cloud_of
        self._own = directory.read_credential()
        if self._own and login and login.api_url != self._own.api_url:
            self._own = None  # another API must not receive it

    def register(self, *, name: str, display_name: str, metadata: Mapping[str, object]) -> str:
        """Register a new endpoint; its id.

        :raises FarcallError: the error in the API's answer, or Unavailable.
        """
        with self._cloud(self._require_login()) as cloud:
            return cloud.register(name=name, display_name=display_name, metadata=metadata)

    def connect(self, endpoint_id: str, **fields: Any) -> ConnectAnswer:
        """:meth:`Cloud.connect`, with the endpoint's credential. If there is none, or it is refused, the owner's login
        gets a new one; if that fails, the login connects.

        :raises FarcallError: the error in the API's answer, or Unavailable.
        """
        if self._own is not None:
            try:
                with self._cloud(self._own) as cloud:
                    return cloud.connect(endpoint_id, **fields)
            except (Unauthenticated, UserNotAllowed) as error:
                if self._login is None:
                    raise type(error)(
                        f"The endpoint's credential was refused, and there is no login: {error.record.message}",
                        hint=_LOG_IN,
                    ) from error
                _logger.warning("the endpoint's credential was refused: %s", error)
        login = self._require_login()
        with self._cloud(login) as cloud:
            self._own = None
            with contextlib.suppress(FarcallError):  # errors meet the next request, too
                self._own = Credentials(login.api_url, cloud.make_credential(endpoint_id))
            if self._own is not None:
                self._keep(self._own)
            return cloud.connect(endpoint_id, **fields)

    def _require_login(self) -> Credentials:
        if self._login is None:
            raise Unauthenticated("The endpoint has no credential, and there is no login.", hint=_LOG_IN)
        return self._login

    def _keep(self, credential: Credentials) -> None:
        try:
            self._directory.write_credential(credential)
            _logger.info("the endpoint has a credential of its own, and needs its owner's login no more")
        except OSError as error:
            _logger.warning("the endpoint's credential cannot be stored: %s", error)

    def _cloud(self, credentials: Credentials) -> contextlib.closing[Cloud]:
        return contextlib.closing(self._cloud_of(credentials))


_LOG_IN = "Log in as the endpoint's owner with `farcall login`, or set FARCALL_TOKEN, and start it again."
