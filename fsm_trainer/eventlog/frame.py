"""One record batch as one Arrow IPC message that carries its own checksum, and back.

Arrow has none: flipped and zeroed bytes read back silently. The CRC covers every byte of the message, prefix,
metadata and padding included, and is checked before any Arrow code interprets them. This module knows neither files
nor what the columns mean.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import NamedTuple

import pyarrow as pa

END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""Ends an Arrow stream."""

_PREFIX = struct.Struct("<II")
_CONTINUATION = 0xFFFFFFFF
_ZERO_CRC = b"0x00000000"
# Nothing else in a batch's metadata is text of this form: the other values are decimal, the rest binary integers
# far below 2**40, which always hold zero bytes.
_CRC = re.compile(rb"0x[0-9a-f]{8}")


class FrameError(Exception):
    """The bytes at hand are not a whole, good message. `torn`: they only end too early."""

    def __init__(self, problem: str, *, torn: bool = False) -> None:
        """Keep what is wrong."""
        super().__init__(problem)
        self.torn = torn


class Frame(NamedTuple):
    """One message found in a buffer."""

    message: pa.ipc.Message
    start: int
    end: int


def encode_batch(batch: pa.RecordBatch, first_seq: int, **more: str) -> bytes:
    """The message of a record batch, with `first_seq`, `rows`, `crc32` and what is given `more` in its metadata."""
    sink = pa.BufferOutputStream()
    metadata = {"first_seq": str(first_seq), "rows": str(batch.num_rows), "crc32": _ZERO_CRC.decode(), **more}
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch, custom_metadata=metadata)
    stream = memoryview(sink.getvalue())
    # The schema's message stands first; it has no body, so its prefix says where it ends.
    schema_end = _PREFIX.size + _PREFIX.unpack_from(stream)[1]
    data = bytearray(stream[schema_end : -len(END_OF_STREAM)])
    at = data.index(_ZERO_CRC)
    data[at : at + len(_ZERO_CRC)] = b"0x%08x" % zlib.crc32(data)
    return bytes(data)


def read_frame(buffer: pa.Buffer, start: int) -> Frame | None:
    """The message that begins at `start`; None at the end of the buffer or of the stream."""
    left = buffer.size - start
    if left == 0:
        return None
    head = bytes(memoryview(buffer)[start : start + _PREFIX.size])
    if len(head) < _PREFIX.size:
        raise FrameError("it ends inside a message's prefix", torn=True)
    if head == END_OF_STREAM:
        return None
    continuation, size = _PREFIX.unpack(head)
    if continuation != _CONTINUATION:
        raise FrameError("no message begins there")
    if size > left - _PREFIX.size:
        raise FrameError("it ends inside a message's metadata", torn=True)
    source = pa.BufferReader(buffer.slice(start))
    try:
        message = pa.ipc.read_message(source)
    except EOFError as error:
        raise FrameError("a message has no metadata") from error
    except (OSError, pa.ArrowInvalid) as error:
        # Arrow verified the metadata before it looked for the body, so a lacking body is a cut.
        torn = "message body" in str(error)
        raise FrameError("it ends inside a message's body" if torn else "a message is invalid", torn=torn) from error
    return Frame(message, start, start + source.tell())


def good_frame_follows(buffer: pa.Buffer, start: int) -> bool:
    """Whether a whole, good message lies anywhere after `start`: then what is wrong at `start` is no cut."""
    data = buffer.to_pybytes()
    mark = END_OF_STREAM[:4]
    at = data.find(mark, start + 1)
    while at >= 0:
        try:
            frame = read_frame(buffer, at)
            if frame is not None:
                check_frame(buffer, frame)
                return True
        except FrameError:
            pass
        at = data.find(mark, at + 1)
    return False


def check_frame(buffer: pa.Buffer, frame: Frame) -> None:
    """Raise FrameError unless the message's bytes are those that were written."""
    data = memoryview(buffer)[frame.start : frame.end]
    metadata = metadata_of(buffer, frame)
    found = list(_CRC.finditer(metadata))
    if len(found) != 1:
        raise FrameError("a record batch carries no checksum")
    start, end = found[0].span()
    crc = zlib.crc32(data[end:], zlib.crc32(_ZERO_CRC, zlib.crc32(data[:start])))
    if b"0x%08x" % crc != found[0].group():
        raise FrameError("a record batch's checksum does not match its bytes")


def metadata_of(buffer: pa.Buffer, frame: Frame) -> bytes:
    """A message's bytes before its body: prefix, and metadata with the custom one as plain text in it."""
    data = memoryview(buffer)[frame.start : frame.end]
    return bytes(data[: _PREFIX.size + _PREFIX.unpack_from(data)[1]])
