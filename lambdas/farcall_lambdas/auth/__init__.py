"""Identity providers, and the cache in front of them."""

from farcall_lambdas.auth.cache import CachedProvider
from farcall_lambdas.auth.oidc import OidcProvider
from farcall_lambdas.auth.providers import DevProvider, GlobusProvider, provider_from_settings

__all__ = ["CachedProvider", "DevProvider", "GlobusProvider", "OidcProvider", "provider_from_settings"]
