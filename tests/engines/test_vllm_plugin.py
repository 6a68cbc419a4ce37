"""vLLM's processes end with the one that started them, where that is this package."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fsm_trainer.engines import vllm_plugin
from fsm_trainer.engines.vllm_plugin import MARK, children_bound

GONE_S = 30.0
SLOW = """
import multiprocessing, os

def ready():
    # Say so, and then whatever one is told.
    print(os.getpid(), flush=True)
    while told := os.read(0, 100):
        os.write(1, told)

def register_first():
    from fsm_trainer.engines.vllm_plugin import register
    register()
    ready()

if multiprocessing.current_process().name == "slow-to-import":
    ready()
"""
PARENT = """
import multiprocessing, sys, time
import slow
from fsm_trainer.engines.vllm_plugin import children_bound

def start(method, target, name):
    multiprocessing.get_context(method).Process(target=target, name=name).start()

if __name__ == "__main__":
    how = sys.argv[1]
    if how == "by itself":
        start("fork", slow.register_first, "forked")
    else:
        with children_bound():
            start("fork" if how == "forked" else "spawn", slow.ready, "forked" if how == "forked" else "slow-to-import")
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("how", ["by itself", "forked", "spawned"])
def test_a_marked_process_does_not_outlive_a_killed_parent(tmp_path: Path, how: str, marked: bool) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    mark = f"import os; os.environ[{MARK!r}] = str(os.getpid())\n" if marked else ""
    (tmp_path / "parent.py").write_text(mark + PARENT)
    env = {name: value for name, value in os.environ.items() if name != MARK}
    argv = [sys.executable, str(tmp_path / "parent.py"), how]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        if marked:
            assert not psutil.wait_procs([child], GONE_S)[1]
        else:
            parent.stdin.write("still here\n")
            parent.stdin.flush()
            assert parent.stdout.readline() == "still here\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_an_orphan_ends_at_once() -> None:
    script = "from fsm_trainer.engines.vllm_plugin import register; register(); print('here')"
    for owner, expected in ((os.getpid(), (0, "here\n")), (os.getppid(), (0, "here\n")), (1 << 22, (1, ""))):
        env = {**os.environ, MARK: str(owner)}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=False)
        assert (done.returncode, done.stdout) == expected


def test_the_main_module_is_as_before_afterwards() -> None:
    main = sys.modules["__main__"]
    before = main.__spec__
    with children_bound():
        assert main.__spec__ is vllm_plugin.__spec__
    assert main.__spec__ is before


def test_the_process_that_starts_vllm_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setenv(MARK, str(os.getpid()))
    monkeypatch.setattr(vllm_plugin.ctypes, "CDLL", asked.append)
    vllm_plugin.register()
    assert not asked
