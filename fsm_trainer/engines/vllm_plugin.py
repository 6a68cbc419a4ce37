"""Makes vLLM's own processes end with the process of this package that started them, however that one ends.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). Left alone, they outlive a killed
parent, and keep its memory. Elsewhere, where vLLM serves somebody else, this does nothing.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

MARK = "FSM_TRAINER_VLLM"
"""Environment variable by which vLLM's processes know that they are ours: the id of the process that starts them."""
_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Ask the kernel to kill this process when its parent is gone."""
    owner, parent = os.environ.get(MARK), multiprocessing.parent_process()
    if owner in (None, str(os.getpid())) or parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent.pid:
        os._exit(1)
