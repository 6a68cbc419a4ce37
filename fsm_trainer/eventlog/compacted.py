"""A whole log as one compressed file: Arrow (IPC file, dictionaries, zstd) or Parquet (zstd).

Neither format has a checksum of the whole, so the file carries one in its metadata, and the reader checks it before
Arrow interprets a byte. This module writes and reads such a file; when to is `eventlog.compact`'s affair.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from fsm_trainer.eventlog.frame import FrameError
from fsm_trainer.eventlog.stream import check_columns, check_version

FILE_CRC_KEY = "fsm.file_crc32"
_BLANK = b"crc32-of-this-file:0x00000000"
_CRC = re.compile(rb"crc32-of-this-file:0x[0-9a-f]{8}")
"""The checksum as the file holds it, once or more; it is that of the file with these digits all zero."""
_MAGIC = {b"ARROW1": "arrow", b"PAR1": "parquet"}
_ROWS = 1 << 16
"""Rows of a record batch."""


def is_compacted(path: Path) -> bool:
    """Whether the file is a compacted log, by how it begins. ValueError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return _format_of(file.read(8)) is not None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def encode(table: pa.Table, metadata: dict[str, str], form: str) -> bytes:
    """The file's bytes; `form` is arrow or parquet."""
    table = table.replace_schema_metadata({**metadata, FILE_CRC_KEY: _BLANK.decode()})
    sink = pa.BufferOutputStream()
    (_write_arrow if form == "arrow" else _write_parquet)(table, sink)
    data = bytearray(sink.getvalue())
    digits = b"%08x" % zlib.crc32(data)
    for match in list(_CRC.finditer(data)):
        data[match.end() - len(digits) : match.end()] = digits
    return bytes(data)


def read(path: Path, columns: Sequence[str] | None = None) -> tuple[pa.Table, dict[str, str]]:
    """The rows, in plain columns, and the metadata of the log. ValueError if a byte of the file has changed."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    _check(data, path)
    table = (_read_arrow if _format_of(data) == "arrow" else _read_parquet)(data, columns)
    metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    del metadata[FILE_CRC_KEY]
    try:
        check_version(metadata, path)
    except FrameError as error:
        raise ValueError(f"{path} is not a compacted event log: {error}") from error
    if columns is None:
        check_columns(table.schema, path)
    return table.replace_schema_metadata(None), metadata


def _format_of(head: bytes) -> str | None:
    return next((form for magic, form in _MAGIC.items() if head.startswith(magic)), None)


def _check(data: bytes, path: Path) -> None:
    """Raise ValueError unless the file's bytes are those that were written."""
    matches = list(_CRC.finditer(data))
    if not matches:
        raise ValueError(f"{path} is not a compacted event log, or is damaged: it carries no checksum")
    crc, at = 0, 0
    for match in matches:
        crc = zlib.crc32(_BLANK, zlib.crc32(memoryview(data)[at : match.start()], crc))
        at = match.end()
    crc = zlib.crc32(memoryview(data)[at:], crc)
    if any(match.group()[-8:] != b"%08x" % crc for match in matches):
        raise ValueError(f"{path} is damaged: its checksum does not match its bytes; restore it from a copy")


def _write_arrow(table: pa.Table, sink: pa.NativeFile) -> None:
    """Texts as dictionaries, one a column for the whole file: they are few, but of messages and digests."""
    for number, field in enumerate(table.schema):
        if field.type == pa.utf8():
            encoded = table.column(number).combine_chunks().dictionary_encode()
            table = table.set_column(number, pa.field(field.name, encoded.type, field.nullable), encoded)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table.combine_chunks(), max_chunksize=_ROWS)


def _read_arrow(data: bytes, columns: Sequence[str] | None) -> pa.Table:
    with pa.ipc.open_file(pa.py_buffer(data)) as file:
        schema = file.schema
        wanted = [field for field in schema if columns is None or field.name in columns]
        tables = [_plain(file.get_batch(number), wanted) for number in range(file.num_record_batches)]
    plain = [pa.field(f.name, _plain_type(f.type), f.nullable) for f in wanted]
    return pa.concat_tables([pa.schema(plain).empty_table(), *tables]).replace_schema_metadata(schema.metadata)


def _plain(batch: pa.RecordBatch, wanted: list[pa.Field]) -> pa.Table:
    arrays = [batch.column(field.name).cast(_plain_type(field.type)) for field in wanted]
    fields = [pa.field(field.name, array.type, field.nullable) for field, array in zip(wanted, arrays, strict=True)]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _write_parquet(table: pa.Table, sink: pa.NativeFile) -> None:
    from pyarrow import parquet

    parquet.write_table(table, sink, compression="zstd", row_group_size=_ROWS)


def _read_parquet(data: bytes, columns: Sequence[str] | None) -> pa.Table:
    from pyarrow import parquet

    return parquet.read_table(pa.py_buffer(data), columns=None if columns is None else list(columns))
