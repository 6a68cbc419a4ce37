"""What inline and process hosts have in common, and what a process adds. Engines here are objects of the standard
library, because a child process must be able to import them."""

import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import fsm_trainer
from fsm_trainer.runtime.calls import overlaps
from fsm_trainer.runtime.host import EngineDied, EngineError, EngineHost, HostClosed, InlineHost, ProcessHost

HostType = Callable[..., Any]
LIMIT_S = 60.0
"""So that a broken host fails a test instead of hanging it; nothing is measured."""


@pytest.fixture(params=[InlineHost, ProcessHost])
def host_type(request: pytest.FixtureRequest) -> HostType:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Make hosts that are killed at the end."""
    hosts: list[Any] = []

    def make(kind: HostType, factory: Callable[[], object], name: str = "engine-0") -> Any:
        hosts.append(kind(factory, name))
        return hosts[-1]

    yield make
    for host in hosts:
        host.kill()


def test_calls_are_done_in_order(host_type: HostType, start: Callable[..., Any]) -> None:
    host: EngineHost = start(host_type, deque)
    for item in range(50):
        host.submit("append", item)
    assert [host.submit("popleft").result(LIMIT_S) for _ in range(50)] == list(range(50))
    host.close(LIMIT_S)


def test_arguments_and_results_pass(host_type: HostType, start: Callable[..., Any]) -> None:
    host = start(host_type, dict)
    value = {"tokens": (1, 2), "bytes": b"\0" * 3_000_000}
    host.submit("__setitem__", "key", value)
    assert host.submit("get", "key").result(LIMIT_S) == value


def test_an_urgent_call_passes_a_long_one(host_type: HostType, start: Callable[..., Any]) -> None:
    host = start(host_type, threading.Event)
    long = host.submit("wait")
    after = host.submit("is_set")
    assert host.submit_urgent("is_set").result(LIMIT_S) is False
    assert not long.done()
    host.submit_urgent("set").result(LIMIT_S)
    assert long.result(LIMIT_S) is True
    assert after.result(LIMIT_S) is True


def test_an_exception_crosses_as_text(host_type: HostType, start: Callable[..., Any]) -> None:
    host = start(host_type, partial(SimpleNamespace, parse=int))
    with pytest.raises(EngineError) as caught:
        host.submit("parse", "seven").result(LIMIT_S)
    assert caught.value.type == "ValueError"
    assert caught.value.message == "invalid literal for int() with base 10: 'seven'"
    assert "ValueError: invalid literal" in caught.value.traceback
    assert host.submit("parse", "7").result(LIMIT_S) == 7, "a failed call leaves the host as it was"


@pytest.mark.parametrize("method", ["no_such_method", "leave"])
def test_even_what_would_end_a_process_is_a_failed_call(
    host_type: HostType, start: Callable[..., Any], method: str
) -> None:
    host = start(host_type, partial(SimpleNamespace, leave=sys.exit, pid=os.getpid))
    with pytest.raises(EngineError) as caught:
        host.submit(method).result(LIMIT_S)
    assert caught.value.type in ("AttributeError", "SystemExit")
    assert host.submit("pid").result(LIMIT_S) > 0
    assert host.alive


def test_a_factory_that_raises_fails_every_call(host_type: HostType, start: Callable[..., Any]) -> None:
    host = start(host_type, partial(int, "no number"))
    for submit in (host.submit, host.submit_urgent, host.submit):
        with pytest.raises(EngineError, match="no number"):
            submit("bit_length").result(LIMIT_S)
    host.close(LIMIT_S)


def test_close_does_what_was_submitted_and_closes_the_engine(
    host_type: HostType, start: Callable[..., Any], tmp_path: Path
) -> None:
    steps = partial(SimpleNamespace, make=os.mkdir, close=partial(os.rename, tmp_path / "made", tmp_path / "closed"))
    host = start(host_type, steps)
    made = host.submit("make", tmp_path / "made")
    assert host.alive
    host.close(LIMIT_S)
    assert made.result(0) is None
    assert [path.name for path in tmp_path.iterdir()] == ["closed"]
    assert not host.alive
    host.close(LIMIT_S)  # again: nothing happens
    host.kill()


def test_close_tells_what_the_engines_close_raised(host_type: HostType, start: Callable[..., Any]) -> None:
    host = start(host_type, partial(SimpleNamespace, close=partial(int, "no number")))
    with pytest.raises(EngineError, match="no number"):
        host.close(LIMIT_S)
    assert not host.alive


@pytest.mark.parametrize("how", ["close", "kill"])
def test_after_the_end_a_call_fails(host_type: HostType, start: Callable[..., Any], how: str) -> None:
    host = start(host_type, deque)
    host.submit("clear").result(LIMIT_S)
    if how == "close":
        host.close(LIMIT_S)
    else:
        host.kill()
    for submit in (host.submit, host.submit_urgent):
        with pytest.raises(HostClosed, match="engine-0"):
            submit("clear").result(LIMIT_S)


def test_kill_fails_what_is_pending(host_type: HostType, start: Callable[..., Any]) -> None:
    release = threading.Event()
    # The process gets an event of its own, which nobody sets.
    host = start(host_type, (lambda: release) if host_type is InlineHost else threading.Event)
    pending = [host.submit("wait"), host.submit("clear")]
    host.submit_urgent("is_set").result(LIMIT_S)
    host.kill()
    for future in pending:
        assert isinstance(future.exception(LIMIT_S), HostClosed)
    release.set()


def test_a_hung_engine_does_not_hold_up_the_close(host_type: HostType, start: Callable[..., Any]) -> None:
    release = threading.Event()
    host = start(host_type, (lambda: release) if host_type is InlineHost else threading.Event)
    future = host.submit("wait")
    host.submit_urgent("is_set").result(LIMIT_S)
    host.close(0.01)
    assert isinstance(future.exception(LIMIT_S), HostClosed)
    assert not host.alive
    release.set()


CONCURRENT = partial(SimpleNamespace, concurrent=True, run=exec, start=exec)
"""An engine whose calls may overlap; each is a piece of code, which finds the others' doings in a module."""
MEET = "import threading, uuid; vars(uuid).setdefault('barrier', threading.Barrier(3)).wait(60)"


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    yield
    vars(uuid).pop("barrier", None)
    vars(uuid).pop("order", None)


def test_calls_of_a_concurrent_engine_overlap(host_type: HostType, start: Callable[..., Any]) -> None:
    host = start(host_type, CONCURRENT)
    futures = [host.submit("run", MEET) for _ in range(3)]
    assert [future.result(LIMIT_S) for future in futures] == [None] * 3
    host.close(LIMIT_S)


def test_nothing_overlaps_the_start(host_type: HostType, start: Callable[..., Any], tmp_path: Path) -> None:
    host = start(host_type, CONCURRENT)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    host.submit("start", f"open({str(gate)!r}).read(); import uuid; uuid.order = ['start']")
    after = host.submit("run", "import uuid; uuid.order.append('run')")
    host.submit_urgent("run", "pass").result(LIMIT_S)
    assert not after.done()
    gate.write_text("go")
    assert after.result(LIMIT_S) is None, "and found what the start had left"
    host.close(LIMIT_S)


def test_close_awaits_the_calls_of_a_concurrent_engine(
    host_type: HostType, start: Callable[..., Any], tmp_path: Path
) -> None:
    host = start(host_type, partial(CONCURRENT, close=partial(os.rename, tmp_path / "1", tmp_path / "closed")))
    for name in "01":
        # Longer than a close would take that waited for nothing; one that waits may take its time.
        host.submit("run", f"import os, time; time.sleep(0.3); os.mkdir({str(tmp_path / name)!r})")
    host.close(LIMIT_S)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "closed"]


def test_a_concurrent_engine_uses_its_threads_again(host_type: HostType, start: Callable[..., Any]) -> None:
    host = start(host_type, partial(SimpleNamespace, concurrent=True, thread=threading.get_ident, sum=sum))
    threads = {host.submit("thread").result(LIMIT_S) for _ in range(50) if host.submit("sum", ()).result(LIMIT_S) == 0}
    assert len(threads) < 25
    host.close(LIMIT_S)


def test_a_killed_concurrent_engine_fails_all_its_calls(host_type: HostType, start: Callable[..., Any]) -> None:
    here = threading.Barrier(3)
    vars(uuid)["barrier"] = here  # for the inline engine; nobody makes it full, here or there
    host = start(host_type, CONCURRENT)
    pending = [host.submit("run", MEET), host.submit("run", MEET)]
    host.kill()
    assert [type(future.exception(LIMIT_S)) for future in pending] == [HostClosed, HostClosed]
    here.abort()


@pytest.mark.parametrize("concurrent", [True, False])
def test_a_killed_inline_engine_is_closed_beside_what_hangs_in_it_if_it_is_concurrent(
    start: Callable[..., Any], concurrent: bool
) -> None:
    release = threading.Event()
    engine = SimpleNamespace(concurrent=concurrent, hang=release.wait, close=release.set, made=id)
    host = start(InlineHost, lambda: engine)
    host.submit("hang")
    host.submit_urgent("made", None).result(LIMIT_S)
    host.kill()
    assert not release.is_set(), "a kill waits for nothing"
    host.close(LIMIT_S)
    assert release.is_set() == concurrent
    release.clear()
    host.close(LIMIT_S)
    assert not release.is_set(), "it is closed once"
    release.set()


def test_what_the_close_of_a_killed_inline_engine_raises_is_told(start: Callable[..., Any]) -> None:
    host = start(InlineHost, partial(CONCURRENT, close=partial(int, "no number")))
    host.submit("run", "pass").result(LIMIT_S)
    host.kill()
    with pytest.raises(EngineError, match="no number"):
        host.close(LIMIT_S)


def test_a_factory_that_raises_fails_every_call_of_a_concurrent_engine_too() -> None:
    failed: Future[object] = Future()
    failed.set_exception(ValueError("no"))
    assert not overlaps(failed, "generate")


@pytest.mark.parametrize("ignores", ["", "trap '' TERM;"], ids=["ends when asked", "is killed"])
def test_what_a_killed_engine_had_started_ends_with_it(
    start: Callable[..., Any], ignores: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsm_trainer.runtime.process_host._ORPHANS_GRACE_S", 0.3)
    host = start(ProcessHost, partial(SimpleNamespace, run=subprocess.Popen, pid=os.getpid))
    # Its answer cannot cross, but it has begun; the shell that starts it would not be worth a word.
    host.submit("run", ["sh", "-c", f"{ignores} while :; do sleep 60 & wait; done"]).exception(LIMIT_S)
    children = psutil.Process(host.pid).children(recursive=True)
    assert children
    host.kill()
    gone, alive = psutil.wait_procs(children, timeout=LIMIT_S)
    assert not alive


def test_an_inline_engine_that_is_killed_while_it_is_closed_has_ended(start: Callable[..., Any]) -> None:
    release = threading.Event()
    host = start(InlineHost, lambda: release)
    host.submit("wait")
    ended: Future[None] = Future()

    def close() -> None:
        try:
            ended.set_result(host.close(LIMIT_S))
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=close, daemon=True).start()
    while host.alive:
        pass
    host.kill()
    release.set()
    assert ended.result(LIMIT_S) is None


def test_an_inline_engine_lives_here_on_a_thread_of_its_own(start: Callable[..., Any]) -> None:
    host = start(InlineHost, partial(SimpleNamespace, pid=os.getpid, thread=threading.get_ident))
    assert host.pid is None
    assert host.submit("pid").result(LIMIT_S) == os.getpid()
    threads = {submit("thread").result(LIMIT_S) for submit in (host.submit, host.submit, host.submit_urgent)}
    assert len(threads) == 2
    assert threading.get_ident() not in threads


def test_a_process_engine_lives_in_a_process_of_its_own(start: Callable[..., Any]) -> None:
    host = start(ProcessHost, partial(SimpleNamespace, pid=os.getpid, main=threading.current_thread))
    assert host.submit("pid").result(LIMIT_S) == host.pid != os.getpid()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_process_fails_every_pending_call_and_tells(number: signal.Signals, start: Callable[..., Any]) -> None:
    host = start(ProcessHost, threading.Event, "rollout-0")
    host.submit("is_set").result(LIMIT_S)
    deaths: list[EngineDied] = []
    pending = [host.submit("wait"), host.submit("clear")]
    told_before: list[bool] = []
    host.on_death(lambda death: told_before.append(any(future.done() for future in pending)))
    host.on_death(deaths.append)
    os.kill(host.pid, number)
    for future in pending:
        error = future.exception(LIMIT_S)
        assert isinstance(error, EngineDied)
        assert (error.pid, error.exit_code) == (host.pid, -number)
        assert str(error) == f"engine process rollout-0 (pid {host.pid}) was killed by {number.name}"
    assert told_before == [False]
    assert deaths == [error]
    assert not host.alive
    with pytest.raises(EngineDied):
        host.submit("clear").result(LIMIT_S)
    host.on_death(deaths.append)
    assert deaths == [error, error], "who asks late is told at once"


def test_a_process_that_exits_tells_its_code(start: Callable[..., Any]) -> None:
    host = start(ProcessHost, partial(SimpleNamespace, leave=os._exit))
    error = host.submit("leave", 13).exception(LIMIT_S)
    assert isinstance(error, EngineDied)
    assert str(error).endswith("exited with code 13")


def test_answers_given_before_the_death_are_kept(start: Callable[..., Any]) -> None:
    host = start(ProcessHost, partial(SimpleNamespace, make=bytes, leave=os._exit))
    futures = [host.submit("make", 200_000) for _ in range(20)]
    host.submit("leave", 1).exception(LIMIT_S)
    assert [len(future.result(0)) for future in futures] == [200_000] * 20


def test_a_kill_that_was_asked_for_is_no_death(start: Callable[..., Any]) -> None:
    host = start(ProcessHost, threading.Event)
    deaths: list[EngineDied] = []
    host.on_death(deaths.append)
    host.kill()
    assert deaths == []


def test_a_death_during_the_close_is_told(start: Callable[..., Any]) -> None:
    host = start(ProcessHost, partial(SimpleNamespace, close=partial(os._exit, 5)))
    with pytest.raises(EngineDied, match="exited with code 5"):
        host.close(LIMIT_S)


def test_a_callback_may_end_the_host(start: Callable[..., Any]) -> None:
    host = start(ProcessHost, partial(SimpleNamespace, leave=os._exit))
    host.on_death(lambda _: (host.close(LIMIT_S), host.kill()))
    assert host.submit("leave", 1).exception(LIMIT_S) is not None


def test_what_cannot_be_pickled_is_refused_or_fails_its_call(start: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="cannot be pickled"):
        ProcessHost(lambda: None)
    host = start(ProcessHost, partial(SimpleNamespace, lock=threading.Lock, echo=str))
    assert "pickle" in str(host.submit("lock").exception(LIMIT_S))
    assert "pickle" in str(host.submit("echo", threading.Lock()).exception(LIMIT_S))
    assert host.submit("echo", 7).result(LIMIT_S) == "7"


SCRIPT = """
import os, signal, sys
from functools import partial
from types import SimpleNamespace
from fsm_trainer.runtime.host import ProcessHost
host = ProcessHost(partial(SimpleNamespace, run=exec, pid=os.getpid), "engine-0")
print(host.submit("pid").result(), flush=True)
"""


def script(tmp_path: Path, rest: str) -> "subprocess.Popen[str]":
    """Run a script without a main guard; its stdout ends when it and every child of it are gone."""
    path = tmp_path / "unguarded.py"
    path.write_text(SCRIPT + rest)
    root = Path(fsm_trainer.__path__[0]).parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, str(path)], env=environment, start_new_session=True, **pipes)  # type: ignore[call-overload,no-any-return]


def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    process = script(tmp_path, "host.close(60)\nprint('closed', flush=True)")
    out, _ = process.communicate(timeout=LIMIT_S)
    assert re.fullmatch(r"\d+\nclosed\n", out), out
    assert process.returncode == 0


# For ever, and no other thread of the child gets to run meanwhile.
SPIN = "import re; print('ready', flush=True); re.match('(a+)+$', 'a' * 64 + 'b')"


@pytest.mark.parametrize("work", ["print('ready', flush=True)", SPIN], ids=["idle", "busy"])
def test_the_engine_dies_with_a_killed_controller(tmp_path: Path, work: str) -> None:
    process = script(tmp_path, f"host.submit('run', {work!r})\nsys.stdin.read()")
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert process.stdout.readline() == "ready\n"
    assert psutil.Process(pid).ppid() == process.pid
    process.kill()
    out, _ = process.communicate(timeout=LIMIT_S)  # the engine holds the pipe too, so this is its end as well
    assert out == ""


def test_a_controller_that_just_ends_takes_the_engine_with_it(tmp_path: Path) -> None:
    process = script(tmp_path, f"host.submit('run', {SPIN!r})\nsys.exit(4)")
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 4


def test_a_terminals_signals_are_left_to_the_controller(tmp_path: Path) -> None:
    rest = """
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: None)
    os.kill(host.pid, number)  # were it in the controller's group, a terminal would do this
print('ready', flush=True)
sys.stdin.readline()
print(host.submit('pid').result() == host.pid, os.getpgid(host.pid) != os.getpgid(0), flush=True)
host.close(60)
"""
    process = script(tmp_path, rest)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.readline()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.killpg(process.pid, number)
    out, _ = process.communicate("go\n", timeout=LIMIT_S)
    assert (out, process.returncode) == ("True True\n", 0)
