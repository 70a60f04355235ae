"""Signatures of functions at an endpoint that runs signed functions only."""

from __future__ import annotations

from collections.abc import Sequence

from farcall_common.errors import ErrorRecord, FunctionNotSigned
from farcall_common.ssh_signatures import AllowedSigners, Signer, statement
from farcall_common.wire import FunctionSpec
from farcall_endpoint.contracts import outcomes


class SignatureCheck:
    """Which functions have a signature that counts. A function is its body, whatever id it has: once signed, it may run
    until the keys of its signers expire, also under an id without a signature.

    :param allowed: whose signatures count.
    """

    def __init__(self, allowed: AllowedSigners) -> None:
        self._allowed = allowed
        self._signers: dict[str, Sequence[Signer]] = {}
        self._problems: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._allowed)

    def add(self, function: FunctionSpec, *, now: float) -> str:
        """Check a signature. A signature that does not count takes nothing from an earlier one that does.

        :return: the principals of the signer; empty if the function may not run for this signature.
        """
        function_hash, name = function.function_hash, function.name
        if not function.signature:
            self._problems[function_hash] = f"Function {name} has no signature."
            return ""
        try:
            signers = self._allowed.verify(statement(name, function_hash), function.signature)
        except FunctionNotSigned as error:
            self._problems[function_hash] = f"{name}: {error.record.message}"
            return ""
        valid = [signer.principals for signer in signers if not signer.problem(now=now)]
        if valid or function_hash not in self._signers:
            self._signers[function_hash] = signers
        return ", ".join(valid)

    def refusal(self, function_hash: str, *, now: float) -> ErrorRecord | None:
        """Why a function that is here does not run now; None if it does."""
        problems = [signer.problem(now=now) for signer in self._signers.get(function_hash, ())]
        if problems and not all(problems):
            return None
        if problems:
            return outcomes.function_not_signed(f"The signature of the function does not count: {problems[0]}.")
        return outcomes.function_not_signed(self._problems.get(function_hash, ""))
