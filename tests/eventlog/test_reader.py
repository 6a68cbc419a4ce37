"""Whatever happened to the file: what is read back is a true prefix, and the reader says what is lacking."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Record, RecordKind
from fsm_trainer.eventlog import frame, writer
from fsm_trainer.eventlog.reader import read_log, records
from fsm_trainer.eventlog.schema import SCHEMA, VERSION_KEY, log_metadata, run_schema, schema_crc

SMALL = {"fsm.config_json": "{}"}
SCHEMA_END = len(bytes(run_schema(SMALL).serialize()))


@pytest.fixture(scope="module")
def few(make_rows: Callable[[int], list[Record]]) -> list[Record]:
    """Seven good rows."""
    return make_rows(7)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, few: list[Record]) -> bytes:
    """A small log of two record batches."""
    path = tmp_path_factory.mktemp("run") / "log"
    writer.write_log(path, few, SMALL, max_rows=4)
    return path.read_bytes()


def raw_log(path: Path, schema: pa.Schema, batches: list[pa.RecordBatch]) -> Path:
    """A log of any schema, with right checksums."""
    parts, seq = [bytes(schema.serialize())], 0
    for batch in batches:
        parts.append(frame.encode_batch(batch, seq))
        seq += batch.num_rows
    path.write_bytes(b"".join([*parts, frame.END_OF_STREAM]))
    return path


def test_cut_at_every_byte(whole: bytes, tmp_path: Path, few: list[Record]) -> None:
    path = tmp_path / "log"
    seen = set()
    for size in range(len(whole)):
        path.unlink(missing_ok=True)  # overwriting waits for the storage, on many file systems
        path.write_bytes(whole[:size])
        if size < SCHEMA_END:
            with pytest.raises(ValueError, match="not a readable event log"):
                read_log(path)
            continue
        log = read_log(path)
        rows = list(records(log.table))
        assert rows == few[: len(rows)]
        assert log.complete == (len(rows) == len(few))
        assert not log.damaged, "a cut is no damage"
        assert (log.dropped_bytes > 0) == (log.problem is not None)
        seen.add(len(rows))
    assert seen == {0, 4, 7}


def test_flips_of_bytes_everywhere(whole: bytes, tmp_path: Path, few: list[Record]) -> None:
    path = tmp_path / "log"
    unreadable: list[int] = []
    for at in range(0, len(whole), 3):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        try:
            log = read_log(path)
        except ValueError:
            unreadable.append(at)
            continue
        rows = list(records(log.table))
        assert rows == few[: len(rows)], at
        if at >= SCHEMA_END:
            assert log.problem is not None, f"flip of byte {at} was not noticed"
        if SCHEMA_END <= at < len(whole) - len(frame.END_OF_STREAM):
            assert len(rows) < len(few)
            assert not log.complete
    assert max(unreadable) < SCHEMA_END, "only the schema makes a log unreadable"


def test_zeroed_stretch_is_damage(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log"
    end = len(whole) - len(frame.END_OF_STREAM)
    path.write_bytes(whole[: end - 300] + bytes(300) + whole[end:])
    log = read_log(path)
    assert log.table.num_rows == 4
    assert log.damaged
    assert log.problem is not None
    assert "checksum" in log.problem


def test_a_wrong_length_in_the_middle_is_damage_and_not_a_cut(whole: bytes, tmp_path: Path) -> None:
    data = bytearray(whole)
    data[SCHEMA_END + 6] ^= 0x10  # the length of the first batch's metadata, now beyond the end of the file
    path = tmp_path / "log"
    path.write_bytes(data)
    log = read_log(path)
    assert (log.table.num_rows, log.damaged, log.complete) == (0, True, False)
    assert log.problem is not None
    assert "ends inside" in log.problem


def test_checksum_is_that_of_another_implementation(whole: bytes) -> None:
    """Recomputed bit by bit from the polynomial, over the message with its digits zeroed."""
    with pa.ipc.open_stream(whole) as stream:
        wanted = stream.read_next_batch_with_custom_metadata().custom_metadata[b"crc32"]
    found = frame.read_frame(pa.py_buffer(whole), SCHEMA_END)
    assert found is not None
    crc = 0xFFFFFFFF
    for byte in whole[SCHEMA_END : found.end].replace(wanted, b"0x00000000"):
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0xEDB88320 if crc & 1 else 0)
    assert int(wanted, 16) == crc ^ 0xFFFFFFFF


def test_lost_and_repeated_batches_are_damage(tmp_path: Path, few: list[Record]) -> None:
    batches = [writer.to_batch(few[:2]), writer.to_batch(few[2:5]), writer.to_batch(few[5:])]
    for order, good in (((0, 2), 2), ((0, 1, 1, 2), 5), ((1, 2), 0)):
        log = read_log(raw_log(tmp_path / "log", run_schema({}), [batches[i] for i in order]))
        assert (log.table.num_rows, log.damaged, log.complete) == (good, True, False)
        assert log.problem is not None
        assert "seq" in log.problem


def test_bytes_after_the_end_are_reported(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(whole + b"more")
    log = read_log(path)
    assert log.complete
    assert log.damaged
    assert log.dropped_bytes == 4


def test_log_without_run_end_is_crashed(tmp_path: Path, few: list[Record]) -> None:
    writer.write_log(tmp_path / "log", few[:-1], SMALL)
    log = read_log(tmp_path / "log")
    assert (log.state, log.complete, log.problem) == ("crashed", False, None)


def test_run_directory_and_file_are_the_same(tmp_path: Path, few: list[Record]) -> None:
    path = tmp_path / "events.arrows"
    writer.write_log(path, few, log_metadata(SchedulerConfig(), {"seed": 3}))
    assert read_log(tmp_path).table == read_log(path).table
    assert read_log(tmp_path).run_config == {"seed": 3}
    assert read_log(tmp_path).scheduler_config["admission"] == "paced"


def test_what_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no events\.arrows"):
        read_log(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        read_log(tmp_path / "none")
    (tmp_path / "text").write_text("This is a text file, and no log of anything at all.")
    with pytest.raises(ValueError, match="not a readable event log"):
        read_log(tmp_path / "text")
    with (
        pa.OSFile(str(tmp_path / "other"), "wb") as file,
        pa.ipc.new_stream(file, pa.schema([("a", pa.int8())])) as out,
    ):
        out.write_batch(pa.record_batch({"a": pa.array([1], pa.int8())}))
    with pytest.raises(ValueError, match=r"no fsm\.schema_version"):
        read_log(tmp_path / "other")


def versioned(schema: pa.Schema, version: str) -> pa.Schema:
    values = {VERSION_KEY: version}
    return schema.with_metadata({**values, "fsm.schema_crc32": schema_crc(schema, values)})


def test_newer_major_schema_is_refused(tmp_path: Path) -> None:
    path = raw_log(tmp_path / "log", versioned(SCHEMA, "2.0"), [])
    with pytest.raises(ValueError, match=r"schema 2\.0, newer than 1\.1"):
        read_log(path)


def test_newer_minor_schema_keeps_its_columns(tmp_path: Path, few: list[Record]) -> None:
    schema = versioned(SCHEMA.insert(1, pa.field("extra", pa.int64())), "1.7")
    batch = writer.to_batch(few).add_column(1, pa.field("extra", pa.int64()), pa.array(np.arange(len(few))))
    log = read_log(raw_log(tmp_path / "log", schema, [batch]))
    assert log.table.column_names == [*Record._fields, "extra"]
    assert log.table["extra"].to_pylist() == list(range(len(few)))
    assert list(records(log.table)) == few


def test_older_minor_schema_reads_as_nulls(tmp_path: Path, few: list[Record]) -> None:
    schema = versioned(SCHEMA.remove(SCHEMA.get_field_index("message")), "1.0")
    batch = writer.to_batch(few).drop_columns(["message"])
    log = read_log(raw_log(tmp_path / "log", schema, [batch]))
    assert list(records(log.table)) == [row._replace(message=None) for row in few]


def test_column_of_a_wrong_type_is_refused(tmp_path: Path) -> None:
    schema = versioned(SCHEMA.set(1, pa.field("t_ns", pa.float64())), "1.0")
    with pytest.raises(ValueError, match="column t_ns"):
        read_log(raw_log(tmp_path / "log", schema, []))


def test_records_of_a_table_built_in_memory(few: list[Record]) -> None:
    table = pa.Table.from_batches([writer.to_batch(few)])
    assert list(records(table.slice(5))) == few[5:]
    assert next(records(table)).kind is RecordKind.INPUT
