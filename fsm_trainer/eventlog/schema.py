"""The event log's Arrow schema, derived from `core.events.Record`, with the meaning of every column and kind.

It knows nothing of files; `eventlog.reference` publishes it.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import pyarrow as pa

import fsm_trainer.core
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Record, RecordKind

SCHEMA_VERSION = "1.1"
"""major.minor; within a major version only nullable columns are added."""

LOG_NAME = "events.arrows"
"""The log's file name in a run directory."""

VERSION_KEY = "fsm.schema_version"
POLICY_KEY = "fsm.policy_rev"
CONFIG_KEY = "fsm.config_json"
RUN_KEY = "fsm.run_json"
CODE_KEY = "fsm.code_rev"
CRC_KEY = "fsm.schema_crc32"

METADATA: dict[str, str] = {
    VERSION_KEY: "version of this schema, major.minor; within a major version only nullable columns are added",
    POLICY_KEY: "fingerprint of the decision code that wrote the log",
    CONFIG_KEY: "the scheduler's configuration as JSON: with the inputs, all that its decisions depend on",
    RUN_KEY: "the whole run's configuration as JSON",
    CODE_KEY: "revision of the code that wrote the log, if known",
    CRC_KEY: "CRC32 of the schema's fields and of the metadata above",
}
"""Keys of the schema's metadata and what they hold."""

SEGMENT_KEY = "fsm.segment"
FIRST_SEQ_KEY = "fsm.first_seq"
PREVIOUS_KEY = "fsm.previous_crc32"

SEGMENT_METADATA: dict[str, str] = {
    SEGMENT_KEY: "number of the file in the log, counted from 0",
    FIRST_SEQ_KEY: "seq of the file's first row",
    PREVIOUS_KEY: "CRC32 of the file before, from its first byte to the end of its last row",
}
"""Further keys of the schema's metadata in every file of a log after the first."""

CONTINUED_KEY = "continued_in"

BATCH_METADATA: dict[str, str] = {
    "first_seq": "seq of the record batch's first row",
    "rows": "number of rows",
    "crc32": "CRC32, as 0x and 8 hex digits, of the whole encapsulated message with these digits all zero",
    CONTINUED_KEY: "only in a batch without rows, the last of its file: number of the file in which the log goes on",
}
"""Keys of each record batch's custom metadata and what they hold."""

COLUMNS: dict[str, str] = {
    "seq": "position of the row, dense from 0",
    "t_ns": "nanoseconds of the run's monotonic clock at which the loop took the input that the row follows from",
    "kind": "what the row records, see kinds",
    "machine": "machine that moved or waits: rollout, trainer, engine, batch, run; of a metric: what it belongs to",
    "entity": "which instance of the machine",
    "trigger": "input: its kind; transition: the edge's trigger; command: the command's kind",
    "source": "state the machine was in",
    "dest": "state the machine is in from now on",
    "cause_seq": "seq of the row that this one answers: of an input, the command it completes",
    "batch_id": "prompt batch concerned, numbered in order of admission; from 0, a resumed run counts on",
    "engine": "rollout engine concerned, numbered from 0",
    "rollout_version_first": "policy version at the batch's first token",
    "rollout_version_last": "policy version at the batch's last token, or that an engine serves",
    "train_version": "optimiser steps taken, or the version exported, saved or loaded",
    "staleness": "train_version at consumption less the rollout policy version at the first token",
    "queue_len": "batches in the train queue after the event",
    "tokens": "tokens that the operation handled",
    "posted_ns": "nanoseconds of the run's monotonic clock at which the command was handed to its worker thread",
    "started_ns": "likewise, at which the worker thread began the operation",
    "finished_ns": "likewise, at which the operation ended",
    "value": "metric: its value",
    "digest": "fingerprint of the operation's result",
    "reason": "why: of a drop, wait, failure, stop or end, in one word; metric: its name",
    "message": "the same in words for people",
    "numerator": "metric that is a rate: what was added up; rates are averaged by adding numerators and denominators",
    "denominator": "metric that is a rate: what the sum is divided by",
}
"""What each column means. Their order and types are those of `Record`."""

KINDS: dict[RecordKind, str] = {
    RecordKind.INPUT: "something happened outside: the row is the whole input of the scheduler",
    RecordKind.TRANSITION: "a machine took an edge of its table",
    RecordKind.COMMAND: "an operation was handed out, or a notice given; its seq is the operation's name",
    RecordKind.VERSION: "train_version or an engine's rollout version changed",
    RecordKind.QUEUE: "a batch entered or left the train queue",
    RecordKind.DROP: "a batch was consumed without being trained on, and why",
    RecordKind.SYNC: "a weight sync became due, was published, or was skipped, and why",
    RecordKind.CHECKPOINT: "a checkpoint is complete",
    RecordKind.WAIT: "a machine in a waiting state has a new cause to wait for",
    RecordKind.IGNORED: "an input that changes nothing any more, and why",
    RecordKind.METRIC: "a number measured outside the scheduler; no decision depends on it",
    RecordKind.RUN_END: "the run ended: the last row of a whole log",
}
"""What each kind of row records."""

_REQUIRED = ("seq", "t_ns", "kind")


def _arrow_type(hint: Any) -> pa.DataType:
    text = str(hint)
    if "float" in text:
        return pa.float64()
    return pa.int64() if "int" in text else pa.utf8()


def _fields() -> list[pa.Field]:
    hints = get_type_hints(Record)
    assert tuple(COLUMNS) == Record._fields, "every column of Record needs its meaning, in order"
    return [pa.field(name, _arrow_type(hints[name]), nullable=name not in _REQUIRED) for name in Record._fields]


SCHEMA: pa.Schema = pa.schema(_fields())
"""The columns, without a run's metadata."""


def run_schema(metadata: Mapping[str, str]) -> pa.Schema:
    """The schema of one run's log: the columns, the metadata, the schema's version and its checksum."""
    values = {**metadata, VERSION_KEY: SCHEMA_VERSION}
    return SCHEMA.with_metadata({**values, CRC_KEY: schema_crc(SCHEMA, values)})


def schema_crc(schema: pa.Schema, metadata: Mapping[str, str]) -> str:
    """CRC32 of what a schema says, so that a flipped byte in it is seen; `metadata` may hold the CRC itself."""
    fields = [[field.name, str(field.type), field.nullable] for field in schema]
    values = sorted((key, value) for key, value in metadata.items() if key != CRC_KEY)
    return f"0x{zlib.crc32(json.dumps([fields, values]).encode()):08x}"


def log_metadata(config: SchedulerConfig, run_config: Mapping[str, Any], *, code_rev: str = "") -> dict[str, str]:
    """The metadata to open a run's log with."""
    return {
        POLICY_KEY: policy_rev(),
        CONFIG_KEY: json.dumps(config.to_dict()),
        RUN_KEY: json.dumps(run_config, default=str),
        CODE_KEY: code_rev,
    }


def policy_rev() -> str:
    """Fingerprint of the decision code: the sources of `core/`, so that a verifier can say that they differ."""
    digest = hashlib.sha256()
    for path in sorted(Path(fsm_trainer.core.__path__[0]).glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
