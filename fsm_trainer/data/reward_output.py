"""What reward functions print: the beginning is kept in a file, the rest is read and thrown away.

Never on our own standard output, which programs read, and never so much that it fills a disk.
"""

from __future__ import annotations

import os
import subprocess
import threading
from multiprocessing.connection import wait
from pathlib import Path

MOST_BYTES = 1 << 20
_LAST_READS = 64
_END_NOTE = b"\n[what was printed after this is not kept]\n"


class Output:
    """A pipe to give to child processes and a thread that empties it; without a path, the null device."""

    def __init__(self, path: Path | None) -> None:
        """Nothing is written before something is printed."""
        self.fd = subprocess.DEVNULL
        self._path = path
        self._thread: threading.Thread | None = None
        if path is not None:
            self._reading, self.fd = os.pipe()
            self._woken, self._wake = os.pipe()
            self._thread = threading.Thread(target=self._drain, name="fsm-reward-output", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Keep what has been printed so far and end the thread."""
        if self._thread is None:
            return
        os.write(self._wake, b"x")
        self._thread.join()
        self._thread = None
        for fd in (self.fd, self._reading, self._woken, self._wake):
            os.close(fd)

    def _drain(self) -> None:
        assert self._path is not None
        kept = 0
        os.set_blocking(self._reading, False)
        rounds = _LAST_READS
        while rounds > 0:
            ending = self._woken in wait([self._reading, self._woken])
            data = self._read()
            if data and kept <= MOST_BYTES:
                with self._path.open("ab") as file:
                    file.write(data[: MOST_BYTES - kept] + (_END_NOTE if kept + len(data) > MOST_BYTES else b""))
                kept += len(data)
            # At the end what is left, but not for ever: something that got away may still be printing.
            rounds = rounds if not ending else rounds - 1 if data else 0

    def _read(self) -> bytes:
        try:
            return os.read(self._reading, 1 << 16)
        except BlockingIOError:
            return b""
