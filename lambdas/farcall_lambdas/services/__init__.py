"""Services of the API. They use stores and identities, never HTTP; they raise domain errors."""

from farcall_lambdas.services.bundle import Services
from farcall_lambdas.services.reconcile import Reconciler

__all__ = ["Reconciler", "Services"]
