"""AWS secrets of functions that need no store, read again when they are old."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from farcall_common.errors import ConfigurationError, Unavailable

#: Seconds. A new value is used after this time at the latest.
MAX_AGE_S: Final = 300


def secret_field(arn: str, field: str, *, max_age_s: int = MAX_AGE_S) -> Callable[[], str]:
    """A function that returns a field of a secret, a JSON object.

    It raises Unavailable when the secret cannot be read, and ConfigurationError when it has no such field.
    """
    # Imported here because only this case needs boto3, which is slow to import. The stores' own reader of secrets would
    # import their drivers, too.
    from aws_lambda_powertools.utilities.parameters import SecretsProvider
    from aws_lambda_powertools.utilities.parameters.exceptions import GetParameterError, TransformParameterError
    from botocore.config import Config

    secrets = SecretsProvider(boto_config=Config(connect_timeout=2, read_timeout=3, retries={"total_max_attempts": 2}))

    def read() -> str:
        try:
            secret = secrets.get(arn, max_age=max_age_s, transform="json")
        except (GetParameterError, TransformParameterError) as error:
            raise Unavailable(f"the secret {arn} cannot be read: {type(error.__cause__ or error).__name__}") from error
        if not isinstance(secret, dict) or not secret.get(field):
            raise ConfigurationError(f"the secret {arn} has no {field}")
        return str(secret[field])

    return read
