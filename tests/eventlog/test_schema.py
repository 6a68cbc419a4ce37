"""The published schema equals the code, and the metadata's checksum sees every change."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Record, RecordKind
from fsm_trainer.eventlog.reference import describe, page
from fsm_trainer.eventlog.schema import (
    BATCH_METADATA,
    CONFIG_KEY,
    CRC_KEY,
    KINDS,
    METADATA,
    RUN_KEY,
    SCHEMA,
    SCHEMA_VERSION,
    SEGMENT_METADATA,
    VERSION_KEY,
    log_metadata,
    policy_rev,
    run_schema,
    schema_crc,
)

ROOT = Path(__file__).parents[2]


def test_published_schema_equals_the_code() -> None:
    published = json.loads((ROOT / "schemas" / "event_log.json").read_text())
    assert published == describe(), "run `make docs`"
    assert (ROOT / "schemas" / "event_log.md").read_text() == page(), "run `make docs`"
    with pa.ipc.open_stream(ROOT / "schemas" / "event_log.arrows") as stream:
        assert stream.schema.equals(SCHEMA), "run `make docs`"
        assert stream.schema.metadata == {VERSION_KEY.encode(): SCHEMA_VERSION.encode()}


def test_published_page_names_everything() -> None:
    lines = page().splitlines()
    for field in SCHEMA:
        (line,) = [line for line in lines if line.startswith(f"| `{field.name}` |")]
        assert ("never null" in line) == (not field.nullable)
    for name in (*(kind.value for kind in RecordKind), *METADATA, *SEGMENT_METADATA, *BATCH_METADATA):
        assert any(line.startswith(f"| `{name}` |") for line in lines), name


def test_columns_are_the_fields_of_record_with_plain_types() -> None:
    assert tuple(SCHEMA.names) == Record._fields
    assert [f.name for f in SCHEMA if not f.nullable] == ["seq", "t_ns", "kind"]
    integers = {"seq", "t_ns", "cause_seq", "batch_id", "engine", "staleness", "queue_len", "tokens", "train_version"}
    integers |= {"rollout_version_first", "rollout_version_last", "posted_ns", "started_ns", "finished_ns"}
    floats = {"value", "numerator", "denominator"}
    for field in SCHEMA:
        wanted = pa.int64() if field.name in integers else pa.float64() if field.name in floats else pa.utf8()
        assert field.type == wanted, field


def test_documentation_names_every_kind_and_column() -> None:
    text = (ROOT / "docs" / "event-log.md").read_text()
    assert [kind.value for kind in RecordKind if f"### `{kind.value}`" not in text] == []
    assert [
        name for name in (*Record._fields, *METADATA, *SEGMENT_METADATA, *BATCH_METADATA) if f"`{name}`" not in text
    ] == []
    assert set(KINDS) == set(RecordKind)


def test_metadata_carries_both_configurations() -> None:
    config = SchedulerConfig(admission="greedy", workers=3)
    values = log_metadata(config, {"seed": 7, "path": Path("a")}, code_rev="abc")
    schema = run_schema(values)
    assert {key.decode() for key in schema.metadata} == set(METADATA)
    assert SchedulerConfig.from_dict(json.loads(schema.metadata[CONFIG_KEY.encode()])) == config
    assert json.loads(schema.metadata[RUN_KEY.encode()]) == {"seed": 7, "path": "a"}


def test_checksum_of_the_schema_depends_on_fields_and_metadata_only() -> None:
    values = {"a": "1", "b": "2"}
    crc = schema_crc(SCHEMA, values)
    assert schema_crc(SCHEMA, {"b": "2", "a": "1", CRC_KEY: crc}) == crc
    assert schema_crc(SCHEMA, {"a": "1", "b": "3"}) != crc
    assert schema_crc(SCHEMA.remove(5), values) != crc
    assert schema_crc(SCHEMA.set(0, pa.field("seq", pa.int32(), nullable=False)), values) != crc


def test_policy_fingerprint_is_stable() -> None:
    assert policy_rev() == policy_rev()
    assert len(policy_rev()) == 16
