"""Login of an endpoint at Globus, for files of tasks: a file of its own in the endpoint's directory.

It is the login of the endpoint's owner, or of a client with a secret (a service). Its scope is that of Globus Transfer,
with the ``data_access`` of the collections that need it (mapped collections of Globus Connect Server 5).
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from farcall_common.errors import ConfigurationError, FarcallError, Unauthenticated
from farcall_common.globus import globus_sdk, globus_tokens, globus_urls
from farcall_common.login import Login, forget, keep, read, revoke
from farcall_endpoint.files.movers.globus import client_from, transfer_client
from farcall_endpoint.files.settings import GlobusSettings

_SCOPE: Final = "urn:globus:auth:scope:transfer.api.globus.org:all"
_DATA_ACCESS: Final = "*https://auth.globus.org/scopes/{}/data_access"
_CONSENTED: Final = re.compile(r"scopes/([0-9a-f-]{36})/data_access")
_PROBE: Final = ".farcall-check-{}"


def log_in(
    path: Path, *, client_id: str | None, collections: Iterable[str], browser: bool, environ: Mapping[str, str]
) -> Login:
    """Log in, and keep the login. Collections of an earlier login stay consented.

    :raises ConfigurationError: if no client is known, or a collection is no UUID.
    :raises Unauthenticated: if Globus Auth refuses.
    :raises Unavailable: if it cannot be reached.
    """
    former = read(path)
    known_id, secret = client_from(environ)
    chosen_id = client_id or known_id or (former.client_id if former is not None else None)
    if chosen_id is None:
        raise ConfigurationError(
            "the client id is missing",
            hint="Pass --client-id, or set FARCALL_GLOBUS_CLIENT_ID: the id of an application that you register at "
            "https://app.globus.org/settings/developers.",
        )
    wanted = {_uuid(each): None for each in collections}
    if former is not None and former.client_id == chosen_id:
        wanted |= dict.fromkeys(_CONSENTED.findall(former.scope))
    token_url, revoke_url = globus_urls()
    login = Login(
        api_url=globus_sdk.TransferClient(authorizer=globus_sdk.NullAuthorizer()).base_url,
        provider="globus",
        client_id=chosen_id,
        scope=_scope(sorted(wanted)),
        token_url=token_url,
        revoke_url=revoke_url,
    )
    answer = globus_tokens(login, secret if chosen_id == known_id else None, browser=browser)
    login = login.with_tokens(answer, now=time.time())
    keep(path, login)
    return login


def log_out(path: Path, *, environ: Mapping[str, str]) -> bool:
    """Revoke the tokens and delete the login. Returns whether there was one."""
    login = read(path)
    if login is None:
        return False
    known_id, secret = client_from(environ)
    revoke(login, secret=secret if known_id == login.client_id else None)
    forget(path)
    return True


def check(settings: GlobusSettings, *, environ: Mapping[str, str]) -> tuple[bool, str]:
    """Whether the endpoint can move files, and what to say of it. Writes a file, and looks it up at Globus."""
    path = Path(settings.login_file)
    command = f"farcall-endpoint globus login {settings.endpoint_name}"
    directory = Path(settings.directory)
    probe = directory / _PROBE.format(uuid.uuid4())
    try:
        with transfer_client(path, environ=environ) as client:
            document = client.get_endpoint(settings.collection)
            name = f"collection {document['display_name']} ({settings.collection})"
            is_mapped = document["entity_type"] == "GCSv5_mapped_collection" and not document.get("high_assurance")
            login = read(path)
            if is_mapped and settings.collection not in (login.scope if login is not None else ""):
                return False, f"{name} needs your consent: {command} --collection {settings.collection}"
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            probe.touch(exist_ok=False)
            try:
                client.operation_stat(settings.collection, f"{settings.path.rstrip('/')}/{probe.name}")
            finally:
                probe.unlink(missing_ok=True)
    except OSError as error:
        return False, f"{directory} cannot be written to: {error.strerror or error}"
    except Unauthenticated as error:
        return False, f"{error.record.message.removesuffix('.')}: {command}"
    except FarcallError as error:
        return False, error.record.message
    except globus_sdk.GlobusAPIError as error:
        words = " ".join(str(error.message or error).split())
        if error.http_status == 404 and "EndpointNotFound" not in str(error.code):
            return False, f"{settings.path} of {name} is not {directory} of this machine: {words}"
        if error.http_status == 401:
            return False, f"{words}: {command}"
        if needed := _CONSENTED.findall(" ".join(error.info.consent_required.required_scopes or [])):
            return False, f"{words}: {command} --collection {needed[0]}"
        return False, words
    except globus_sdk.GlobusError as error:
        return False, f"it cannot be reached: {error}"
    return True, f"{name} has {directory} as {settings.path}"


def _scope(collections: Iterable[str]) -> str:
    dependencies = " ".join(_DATA_ACCESS.format(each) for each in collections)
    return f"{_SCOPE}[{dependencies}]" if dependencies else _SCOPE


def _uuid(text: str) -> str:
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise ConfigurationError(f"{text!r} is not the UUID of a collection.") from None
