"""A vLLM server in a process of its own, started as users start one: for tools/bench_rollout.py and tests/vllm."""

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

from fsm_trainer.runtime.child import die_with

_END_S = 20.0
"""How long a server may take to end by itself."""


@contextmanager
def vllm_serve(
    ckpt: str, max_model_len: int, log: Path, *options: str, **environment: str
) -> Iterator[tuple[str, int]]:
    """Its address and process; it may not be up yet, which engines wait for. It never outlives this process."""
    with socket.socket() as reserved:
        # Kept bound, so that nobody else is given the port before the server, which may listen on it all the same.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        command = [sys.executable, "-m", "fsm_trainer.engines.vllm_serve", ckpt, "--port", str(port)]
        command += ["--max-model-len", str(max_model_len), "--dtype", "float32", *options]
        with log.open("wb") as said:
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
                preexec_fn=partial(die_with, os.getpid()),
            )
        try:
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()  # a killed one would leave its shared memory
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            end_group(process)


def end_group(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """Kill a process and all that it has started in its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
