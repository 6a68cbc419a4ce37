"""vLLM's processes end with the one that started them, where that is this package."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from fsm_trainer.engines import vllm_plugin
from fsm_trainer.engines.vllm_plugin import MARK

GONE_S = 30.0
PARENT = """
import multiprocessing, os, time
from fsm_trainer.engines.vllm_plugin import register

def child(said):
    register()
    said.send(os.getpid())
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    context.Process(target=child, args=(theirs,)).start()
    print(ours.recv(), flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@pytest.mark.parametrize("marked", [True, False])
def test_a_marked_process_does_not_outlive_a_killed_parent(marked: bool) -> None:
    env = {name: value for name, value in os.environ.items() if name != MARK} | ({MARK: "1"} if marked else {})
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=env, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        if marked:
            assert not psutil.wait_procs([child], GONE_S)[1]
        else:
            assert child.is_running()
            child.kill()


def test_the_process_that_starts_vllm_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setenv(MARK, "1")
    monkeypatch.setattr(vllm_plugin.ctypes, "CDLL", asked.append)
    vllm_plugin.register()
    assert not asked


def test_that_holds_where_it_is_a_child_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setenv(MARK, str(os.getpid()))
    monkeypatch.setattr(vllm_plugin.multiprocessing, "parent_process", lambda: psutil.Process(os.getppid()))
    monkeypatch.setattr(vllm_plugin.ctypes, "CDLL", asked.append)
    vllm_plugin.register()
    assert not asked
