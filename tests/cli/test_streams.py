"""Standard streams that are closed, or whose reader has gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
from fsm_trainer.cli.streams import guard_streams
guard_streams()
guard_streams()
{body}
"""
LOUD = """
for _ in range(3):
    print("x" * 100_000, file=sys.stderr, flush=True)
    print("y" * 100_000, flush=True)
    os.write(2, b"native code")
open("done", "x").close()
"""


def run(body: str, folder: Path, **kwargs: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", PROGRAM.format(body=body)]
    return subprocess.run(command, cwd=folder, timeout=60, check=False, **kwargs)  # type: ignore[call-overload,no-any-return]


def test_a_reader_that_has_gone_ends_nothing(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        assert run(LOUD, tmp_path, stdout=write, stderr=write).returncode == 0
    finally:
        os.close(write)
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("closing", [">&- 2>&-", "<&- >&- 2>&-", "2>&-"])
def test_closed_streams_are_not_given_to_other_files(closing: str, tmp_path: Path) -> None:
    body = "log = open('log', 'w')\n" + LOUD
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(body=body))
    command = ["sh", "-c", f'exec "$0" script.py {closing}', sys.executable]
    assert subprocess.run(command, cwd=tmp_path, timeout=60, stdout=subprocess.DEVNULL, check=False).returncode == 0
    assert (tmp_path / "done").exists()
    assert (tmp_path / "log").read_bytes() == b""


@pytest.mark.parametrize("body", ["sys.stderr.close()", "os.close(2); os.close(1)"])
def test_a_users_code_that_closes_them_ends_nothing(body: str, tmp_path: Path) -> None:
    ended = run(f"{body}\n{LOUD.replace('os.write(2, ', 'print(')}", tmp_path, capture_output=True)
    assert ended.returncode == 0
    assert (tmp_path / "done").exists()


def test_a_terminal_without_the_letters_gets_escapes(tmp_path: Path) -> None:
    ended = run(
        "print('caf\\xe9', file=sys.stderr)\nprint('\\u20ac')",
        tmp_path,
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii:strict"},
    )
    assert (ended.returncode, ended.stderr, ended.stdout) == (0, b"caf\\xe9\n", b"\\u20ac\n")
