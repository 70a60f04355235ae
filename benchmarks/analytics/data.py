"""Records as those of CloudSort: 100 bytes, of which 10 are a random key."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

KEY, REST = 10, 90


def write_records(directory: Path, count: int, *, files: int, seed: int = 0) -> str:
    """Write so many records to files with two row groups each; a pattern for them."""
    directory.mkdir(parents=True)
    for number in range(files):
        rows = (number + 1) * count // files - number * count // files
        draw = np.random.default_rng([seed, number])
        columns = {"key": _binary(draw, rows, KEY), "rest": _binary(draw, rows, REST)}
        pq.write_table(
            pa.table(columns),
            directory / f"{number:04d}.parquet",
            row_group_size=rows // 2 + 1,
            use_dictionary=False,
            compression="none",
        )
    return f"{directory}/*.parquet"


def checksum(paths: list[str]) -> tuple[int, int, bool]:
    """Of files: their records, the sum of all keys' first 8 bytes, and whether they are in order."""
    total = records = 0
    ordered, last = True, b""
    for path in paths:
        keys = pq.read_table(path, columns=["key"])["key"].combine_chunks()
        if not len(keys):
            continue
        found = keys.cast(pa.binary(KEY))
        raw = np.frombuffer(found.buffers()[1], np.uint8)[found.offset * KEY :][: len(found) * KEY].reshape(-1, KEY)
        texts = raw.copy().view(f"S{KEY}").ravel()
        ordered &= bool(np.all(texts[:-1] <= texts[1:])) and last <= bytes(raw[0])
        last = bytes(raw[-1])
        total += int(raw[:, :8].copy().view(">u8").astype(object).sum())
        records += len(found)
    return records, total, ordered


def _binary(draw: np.random.Generator, rows: int, size: int) -> pa.Array:
    raw = draw.integers(1, 128, rows * size, np.uint8)  # no zeros: numpy's texts end there
    return pa.Array.from_buffers(pa.binary(size), rows, [None, pa.py_buffer(raw)]).cast(pa.binary())
