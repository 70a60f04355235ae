"""Services: all of them, over one set of stores."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from farcall_common.store import Stores
from farcall_lambdas.fleet import Fleet
from farcall_lambdas.issued_credentials import IssuedCredentials
from farcall_lambdas.services.access import Access
from farcall_lambdas.services.account import AccountService
from farcall_lambdas.services.actions import ActionService
from farcall_lambdas.services.allowances import AllowanceService
from farcall_lambdas.services.base import Context
from farcall_lambdas.services.blobs import BlobService
from farcall_lambdas.services.cancel import CancelService
from farcall_lambdas.services.connect import ConnectService
from farcall_lambdas.services.containers import ContainerService
from farcall_lambdas.services.endpoints import EndpointService
from farcall_lambdas.services.functions import FunctionService
from farcall_lambdas.services.limits import Admission, RateLimit, Storage
from farcall_lambdas.services.output import OutputService
from farcall_lambdas.services.reconcile import IdleWatch, Reconciler
from farcall_lambdas.services.results import ResultService
from farcall_lambdas.services.retry import RetryService
from farcall_lambdas.services.sharing import SharingService
from farcall_lambdas.services.submit import SubmitService
from farcall_lambdas.services.tokens import TokenService
from farcall_lambdas.services.usage import UsageService
from farcall_lambdas.services.why import WhyService
from farcall_lambdas.services.withdrawal import WithdrawalService
from farcall_lambdas.settings import ApiSettings


@dataclasses.dataclass(frozen=True)
class Services:
    """The services that routes call. Safe to share between threads as far as the stores are."""

    account: AccountService
    functions: FunctionService
    containers: ContainerService
    endpoints: EndpointService
    sharing: SharingService
    submit: SubmitService
    results: ResultService
    output: OutputService
    cancel: CancelService
    retry: RetryService
    connect: ConnectService
    blobs: BlobService
    reconciler: Reconciler
    idle: IdleWatch
    why: WhyService
    tokens: TokenService
    admission: Admission
    usage: UsageService
    allowances: AllowanceService
    actions: ActionService

    @classmethod
    def over(
        cls,
        stores: Stores,
        settings: ApiSettings,
        *,
        clock: Callable[[], float] = time.time,
        fleet: Fleet | None = None,
        credentials: IssuedCredentials | None = None,
    ) -> Services:
        """Services over stores. ``clock`` gives epoch seconds; ``fleet`` is for forwarders that may sleep; without
        ``credentials`` endpoints get none."""
        storage = Storage(stores, stores.queue, settings, clock=clock)
        context = Context(stores, settings, Access(stores, clock=clock), storage, clock)
        cancel = CancelService(context)
        withdrawals = WithdrawalService(context, cancel)
        endpoints, results = EndpointService(context, withdrawals, cancel, credentials), ResultService(context)
        containers, blobs = ContainerService(context), BlobService(context)
        allowances = AllowanceService(context)
        sharing = SharingService(context, withdrawals, allowances)
        submit = SubmitService(context, containers, blobs, allowances)
        why = WhyService(context, results, endpoints)
        actions = ActionService(context, submit, results, cancel, why)
        return cls(
            account=AccountService(context),
            containers=containers,
            functions=FunctionService(context, withdrawals, containers),
            endpoints=endpoints,
            sharing=sharing,
            submit=submit,
            results=results,
            output=OutputService(context, endpoints),
            cancel=cancel,
            retry=RetryService(context, results, submit),
            connect=ConnectService(context, fleet),
            blobs=blobs,
            reconciler=Reconciler(context, withdrawals, sharing, actions),
            idle=IdleWatch(stores.queue, fleet),
            why=why,
            tokens=TokenService(context, endpoints, credentials),
            admission=Admission(RateLimit(stores.queue, settings, clock=clock), clock=clock),
            usage=UsageService(context),
            allowances=allowances,
            actions=actions,
        )
