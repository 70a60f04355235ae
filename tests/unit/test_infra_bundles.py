"""Code bundles: their digest, requirements and sources."""

from __future__ import annotations

from farcall_infra.bundles import ARM64, FORWARDER, HOST, LAMBDAS, WORKSPACE


def test_the_digest_is_stable_and_differs_by_platform_and_bundle() -> None:
    assert LAMBDAS.digest(ARM64) == LAMBDAS.digest(ARM64)
    assert len({LAMBDAS.digest(ARM64), LAMBDAS.digest(HOST), FORWARDER.digest(ARM64)}) == 3


def test_requirements_are_locked_with_hashes_without_omitted_packages() -> None:
    requirements = LAMBDAS.requirements()
    assert "aws-lambda-powertools==" in requirements
    assert requirements.count("--hash=sha256:") > requirements.count("==")
    assert "boto3==" not in requirements
    assert "boto3==" in FORWARDER.requirements()
    assert "sqlalchemy==" in requirements
    assert "sqlalchemy==" not in FORWARDER.requirements()


def test_user_code_libraries_are_in_no_bundle() -> None:
    for bundle in (LAMBDAS, FORWARDER):
        assert "dill==" not in bundle.requirements()
        assert "cloudpickle==" not in bundle.requirements()


def test_bundle_sources_exist() -> None:
    for bundle in (LAMBDAS, FORWARDER):
        for source in bundle.sources:
            assert (WORKSPACE / source / "__init__.py").exists()
