"""All services over one set of stores."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from farcall_common.store import Stores
from farcall_lambdas.services.access import Access
from farcall_lambdas.services.blobs import BlobService
from farcall_lambdas.services.cancel import CancelService
from farcall_lambdas.services.connect import ConnectService
from farcall_lambdas.services.endpoints import EndpointService
from farcall_lambdas.services.functions import FunctionService
from farcall_lambdas.services.limits import RateLimit
from farcall_lambdas.services.reconcile import Reconciler
from farcall_lambdas.services.results import ResultService
from farcall_lambdas.services.submit import SubmitService
from farcall_lambdas.services.why import WhyService
from farcall_lambdas.settings import ApiSettings

__all__ = ["Services"]


@dataclasses.dataclass(frozen=True)
class Services:
    """What the routes call. Safe to share between threads as far as the stores are."""

    functions: FunctionService
    endpoints: EndpointService
    submit: SubmitService
    results: ResultService
    cancel: CancelService
    connect: ConnectService
    blobs: BlobService
    reconciler: Reconciler
    why: WhyService
    rate_limit: RateLimit

    @classmethod
    def over(cls, stores: Stores, settings: ApiSettings, *, clock: Callable[[], float] = time.time) -> Services:
        """Services over stores. ``clock`` gives epoch seconds."""
        access = Access(stores.records)
        endpoints = EndpointService(stores.records, access, settings, clock=clock)
        results = ResultService(stores, settings)
        return cls(
            functions=FunctionService(stores.records, access, settings, clock=clock),
            endpoints=endpoints,
            submit=SubmitService(stores, access, settings, clock=clock),
            results=results,
            cancel=CancelService(stores, settings, clock=clock),
            connect=ConnectService(stores, access, settings, clock=clock),
            blobs=BlobService(stores.blobs, settings),
            reconciler=Reconciler(stores, settings, clock=clock),
            why=WhyService(stores, results, endpoints, clock=clock),
            rate_limit=RateLimit(stores.queue, settings, clock=clock),
        )
