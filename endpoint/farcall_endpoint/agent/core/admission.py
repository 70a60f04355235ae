"""Admission of tasks: why this endpoint does not run a task, a function or an environment. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from farcall_common.environments import Environment
from farcall_common.errors import ErrorRecord
from farcall_common.task_options import Callee, TaskOptions
from farcall_common.wire import FunctionSpec, TaskSpec
from farcall_endpoint.agent.core.environments import image_of
from farcall_endpoint.agent.core.graphs import GraphNeeds, of_stage
from farcall_endpoint.contracts import outcomes

if TYPE_CHECKING:
    from farcall_endpoint.agent.core.signatures import SignatureCheck


class Admission:
    """The conditions under which tasks may run here. Instants are epoch seconds.

    If the endpoint's own configuration permits certain functions only, no task may name an environment: an image of the
    submitter's choice would be a way to run other code.

    :param allowed_functions: ids of functions, or SHA-256 hashes of their bodies; None is no limit.
    :param signatures: which functions have a signature that counts; None: functions need none.
    :param block_s: seconds that a block of managers lives; None if it has no limit.
    :param image_check: where a block runs the image of one environment: why a submitter may not have that image, empty
        if it may. None where blocks run all tasks.
    """

    def __init__(
        self,
        *,
        allowed_functions: Collection[str] | None,
        signatures: SignatureCheck | None,
        block_s: float | None,
        image_check: Callable[[Environment, str], str] | None,
    ) -> None:
        self._allowed_functions = allowed_functions
        self._signatures = signatures
        self._is_restricted = allowed_functions is not None or signatures is not None
        self._block_s = block_s
        self._image_check = image_check
        self._known_functions: set[str] = set()
        #: Why no manager can be had; empty if one can.
        self.no_nodes = ""

    @property
    def allowed_signers(self) -> int | None:
        """The number of keys whose functions may run; None if functions need no signature."""
        return None if self._signatures is None else len(self._signatures)

    def add_functions(self, function_hashes: Iterable[str]) -> None:
        """Functions are here whose bodies have these SHA-256 hashes."""
        self._known_functions.update(function_hashes)

    def has_function(self, function_hash: str) -> bool:
        """Whether the body of a function is here."""
        return function_hash in self._known_functions

    def check_signature(self, function: FunctionSpec, *, now: float) -> str:
        """The principals of a function's signer; empty if its signature does not count, or functions need none."""
        return "" if self._signatures is None else self._signatures.add(function, now=now)

    def refusal(self, spec: TaskSpec, graph: GraphNeeds | None, *, now: float) -> ErrorRecord | None:
        """Why a task fails before it is queued; None if it is accepted.

        :param graph: what is known of its graph, if it is one.
        """
        options = spec.options
        if self._image_check is not None:
            environments = (options.environment,) if graph is None else graph.environments
            if (refused := self._images_refusal(spec.submitter, environments)) is not None:
                return refused
        functions: tuple[TaskSpec | Callee, ...] = (spec, *options.callees) if options.callees else (spec,)
        allowed, signatures = self._allowed_functions, self._signatures
        for each in functions:
            if allowed is not None and not {each.function_id, each.function_hash}.intersection(allowed):
                return outcomes.function_not_permitted(each.function_id, each.function_hash)
            if each.function_hash not in self._known_functions:
                return outcomes.function_missing(each.function_hash)
            if signatures is not None and (refused := signatures.refusal(each.function_hash, now=now)) is not None:
                return refused
        for callee in options.callees:
            if (refused := self._environment_refusal(callee.environment)) is not None:
                return refused
        if (refused := self._options_refusal(options)) is not None:
            return refused
        if graph is not None and (refused := self._stages_refusal(graph)) is not None:
            return refused
        return outcomes.nodes_unavailable(self.no_nodes) if self.no_nodes else None

    def graph_refusal(self, spec: TaskSpec, graph: GraphNeeds) -> ErrorRecord | None:
        """Why the graph of a task cannot run, which was accepted so far; None if it can."""
        return self._images_refusal(spec.submitter, graph.environments) or self._stages_refusal(graph)

    def _stages_refusal(self, graph: GraphNeeds) -> ErrorRecord | None:
        """Why a stage of a graph cannot run, with its name."""
        for label, options in ((each.label, each.options) for each in graph.options):
            if (refused := self._options_refusal(options)) is not None:
                return of_stage(label, refused)
        return None

    def _images_refusal(self, submitter: str, environments: Sequence[Environment | None]) -> ErrorRecord | None:
        """Why a task cannot run where each block runs one image."""
        if self._image_check is None:
            return None
        for environment in environments:
            if environment is not None and (reason := self._image_check(environment, submitter)):
                return outcomes.environment_unsupported(environment.label, reason)
        if len(environments) > 1 and any(map(image_of, filter(None, environments))):
            return outcomes.graph_apart("its stages need several images, and each node runs one.")
        return None

    def _options_refusal(self, options: TaskOptions) -> ErrorRecord | None:
        """Why a task with these options, or a stage, cannot run."""
        if options.container is not None and options.environment is None:  # the API has not resolved it
            return outcomes.containers_unsupported(options.container)
        if (refused := self._environment_refusal(options.environment)) is not None:
            return refused
        if options.resource_specification:
            if wrong := options.untranslatable():
                return outcomes.limit_invalid(*wrong)
            if name := options.unknown_resource():
                return outcomes.resource_unknown(name)
        if self._block_s is not None and (options.walltime_s or 0.0) > self._block_s:
            return outcomes.walltime_too_long(options.walltime_s or 0.0, block_s=self._block_s)
        return None

    def _environment_refusal(self, environment: Environment | None) -> ErrorRecord | None:
        if environment is None:
            return None
        if self._is_restricted:
            return outcomes.environment_not_permitted(environment.label)
        problem = environment.problem()  # the API has checked it; commands are made of it here
        return outcomes.environment_invalid(problem) if problem else None
