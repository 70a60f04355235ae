"""What docs/scale.md says about Valkey's cluster mode, compared with the store and with the client."""

from __future__ import annotations

import re
from pathlib import Path

from redis.cluster import PIPELINE_BLOCKED_COMMANDS

from farcall_common.store import queue_valkey

_PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")


def test_the_page_names_all_keys_without_a_hash_tag() -> None:
    """Channels have no slot."""
    rows = re.findall(r"^``([^`]+)``.* (string|hash|list|set|zset) ", queue_valkey.__doc__ or "", flags=re.MULTILINE)
    untagged = {key for key, _ in rows if "{endpoint}" not in key}
    (named,) = re.findall(r"Others have no tag: (.*?)\. Each is used by itself", _PAGE)
    assert set(re.findall(r"`([^`]+)`", named)) == untagged


def test_the_clients_pipeline_for_clusters_refuses_scripts() -> None:
    """If this fails, the page has to change."""
    assert {"EVALSHA", "SCRIPT LOAD"} <= set(PIPELINE_BLOCKED_COMMANDS)
