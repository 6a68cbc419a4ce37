"""Ways to change an event log at random: its bytes, whole record batches, whole files. Used by attack_log.py."""

from __future__ import annotations

import random
from collections.abc import Callable

import pyarrow as pa

from fsm_trainer.eventlog.frame import END_OF_STREAM, read_frame


def edit_files(files: dict[str, bytes], rng: random.Random) -> str:
    """Change the files of a log in one way, at random; returns which."""
    how = rng.choice(sorted(EDITS))
    EDITS[how](files, rng)
    return how


def _flip(files: dict[str, bytes], rng: random.Random) -> None:
    name, data = _pick(files, rng)
    at = rng.randrange(len(data))
    files[name] = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _zero(files: dict[str, bytes], rng: random.Random) -> None:
    _overwrite(files, rng, bytes)


def _noise(files: dict[str, bytes], rng: random.Random) -> None:
    _overwrite(files, rng, rng.randbytes)


def _overwrite(files: dict[str, bytes], rng: random.Random, make: Callable[[int], bytes]) -> None:
    name, data = _pick(files, rng)
    at, length = rng.randrange(len(data)), rng.choice([1, 8, 64, 512, 4096, 20_000])
    files[name] = data[:at] + make(len(data[at : at + length])) + data[at + length :]


def _cut(files: dict[str, bytes], rng: random.Random) -> None:
    name, data = _pick(files, rng)
    files[name] = data[: rng.randrange(len(data))]


def _append(files: dict[str, bytes], rng: random.Random) -> None:
    name, data = _pick(files, rng)
    files[name] = data + rng.choice([b"\0", END_OF_STREAM, data[-500:], rng.randbytes(100)])


def _messages(data: bytes) -> tuple[list[bytes], bytes]:
    """The file's messages, each with its right checksum, and what follows them."""
    messages, at = [], 0
    while (frame := read_frame(pa.py_buffer(data), at)) is not None:
        messages.append(data[frame.start : frame.end])
        at = frame.end
    return messages, data[at:]


def _swap_batches(files: dict[str, bytes], rng: random.Random) -> None:
    def swapped(messages: list[bytes], one: int, two: int) -> list[bytes]:
        messages[one], messages[two] = messages[two], messages[one]
        return messages

    _rebuild(files, rng, swapped)


def _double_batch(files: dict[str, bytes], rng: random.Random) -> None:
    _rebuild(files, rng, lambda messages, one, two: [*messages[:two], messages[one], *messages[two:]])


def _drop_batch(files: dict[str, bytes], rng: random.Random) -> None:
    _rebuild(files, rng, lambda messages, one, two: [*messages[:one], *messages[one + 1 :]])


def _rebuild(files: dict[str, bytes], rng: random.Random, move: Callable[[list[bytes], int, int], list[bytes]]) -> None:
    name, data = _pick(files, rng)
    messages, rest = _messages(data)
    files[name] = b"".join(move(messages, *rng.sample(range(1, len(messages)), 2))) + rest


def _swap_files(files: dict[str, bytes], rng: random.Random) -> None:
    one, two = rng.sample(sorted(files), 2)
    files[one], files[two] = files[two], files[one]


def _double_file(files: dict[str, bytes], rng: random.Random) -> None:
    one, two = rng.sample(sorted(files), 2)
    files[one] = files[two]


def _drop_file(files: dict[str, bytes], rng: random.Random) -> None:
    del files[rng.choice(sorted(files))]


def _pick(files: dict[str, bytes], rng: random.Random) -> tuple[str, bytes]:
    name = rng.choice(sorted(files))
    return name, files[name]


EDITS: dict[str, Callable[[dict[str, bytes], random.Random], None]] = {
    "flip": _flip,
    "zero": _zero,
    "noise": _noise,
    "cut": _cut,
    "append": _append,
    "swap batches": _swap_batches,
    "double batch": _double_batch,
    "drop batch": _drop_batch,
    "swap files": _swap_files,
    "double file": _double_file,
    "drop file": _drop_file,
}
"""The ways by name."""
