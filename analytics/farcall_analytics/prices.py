"""Prices: what storages and workers cost. Offline defaults with their date; all in dollars, bytes and seconds."""

from __future__ import annotations

import dataclasses
from typing import Final

GB: Final = 1e9
HOUR_S: Final = 3600.0
MONTH_S: Final = 730 * HOUR_S


@dataclasses.dataclass(frozen=True)
class StoragePrice:
    """Price of a storage.

    :param write, read: dollars for a request.
    :param byte_written, byte_read: dollars for a transferred byte.
    :param byte_s: dollars for a stored byte and second.
    :param provisioned_byte_s: dollars for a byte of capacity, used or not, and second.
    :param least_s: minimum seconds for which capacity is paid.
    """

    write: float = 0.0
    read: float = 0.0
    byte_written: float = 0.0
    byte_read: float = 0.0
    byte_s: float = 0.0
    provisioned_byte_s: float = 0.0
    least_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class WorkerPrice:
    """Price of a worker.

    :param byte_s: dollars for a byte of memory and second, with its part of a processor.
    :param call: dollars for a call.
    :param step_s: the seconds of a call are rounded up to a multiple of this.
    """

    byte_s: float = 0.0
    call: float = 0.0
    step_s: float = 0.0


S3_2026: Final = StoragePrice(write=0.005e-3, read=0.0004e-3, byte_s=0.023 / GB / MONTH_S)
S3_EXPRESS_2026: Final = StoragePrice(
    write=0.00113e-3,
    read=0.00003e-3,
    byte_written=0.0032 / GB,
    byte_read=0.0006 / GB,
    byte_s=0.11 / GB / MONTH_S,
)
VALKEY_SERVERLESS_2026: Final = StoragePrice(
    # one ECPU for each KB that is moved
    byte_written=0.0023e-6 / 1e3,
    byte_read=0.0023e-6 / 1e3,
    byte_s=0.084 / GB / HOUR_S,
)
LAMBDA_2026: Final = WorkerPrice(byte_s=0.0000166667 / GB, call=0.20e-6, step_s=0.001)
"""us-east-1, x86, November 2026."""

S3_2018: Final = StoragePrice(write=0.005e-3, read=0.0004e-3, byte_s=0.0000319 / GB / HOUR_S)
REDIS_2018: Final = StoragePrice(provisioned_byte_s=0.02344 / GB / HOUR_S)
LAMBDA_2018: Final = WorkerPrice(byte_s=0.00001667 / GB, call=0.20e-6, step_s=0.1)
"""Prices from the Locus paper."""

FREE_STORAGE: Final = StoragePrice()
FREE_WORKERS: Final = WorkerPrice()
"""Price of workers on a cluster without costs by the hour."""
