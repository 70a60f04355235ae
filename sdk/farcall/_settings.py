"""Settings of a client: the address of the API and a token."""

from __future__ import annotations

from farcall_common.credentials import Credentials


class Settings(Credentials):
    """What a client must know: the API to call, and the token to call it with. The repr leaves out the token.

    :param login: the file of a login at this API, whose token is used and renewed instead of ``token``.
    """
