"""Lambda executor for LocalStack that runs functions as processes instead of containers."""

from __future__ import annotations

import base64
import tempfile
import threading
import zipfile
from pathlib import Path

from localstack.services.lambda_.invocation.executor_endpoint import StatusErrorException
from localstack.services.lambda_.invocation.lambda_models import FunctionVersion, InvocationResult, S3Code
from localstack.services.lambda_.invocation.runtime_executor import RuntimeExecutor

from farcall_localstack_plugin.engines import HOST
from farcall_localstack_plugin.runtime import Invocation, RuntimeFailed, RuntimeProcess
from farcall_localstack_plugin.settings import settings
from localstack import config

_INIT_TIMEOUT_S = 120.0  # the same as LocalStack's time limit: server.py
_unzip_lock = threading.Lock()


class ProcessRuntimeExecutor(RuntimeExecutor):
    """One execution environment; LocalStack's own assignment service decides their number."""

    def __init__(self, id: str, function_version: FunctionVersion) -> None:  # noqa: A002 - the base class's name
        super().__init__(id, function_version)
        self._runtime: RuntimeProcess | None = None

    def start(self, env_vars: dict[str, str]) -> None:
        function = self.function_version.config
        name = f"lambda-{self.function_version.id.function_name}-{self.id[:8]}"
        self._runtime = RuntimeProcess(
            name,
            python=settings().python,
            code=_unzipped(_code(self.function_version)),
            handler=function.handler,
            environment={key: str(value) for key, value in env_vars.items()},
            timeout_s=function.timeout,
            init_timeout_s=_INIT_TIMEOUT_S,
            log=settings().directory / f"{name}.log",
        )
        try:
            self._runtime.start()
        except RuntimeFailed as error:
            raise StatusErrorException(message=str(error), payload=error.payload) from error

    def stop(self) -> None:
        if self._runtime is not None:
            self._runtime.stop()

    def get_address(self) -> str:
        return HOST

    def get_endpoint_from_executor(self) -> str:
        return HOST

    def get_runtime_endpoint(self) -> str:
        return f"http://{HOST}:{config.GATEWAY_LISTEN[0].port}/_localstack_lambda/{self.id}"

    def invoke(self, payload: dict[str, str]) -> InvocationResult:
        assert self._runtime is not None
        request_id = payload["invoke-id"]
        printed = self._runtime.log_size()
        try:
            outcome = self._runtime.invoke(
                Invocation(
                    request_id=request_id,
                    payload=payload["payload"].encode(),
                    function_arn=payload["invoked-function-arn"],
                    trace_id=payload["trace-id"],
                )
            )
        except RuntimeFailed as error:
            raise StatusErrorException(message=str(error), payload=error.payload) from error
        text = self._runtime.log_text(since=printed)
        logs = f"START RequestId: {request_id}\n{text}END RequestId: {request_id}\n"
        return InvocationResult(request_id, outcome.payload, is_error=outcome.is_error, logs=logs)

    def get_logs(self) -> str:
        return self._runtime.log_text() if self._runtime is not None else ""

    @classmethod
    def prepare_version(cls, function_version: FunctionVersion) -> None:
        _unzipped(_code(function_version))

    @classmethod
    def cleanup_version(cls, function_version: FunctionVersion) -> None:
        """Do nothing: LocalStack cleans up."""


def _code(function_version: FunctionVersion) -> S3Code:
    """A function's code in S3: our templates have no container images and no inline code."""
    code = function_version.config.code
    assert isinstance(code, S3Code)
    return code


def _unzipped(code: S3Code) -> Path:
    """The directory of the unzipped code. Functions with the same code share it, because it is only read."""
    directory = settings().directory / "code" / base64.b64decode(code.code_sha256).hex()
    with _unzip_lock:
        if not directory.exists():
            directory.parent.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
                archive = Path(temporary) / "code.zip"
                with archive.open("wb") as file:
                    code._download_archive_to_file(file)
                fresh = Path(temporary) / "code"
                with zipfile.ZipFile(archive) as zipped:
                    zipped.extractall(fresh)
                fresh.rename(directory)
    return directory
