"""Reads back what trackers were given, each by its own reader: (step, name) -> value."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

Values = dict[tuple[int, str], float]


def read_tensorboard(folder: Path) -> Values:
    """All scalars of the event files in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {(event.step, tag): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}


def read_wandb(folder: Path) -> Values:
    """The history of the one offline run below a folder, by W&B's own messages."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    values: Values = {}
    for data in _messages(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            step = int(items["_step"])
            values |= {(step, name): float(json.loads(text)) for name, text in items.items() if name[0] != "_"}
    return values


def _messages(data: bytes) -> Iterator[bytes]:
    """The messages of a LevelDB log after W&B's header of 7 bytes: blocks of 32 KiB of pieces (crc, length, type)."""
    at, message = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole message, or the last piece of one
            yield message
            message = b""


def read_trackio(folder: Path) -> Values:
    """The rows of the one run in a folder's database."""
    import sqlite3

    (path,) = folder.glob("*.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("select step, metrics from metrics").fetchall()
    return {(step, name): float(value) for step, text in rows for name, value in json.loads(text).items()}
