"""Services: all of them, over one set of stores."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from farcall_common.store import Stores
from farcall_lambdas.fleet import Fleet
from farcall_lambdas.services.access import Access
from farcall_lambdas.services.audit import AuditService
from farcall_lambdas.services.blobs import BlobService
from farcall_lambdas.services.cancel import CancelService
from farcall_lambdas.services.connect import ConnectService
from farcall_lambdas.services.containers import ContainerService
from farcall_lambdas.services.endpoints import EndpointService
from farcall_lambdas.services.functions import FunctionService
from farcall_lambdas.services.limits import AccountService, Admission, RateLimit, Storage
from farcall_lambdas.services.reconcile import IdleWatch, Reconciler
from farcall_lambdas.services.results import ResultService
from farcall_lambdas.services.retry import RetryService
from farcall_lambdas.services.submit import SubmitService
from farcall_lambdas.services.why import WhyService
from farcall_lambdas.settings import ApiSettings


@dataclasses.dataclass(frozen=True)
class Services:
    """The services that routes call. Safe to share between threads as far as the stores are."""

    account: AccountService
    functions: FunctionService
    containers: ContainerService
    endpoints: EndpointService
    submit: SubmitService
    results: ResultService
    cancel: CancelService
    retry: RetryService
    audit: AuditService
    connect: ConnectService
    blobs: BlobService
    reconciler: Reconciler
    idle: IdleWatch
    why: WhyService
    admission: Admission

    @classmethod
    def over(
        cls,
        stores: Stores,
        settings: ApiSettings,
        *,
        clock: Callable[[], float] = time.time,
        fleet: Fleet | None = None,
    ) -> Services:
        """Services over stores. ``clock`` gives epoch seconds; ``fleet`` is for forwarders that may sleep."""
        access = Access(stores)
        storage = Storage(stores, settings, clock=clock)
        endpoints = EndpointService(stores, access, settings, storage=storage, clock=clock)
        results = ResultService(stores, settings)
        containers = ContainerService(stores, settings, storage=storage, clock=clock)
        submit = SubmitService(stores, access, containers, settings, storage=storage, clock=clock)
        return cls(
            account=AccountService(stores, settings),
            containers=containers,
            functions=FunctionService(stores, access, settings, storage=storage, clock=clock),
            endpoints=endpoints,
            submit=submit,
            results=results,
            cancel=CancelService(stores, settings, clock=clock),
            retry=RetryService(stores, results, submit, clock=clock),
            audit=AuditService(stores),
            connect=ConnectService(stores, access, settings, clock=clock, fleet=fleet),
            blobs=BlobService(stores.blobs, settings),
            reconciler=Reconciler(stores, settings, clock=clock),
            idle=IdleWatch(stores.queue, fleet),
            why=WhyService(stores, results, endpoints, settings, clock=clock),
            admission=Admission(RateLimit(stores.queue, settings, clock=clock), clock=clock),
        )
