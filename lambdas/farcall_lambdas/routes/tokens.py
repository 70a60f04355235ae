"""Routes of tokens and service accounts."""

from farcall_common.store.model import ApiToken, ServiceAccount
from farcall_lambdas.models.fields import Id
from farcall_lambdas.models.functions import Removed
from farcall_lambdas.models.tokens import (
    AccountEntry,
    AccountList,
    CreateAccount,
    CreateToken,
    TokenCreated,
    TokenEntry,
    TokenList,
)
from farcall_lambdas.routes.call import CurrentCall, new_router

router = new_router()


@router.post("/v3/tokens", summary="Make a token that permits some operations", tags=["tokens"])
def create_token(body: CreateToken, call: CurrentCall) -> TokenCreated:
    """Needs your login: no token can make another one. The answer is the only one with the secret."""
    token, secret = call.services.tokens.create(call.identity, body)
    return TokenCreated(**_token(token).model_dump(), token=secret)


@router.get("/v3/tokens", summary="List your tokens, and those of your accounts, newest first", tags=["tokens"])
def list_tokens(call: CurrentCall) -> TokenList:
    return TokenList(tokens=[_token(each) for each in call.services.tokens.tokens(call.identity)])


@router.delete("/v3/tokens/<token_id>", summary="Revoke a token of yours, or of your accounts", tags=["tokens"])
def revoke_token(token_id: Id, call: CurrentCall) -> Removed:
    """It is refused within 10 seconds. Tasks that it submitted run on."""
    call.services.tokens.revoke(call.identity, token_id)
    return Removed()


@router.post("/v3/accounts", summary="Create a service account", tags=["tokens"])
def create_account(body: CreateAccount, call: CurrentCall) -> AccountEntry:
    """An identity for programs, which belongs to you. It has only the rights that are given to it."""
    return _account(call.services.tokens.create_account(call.identity, body.name))


@router.get("/v3/accounts", summary="List your service accounts, by name", tags=["tokens"])
def list_accounts(call: CurrentCall) -> AccountList:
    return AccountList(accounts=[_account(each) for each in call.services.tokens.accounts(call.identity)])


@router.delete(
    "/v3/accounts/<account_id>", summary="Delete a service account of yours, with its endpoints", tags=["tokens"]
)
def delete_account(account_id: Id, call: CurrentCall) -> Removed:
    """Its tokens are refused within 10 seconds."""
    call.services.tokens.delete_account(call.identity, account_id)
    return Removed()


def _token(token: ApiToken) -> TokenEntry:
    return TokenEntry(
        token_id=token.token_id,
        name=token.name,
        identity_id=token.identity_id,
        scopes=list(token.scopes),
        endpoints=None if token.endpoints is None else list(token.endpoints),
        functions=None if token.functions is None else list(token.functions),
        created_at=token.created_at.timestamp(),
        expires_at=token.expires_at.timestamp(),
        revoked_at=token.revoked_at.timestamp() if token.revoked_at else None,
        last_used_at=token.last_used_at.timestamp() if token.last_used_at else None,
    )


def _account(account: ServiceAccount) -> AccountEntry:
    return AccountEntry(
        account_id=account.account_id,
        name=account.name,
        owner_id=account.owner_id,
        created_at=account.created_at.timestamp(),
    )
