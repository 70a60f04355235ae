"""Code bundles as CDK assets. CDK builds a bundle only when it synthesises a stack that needs it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import jsii
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_s3_assets as s3_assets
from constructs import Construct

from farcall_infra.bundles import Bundle, WheelPlatform, content_digest, package_directory


@jsii.implements(cdk.ILocalBundling)
class _LocalBundling:
    """CDK's hook for bundling outside docker."""

    def __init__(self, bundle: Bundle, platform: WheelPlatform) -> None:
        self._bundle = bundle
        self._platform = platform

    def try_bundle(self, output_dir: str, *_args: Any, **_options: Any) -> bool:
        self._bundle.build(Path(output_dir), platform=self._platform)
        return True


def lambda_code(bundle: Bundle, *, platform: WheelPlatform) -> lambda_.AssetCode:
    """``bundle`` as the code of a Lambda function."""
    return lambda_.Code.from_asset(**_asset(bundle, platform))


def bundle_asset(
    scope: Construct, construct_id: str, *, bundle: Bundle, platform: WheelPlatform
) -> tuple[s3_assets.Asset, str]:
    """``bundle`` as a zip file in the deployment's asset bucket, and the SHA-256 of its contents.

    That is also in the file's name: a file of the same sources that another machine has built differently is another
    file. In a synth without bundles, both are made of the sources.
    """
    if not cdk.Stack.of(scope).bundling_required:
        return s3_assets.Asset(scope, construct_id, **_asset(bundle, platform)), bundle.digest(platform)
    with tempfile.TemporaryDirectory(prefix="farcall-bundle-") as temporary:
        directory = Path(temporary) / bundle.name
        bundle.build(directory, platform=platform)
        digest = content_digest(directory)
        asset = s3_assets.Asset(  # which copies the directory
            scope, construct_id, path=str(directory), asset_hash=digest, asset_hash_type=cdk.AssetHashType.CUSTOM
        )
    return asset, digest


def _asset(bundle: Bundle, platform: WheelPlatform) -> dict[str, Any]:
    return {
        "path": str(package_directory(bundle.packages[0])),
        "asset_hash": bundle.digest(platform),
        "asset_hash_type": cdk.AssetHashType.CUSTOM,
        "bundling": cdk.BundlingOptions(
            # CDK requires an image for the case that local bundling declines. Ours never declines: it succeeds or
            # raises.
            image=cdk.DockerImage.from_registry("scratch"),
            local=_LocalBundling(bundle, platform),
        ),
    }
