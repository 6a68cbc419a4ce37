"""A vLLM server in a process of its own, and the processes of a run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import psutil

from tools.rollout_servers import vllm_serve

GONE_S = 30.0
"""Within which processes must be gone; usually they are at once."""


def vllm_server(ckpt: Path, log: Path, max_model_len: int) -> AbstractContextManager[tuple[str, int]]:
    """Its address and process; it may not be up yet. Blocks are the smallest, so that short prompts are cached too."""
    return vllm_serve(str(ckpt), max_model_len, log, "--block-size", "32")


def vllm_processes(pid: int | None = None) -> list[psutil.Process]:
    """vLLM's own processes below a process (None: this one)."""
    return [p for p in psutil.Process(pid).children(recursive=True) if _is_vllms(p)]


def _is_vllms(process: psutil.Process) -> bool:
    try:
        return any("VLLM::" in part for part in process.cmdline())
    except psutil.NoSuchProcess:  # it has just ended
        return False


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        process.kill()


def left_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that are still there, a while after they should not be."""
    return psutil.wait_procs(processes, GONE_S)[1]
