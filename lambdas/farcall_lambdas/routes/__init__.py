"""The routes, one module per resource. A route parses, calls one service and shapes the answer."""

from farcall_lambdas.routes.account import router as account
from farcall_lambdas.routes.actions import router as actions
from farcall_lambdas.routes.containers import router as containers
from farcall_lambdas.routes.endpoints import router as endpoints
from farcall_lambdas.routes.functions import router as functions
from farcall_lambdas.routes.sharing import router as sharing
from farcall_lambdas.routes.submit import router as submit
from farcall_lambdas.routes.tasks import router as tasks
from farcall_lambdas.routes.tokens import router as tokens
from farcall_lambdas.routes.usage import router as usage
from farcall_lambdas.routes.version import router as version

__all__ = ["ROUTERS"]

ROUTERS = (functions, containers, endpoints, sharing, submit, tasks, account, tokens, usage, version, actions)
