"""Services of the API. They know stores and identities, never HTTP; they raise domain errors."""

from farcall_lambdas.services.access import Access
from farcall_lambdas.services.audit import AuditService
from farcall_lambdas.services.blobs import BlobService
from farcall_lambdas.services.bundle import Services
from farcall_lambdas.services.cancel import CancelService
from farcall_lambdas.services.connect import ConnectService
from farcall_lambdas.services.containers import ContainerService
from farcall_lambdas.services.endpoints import EndpointService
from farcall_lambdas.services.functions import FunctionService
from farcall_lambdas.services.limits import AccountService, Admission
from farcall_lambdas.services.reconcile import Reconciler
from farcall_lambdas.services.results import ResultService
from farcall_lambdas.services.retry import RetryService
from farcall_lambdas.services.submit import SubmitService
from farcall_lambdas.services.why import WhyService

__all__ = [
    "Access",
    "AccountService",
    "Admission",
    "AuditService",
    "BlobService",
    "CancelService",
    "ConnectService",
    "ContainerService",
    "EndpointService",
    "FunctionService",
    "Reconciler",
    "ResultService",
    "RetryService",
    "Services",
    "SubmitService",
    "WhyService",
]
