"""A vLLM server in a process of its own, started as users start one, and the processes of a run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from fsm_trainer.runtime.child import die_with

GONE_S = 30.0
"""Within which processes must be gone; usually they are at once."""


@contextmanager
def vllm_server(ckpt: Path, log: Path, max_model_len: int) -> Iterator[tuple[str, int]]:
    """Its address and process; it may not be up yet, which engines wait for."""
    reserved = socket.socket()
    # Kept bound, so that nobody else is given the port before the server, which may listen on it all the same.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    port = reserved.getsockname()[1]
    argv = [
        sys.executable,
        "-m",
        "fsm_trainer.engines.vllm_serve",
        str(ckpt),
        "--port",
        str(port),
        "--dtype",
        "float32",
    ]
    argv += ["--max-model-len", str(max_model_len), "--block-size", "32"]
    with log.open("wb") as said:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid()),
        )
    try:
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        end_group(process)
        reserved.close()


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it has started in its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
