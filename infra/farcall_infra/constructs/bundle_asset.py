"""Code bundles as CDK assets. They are built only for stacks that need them, once for each synth.

The hash of an asset is that of the bundle's contents: a bundle of the same sources that another machine has built
differently, with byte code or without, is another file. In a synth without bundles it is made of the sources.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_s3_assets as s3_assets
from constructs import Construct

from farcall_infra.bundles import Bundle, WheelPlatform, content_digest, package_directory


def lambda_code(scope: Construct, bundle: Bundle, *, platform: WheelPlatform) -> lambda_.AssetCode:
    """``bundle`` as the code of a Lambda function."""
    options, _ = _asset(scope, bundle, platform)
    return lambda_.Code.from_asset(**options)


def bundle_asset(
    scope: Construct, construct_id: str, *, bundle: Bundle, platform: WheelPlatform
) -> tuple[s3_assets.Asset, str]:
    """``bundle`` as a zip file in the deployment's asset bucket, and the SHA-256 of its contents, which is also in the
    file's name."""
    options, digest = _asset(scope, bundle, platform)
    return s3_assets.Asset(scope, construct_id, **options), digest


def _asset(scope: Construct, bundle: Bundle, platform: WheelPlatform) -> tuple[dict[str, Any], str]:
    """The options of the asset, and its hash."""
    if cdk.Stack.of(scope).bundling_required:
        directory, digest = _built(bundle, platform)
        return {"path": directory.name, "asset_hash": digest, "asset_hash_type": cdk.AssetHashType.CUSTOM}, digest
    digest = bundle.digest(platform)
    # CDK runs no bundling here, so that it copies nothing either.
    bundling = cdk.BundlingOptions(image=cdk.DockerImage.from_registry("scratch"))
    path = str(package_directory(bundle.packages[0]))
    return {
        "path": path, "asset_hash": digest, "asset_hash_type": cdk.AssetHashType.CUSTOM, "bundling": bundling,
    }, digest  # fmt: skip


@functools.cache
def _built(bundle: Bundle, platform: WheelPlatform) -> tuple[tempfile.TemporaryDirectory[str], str]:
    """The directory of a built bundle, which exists until the process ends, and the digest of its contents."""
    directory = tempfile.TemporaryDirectory(prefix="farcall-bundle-")
    bundle.build(Path(directory.name), platform=platform)
    return directory, content_digest(Path(directory.name))
