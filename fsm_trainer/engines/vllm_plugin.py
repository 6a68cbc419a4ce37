"""Makes vLLM's own processes end with the process of this package that started them, however that one ends.

Left alone, they outlive a killed parent, and keep its memory. They ask the kernel for it as their very first act where
they are started inside `children_bound`. Else vLLM calls `register` in each of them (entry point
`vllm.general_plugins`), which is many seconds later, and for a model's process only once its parent has answered it.
Elsewhere, where vLLM serves somebody else, this does nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

MARK = "FSM_TRAINER_VLLM"
"""Environment variable by which vLLM's processes know that they are ours: the id of the process that starts them."""
_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Ask the kernel to kill this process when its parent is gone."""
    owner = os.environ.get(MARK)
    if owner in (None, str(os.getpid())) or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if owner not in map(str, _ancestors()):
        os._exit(1)


@contextmanager
def children_bound() -> Iterator[None]:
    """Let the processes that are started inside `register` first of all; `MARK` must be in the environment.

    A forked one does so as it is forked. A spawned one begins with its parent's main module: inside, that is this one.
    """
    _register_at_fork()
    main = sys.modules["__main__"]
    before, main.__spec__ = main.__spec__, __spec__
    try:
        yield
    finally:
        main.__spec__ = before


@cache
def _register_at_fork() -> None:
    os.register_at_fork(after_in_child=_register_child)


def _register_child() -> None:
    # Not what vLLM's processes fork themselves: the kernel would end that with the thread that does, not the process.
    if os.environ.get(MARK) == str(os.getppid()):
        register()


def _ancestors() -> Iterator[int]:
    """The parent's process id, its parent's, and so on; an orphan's are those of whoever took it in."""
    pid = os.getppid()
    while pid:
        yield pid
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:  # gone just now
            return
        pid = int(stat.rpartition(b")")[2].split()[1])


if __name__ == "__mp_main__":
    register()
