"""A process that writes to a store until it is done or killed: `python -m tests.fakes.artifact_writer MODE URL ...`."""

from __future__ import annotations

import itertools
import sys
import time
from datetime import UTC, datetime

import pyarrow as pa

from artifacts.library import Manifest, commit, draft_manifest
from artifacts.shards import write_shard
from artifacts.store import Store, open_store
from tests.fakes.artifact_cases import capacity_table, rows_of, shard_key_of

SHARDS = 3
ROWS = 40


def marked_rows(generation: int) -> pa.Table:
    """Rows whose throughput all is the generation, so that a mix of two snapshots shows."""
    table = rows_of(capacity_table(), ROWS)
    index = table.schema.get_field_index("throughput_tokens_per_s")
    return table.set_column(index, table.schema.field(index), pa.array([float(generation)] * len(table)))


def publish(store: Store, library: str, generation: int) -> Manifest:
    """One snapshot: shards first, then the manifest."""
    capacity, rows = capacity_table(), marked_rows(generation)
    records = [
        write_shard(store, library, shard_key_of(capacity, part=part, parts=SHARDS, seed=generation), rows)
        for part in range(SHARDS)
    ]
    draft = draft_manifest(
        library=library,
        shards=records,
        shards_expected=SHARDS,
        created_at=datetime.now(UTC),
        code_version="test",
        inputs={},
        parameters={},
        statistics={"generation": float(generation)},
    )
    return commit(store, draft)


def main(mode: str, url: str, *rest: str) -> None:
    store = open_store(url)
    match mode:
        case "objects":  # big objects under ever new keys, until killed
            data = bytes(int(rest[0]))
            for i in itertools.count():
                store.put_if_absent(f"{rest[1]}/{i}", data)
        case "snapshots":  # COUNT snapshots of a library, numbers printed
            library, start, count = rest[0], int(rest[1]), int(rest[2])
            begin = float(rest[3]) if len(rest) > 3 else 0.0
            time.sleep(max(0.0, begin - time.time()))
            for generation in range(start, start + count):
                sys.stdout.write(f"{publish(store, library, generation).version}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
