"""HTTP clients that follow the proxy and certificate variables of the environment."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import ssl
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

# httpx imports it with the first client: a fork during that import would leave its lock in the child.
import httpcore  # noqa: F401
import httpx

from farcall_common.errors import ConfigurationError
from farcall_common.forks import no_fork

_SCHEMES: Final = ("http", "https", "all")
_LOCAL: Final = ",localhost,127.0.0.0/8,::1"
_SOCKS: Final = ("socks", "socks5", "socks5h")


def http_client(
    *,
    transport: httpx.BaseTransport | None = None,
    certificates: Callable[[], ssl.SSLContext] = httpx.create_ssl_context,
    limits: httpx.Limits = httpx.Limits(max_connections=100, max_keepalive_connections=20),  # noqa: B008 - immutable
    is_local_direct: bool = True,
    **options: Any,
) -> httpx.Client:
    """A client that uses the proxies of ``HTTP_PROXY``, ``HTTPS_PROXY``, ``ALL_PROXY`` and ``NO_PROXY``, in lower case
    too. A proxy that cannot be used fails the requests that need it.

    :param transport: replaces the network.
    :param certificates: makes the context of TLS.
    :param is_local_direct: whether requests to this machine use no proxy, as if ``NO_PROXY`` named it.
    :param options: of :class:`httpx.Client`.
    :raises ConfigurationError: if a variable names certificates or a log of keys that cannot be opened.
    """
    if transport is None:
        transport = EnvironmentProxies(_context(certificates), limits, is_local_direct=is_local_direct)
    return httpx.Client(transport=transport, trust_env=False, **options)


class EnvironmentProxies(httpx.BaseTransport):
    """Sends each request directly, or through the proxy of the environment for its address."""

    def __init__(self, context: ssl.SSLContext, limits: httpx.Limits, *, is_local_direct: bool) -> None:
        def through(proxy: str | None) -> httpx.BaseTransport:
            return httpx.HTTPTransport(verify=context, trust_env=False, limits=limits, proxy=proxy)

        found = urllib.request.getproxies()
        self._no_proxy = found.get("no", "") + (_LOCAL if is_local_direct else "")
        self._direct = through(None)
        self._proxies = {scheme: _proxy(scheme, found[scheme], through) for scheme in _SCHEMES if found.get(scheme)}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and return its response."""
        return self._transport(request.url).handle_request(request)

    def _transport(self, url: httpx.URL) -> httpx.BaseTransport:
        proxy = self._proxies.get(url.scheme) or self._proxies.get("all")
        return self._direct if proxy is None or is_direct(url, self._no_proxy) else proxy

    def close(self) -> None:
        """Close the connections."""
        for transport in (self._direct, *self._proxies.values()):
            transport.close()


def is_direct(url: httpx.URL, no_proxy: str) -> bool:
    """Whether an address is one of those in ``no_proxy``.

    These are names (of all hosts in a domain, too), addresses and networks of IPv4 and IPv6, with a port or brackets if
    they need them, separated by commas or spaces; ``*`` is all. Entries of another form are ignored.
    """
    address = _network(url.host)
    for entry in filter(None, re.split(r"[,\s]+", no_proxy)):
        scheme, separator, name = entry.rpartition("://")
        if separator and scheme not in (url.scheme, "all"):
            continue
        if name == "*":
            return True
        bracketed = re.fullmatch(r"\[(.*)\](?::(\d+))?", name)
        network = _network(bracketed[1] if bracketed else name)
        if network is None:
            domain = f".{name.removeprefix('*').lstrip('.').lower()}"
            hosts = f".{url.host}:{_port(url)}", f".{url.host}" if address is None else ""
            if any(host.endswith(domain) if address is None else host == domain for host in hosts):
                return True
        elif bracketed and bracketed[2] and int(bracketed[2]) != _port(url):
            continue
        elif address is not None and address.version == network.version and address.subnet_of(network):  # type: ignore[arg-type]
            return True
    return False


def _port(url: httpx.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """An address or a network; None for a name."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_network(re.sub("%[^/]*", "", text), strict=False)
    return None


def _proxy(scheme: str, proxy: str, through: Callable[[str], httpx.BaseTransport]) -> httpx.BaseTransport:
    """The transport through a proxy."""
    url = proxy if "://" in proxy else f"http://{proxy}"
    kind, _, rest = url.partition("://")
    if kind.lower() == "socks":  # as desktops write it
        url = f"socks5://{rest}"
    try:
        return through(url)
    except ImportError:
        reason = "SOCKS needs another package: run `pip install 'httpx[socks]'` where this program is installed"
    except (httpx.InvalidURL, ValueError):
        reason = f"expected an address that begins with http://, https:// or {_SOCKS[1]}://"
    return _Unusable(
        f"{_variable(scheme, proxy)} has a proxy that cannot be used; {reason}, or name the host in NO_PROXY"
    )


def _variable(scheme: str, proxy: str) -> str:
    """The variable that names a proxy."""
    name = f"{scheme}_proxy"
    set_as = [each for each in os.environ if each.lower() == name and os.environ[each] == proxy]
    return min(set_as, default=f"The {scheme} proxy of this system")


class _Unusable(httpx.BaseTransport):
    """A proxy that cannot be used. The reason has no address, which may contain a password."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        raise httpx.UnsupportedProtocol(self._reason, request=request)


def _context(make: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    with certificate_errors(), no_fork:
        return make()


@contextlib.contextmanager
def certificate_errors(environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Name the variable whose file cannot be opened.

    :raises ConfigurationError: for such an error.
    """
    directories = environ.get("SSL_CERT_DIR", "")
    is_used = directories and not environ.get("SSL_CERT_FILE")
    if is_used and not any(Path(each).is_dir() for each in directories.split(os.pathsep)):
        raise ConfigurationError(f"SSL_CERT_DIR names {directories}, which is not a directory", hint=_UNSET)
    try:
        yield
    except OSError as error:
        for name in ("SSL_CERT_FILE", "SSLKEYLOGFILE"):
            if (path := environ.get(name)) and not _opens(path, "rb" if name == "SSL_CERT_FILE" else "ab", error):
                message = f"{name} names {path}, which cannot be used: {error.strerror or error}"
                raise ConfigurationError(message, hint=_UNSET) from error
        raise


_UNSET: Final = "Correct the variable, or unset it."


def _opens(path: str, mode: str, error: OSError) -> bool:
    """Whether a file can be opened, and is not the cause of an error of its content."""
    try:
        with Path(path).open(mode):
            return not (isinstance(error, ssl.SSLError) and mode == "rb")
    except OSError:
        return False
