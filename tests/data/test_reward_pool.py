"""Reward functions in processes: ten that do their worst, and libraries that only work in a main thread."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsm_trainer.data.reward_batch import Completion, PromptRow, RewardBatch, RewardFailure
from fsm_trainer.data.reward_contracts import Contract, FunctionInfo
from fsm_trainer.data.reward_executor import RewardsAborted, worker_count
from fsm_trainer.data.reward_output import MOST_BYTES
from fsm_trainer.data.reward_pool import ProcessRewards, inspect_sources

GOOD = ["ok0", "ok1", "ok2", "ok3"]
LIMIT_S = 30.0
"""For calls that must not meet it, however busy the machine is."""


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    threads, children = set(threading.enumerate()), set(psutil.Process().children(recursive=True))
    descriptors = psutil.Process().num_fds()
    yield
    assert set(threading.enumerate()) - threads == set()
    assert set(psutil.Process().children(recursive=True)) - children == set()
    assert psutil.Process().num_fds() <= descriptors


def batch(*texts: str) -> RewardBatch:
    """One prompt a pair of completions."""
    prompts = [PromptRow({"prompt": f"p{i}", "answer": "1"}, f"p{i}", (1, 2)) for i in range(-(-len(texts) // 2))]
    return RewardBatch(prompts, [Completion(i // 2, t, t, (3, 4), (-0.5, -0.5), {}) for i, t in enumerate(texts)])


class Pool:
    """A pool for a function whose text the test gives."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "mine.py"
        self.output = folder / "rewards.log"
        self.rewards: ProcessRewards | None = None

    def make(self, text: str, *, workers: int = 1, limit_s: float | None = LIMIT_S) -> ProcessRewards:
        self.path.write_text(text)
        sources = [str(self.path)]
        self.rewards = ProcessRewards(sources, inspect_sources(sources), workers=workers, call_limit_s=limit_s)
        self.rewards.start(self.output)
        return self.rewards

    def score(self, text: str, *texts: str, **options: Any) -> list[Any]:
        return self.make(text, **options).score(batch(*texts), first_failure_ends=False)[0]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    made = Pool(tmp_path)
    yield made
    if made.rewards is not None:
        made.rewards.close()


def hostile(body: str) -> str:
    """Does `body` for the completion `bad`, and scores the length of the others."""
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    return (
        "import ctypes, os, signal, sys, threading, time\n"
        f"def reward_fn(record):\n    if record.completion == 'bad':\n{lines}\n    return len(record.completion)\n"
    )


NEVER = "time.sleep(1e6)"
FAILS = {
    "sleeps for ever": (NEVER, 0.5, "timeout", "RewardTimeout", "reward_fn: a call took longer than 0.5 s"),
    "exits": ("sys.exit(3)", LIMIT_S, "error", "SystemExit", "3"),
    "exits at once": ("os._exit(3)", LIMIT_S, "crash", "RewardCrash", "reward_fn: its process exited with code 3"),
    "segfaults": (
        "ctypes.string_at(0)",
        LIMIT_S,
        "crash",
        "RewardCrash",
        "reward_fn: its process was killed by SIGSEGV",
    ),
    "returns text": (
        "return '1'",
        LIMIT_S,
        "error",
        "ValueError",
        "reward_fn returned '1' (str), expected one finite number",
    ),
    "raises what cannot be pickled": (
        "class Local(Exception):\n    lock = threading.Lock()\nraise Local('mine')",
        *(LIMIT_S, "error", "Local", "mine"),
    ),
    "uses signal.alarm": (
        f"signal.alarm(1)\n{NEVER}",
        *(LIMIT_S, "crash", "RewardCrash", "reward_fn: its process was killed by SIGALRM"),
    ),
    "closes our socket": (
        "os.closerange(3, 256)\nos._exit(0)",
        *(LIMIT_S, "crash", "RewardCrash", "reward_fn: its process exited with code 0"),
    ),
    "stops itself": ("os.kill(os.getpid(), signal.SIGSTOP)", 0.5, "timeout", "RewardTimeout", "reward_fn: a call took"),
}


@pytest.mark.parametrize("name", FAILS)
@pytest.mark.parametrize("place", [0, 2])
def test_one_bad_call_is_one_failed_sample(pool: Pool, name: str, place: int) -> None:
    body, limit_s, kind, type_, message = FAILS[name]
    texts = [*GOOD[:place], "bad", *GOOD[place:]]
    found = pool.score(hostile(body), *texts, limit_s=limit_s)
    failure = found.pop(place)
    assert found == [3.0] * 4
    assert isinstance(failure, RewardFailure)
    assert (failure.kind, failure.type) == (kind, type_)
    assert failure.message.startswith(message)


HARMLESS = {
    "forks": "if os.fork() == 0:\n    time.sleep(1e6)",
    "forks and comes back twice": "os.fork()",
    "leaks threads": "for _ in range(20):\n    threading.Thread(target=time.sleep, args=(1e6,)).start()",
    "changes the working directory": "os.chdir('/')",
    "leaves an alarm": "signal.signal(signal.SIGALRM, lambda *_: 1 / 0)\nsignal.alarm(60)",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_a_call_leaves_behind_harms_no_other(pool: Pool, name: str) -> None:
    text = hostile(HARMLESS[name]) + "\nHOME = os.getcwd()\nscore = reward_fn\n"
    text += "def reward_fn(record):\n    assert os.getcwd() == HOME\n    assert signal.getitimer(0) == (0.0, 0.0)\n"
    text += "    return score(record)\n"
    assert pool.score(text, "bad", *GOOD, "bad", "ok4") == [3.0] * 7


def test_what_is_printed_is_kept_up_to_a_size_and_never_on_our_output(
    pool: Pool, capfd: pytest.CaptureFixture[str]
) -> None:
    found = pool.score(hostile("print('loud ' * 600_000)\nos.write(2, b'err')"), "bad", *GOOD)
    assert found == [3.0] * 5
    assert pool.rewards is not None
    pool.rewards.close()
    text = pool.output.read_bytes()
    assert text.startswith(b"loud loud")
    assert MOST_BYTES < len(text) < MOST_BYTES + 100
    assert text.endswith(b"[what was printed after this is not kept]\n")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_batch_function_that_dies_for_one_prompt_fails_for_that_prompt(pool: Pool) -> None:
    text = (
        "import os\ndef reward_fn(completions, **kwargs):\n"
        "    if 'bad' in completions: os._exit(1)\n    return [len(completions)] * len(completions)\n"
    )
    found = pool.score(text, *GOOD, "bad", "ok", "ok")
    # Scored prompt by prompt after the whole batch had failed.
    assert [v if isinstance(v, float) else v.kind for v in found] == [2.0] * 4 + ["crash"] * 2 + [1.0]


def test_asynchronous_calls_wait_together_and_fail_alone(pool: Pool) -> None:
    text = (
        "import asyncio, time\nopen_calls = 0\n"
        "async def reward_fn(record):\n    global open_calls\n    open_calls += 1\n    await asyncio.sleep(0.01)\n"
        "    if record.completion == 'bad': raise LookupError('x')\n"
        "    if record.completion == 'slow': await asyncio.sleep(1e6)\n    return open_calls\n"
    )
    found = pool.score(text, *GOOD, "bad", "slow", limit_s=1.0)
    assert found[:4] == [6.0] * 4
    assert [(v.kind, v.type) for v in found[4:]] == [("error", "LookupError"), ("timeout", "RewardTimeout")]


def test_a_blocked_event_loop_is_killed_and_the_others_are_scored(pool: Pool) -> None:
    text = (
        "import time\nasync def reward_fn(record):\n"
        "    if record.completion == 'bad': time.sleep(1e6)\n    return 1.0\n"
    )
    found = pool.score(text, *GOOD, "bad", limit_s=1.0)
    assert found[:4] == [1.0] * 4
    assert found[4].kind == "timeout"


def test_the_first_failure_ends_the_batch_where_that_is_asked(pool: Pool) -> None:
    rewards = pool.make(hostile("raise LookupError('x')"), workers=2)
    found = rewards.score(batch("bad", *GOOD * 10), first_failure_ends=True)[0]
    assert sum(isinstance(value, RewardFailure) for value in found) == 1


def test_a_failure_is_told_at_once_though_another_call_hangs(pool: Pool) -> None:
    up = pool.path.parent / "up"
    text = (
        "import os, time\ndef reward_fn(record):\n"
        f"    if record.completion == 'hangs': os.mkfifo({str(up)!r}); {NEVER}\n"
        f"    while not os.path.exists({str(up)!r}): time.sleep(0.001)\n    raise LookupError('x')\n"
    )
    rewards = pool.make(text, workers=2, limit_s=None)
    found = rewards.score(batch("hangs", "fails"), first_failure_ends=True)[0]
    assert isinstance(found[1], RewardFailure)


def test_a_signal_timer_works_because_calls_are_in_the_main_thread(pool: Pool) -> None:
    text = (
        "import signal\nclass Late(Exception): pass\ndef late(*_): raise Late\n"
        "def reward_fn(record):\n    signal.signal(signal.SIGALRM, late)\n    try:\n"
        "        signal.setitimer(signal.ITIMER_REAL, 0.01)\n        while True: pass\n"
        "    except Late:\n        return 0.5\n"
    )
    assert pool.score(text, *GOOD) == [0.5] * 4


def test_math_verify_with_its_own_time_limits(pool: Pool) -> None:
    pytest.importorskip("math_verify")
    text = (
        "from math_verify import parse, verify\n"
        "def reward_fn(record):\n"
        "    gold, found = (parse(t, raise_on_error=True) for t in ('\\\\boxed{1/2}', record.completion))\n"
        "    return float(verify(gold, found))\n"
    )
    assert pool.score(text, "\\boxed{0.5}", "\\boxed{2}", "the answer is $\\frac{1}{2}$") == [1.0, 0.0, 1.0]


def test_files_beside_the_users_are_found_by_calls_too(pool: Pool) -> None:
    (pool.path.parent / "beside.py").write_text("VALUE = 0.25\n")
    assert pool.score("def reward_fn(record):\n    import beside\n    return beside.VALUE\n", *GOOD) == [0.25] * 4


def test_several_functions_and_workers_keep_order(pool: Pool) -> None:
    pool.path.write_text(
        "def first(record): return len(record.completion)\n"
        "def second(completions, **kw): return [None if c == 'a' else 1 for c in completions]\n"
        "def third(example, completions): return [float(example['answer'])] * len(completions)\n"
    )
    sources = [f"{pool.path}:{name}" for name in ("first", "second", "third")]
    infos = inspect_sources(sources)
    assert [info.contract for info in infos] == [Contract.RECORD, Contract.LISTS, Contract.EXAMPLE]
    pool.rewards = ProcessRewards([*sources], infos, workers=2, call_limit_s=LIMIT_S)
    texts = ["a" * (1 + i % 7) for i in range(40)]
    first, second, third = pool.rewards.score(batch(*texts), first_failure_ends=True)
    assert first == [len(text) for text in texts]
    assert second == [None if text == "a" else 1.0 for text in texts]
    assert third == [1.0] * 40


def test_batches_of_several_threads_share_the_processes(pool: Pool) -> None:
    rewards = pool.make("def reward_fn(record): return float(record.completion)\n", workers=2)
    wanted = [[float(10 * t + i) for i in range(9)] for t in range(6)]
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda row: rewards.score(batch(*map(str, row)), first_failure_ends=True)[0], wanted))
    assert found == wanted


def test_workers_import_nothing_heavy(pool: Pool) -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'pyarrow', 'datasets', 'pandas', 'pydantic'}"
    assert pool.score(f"import sys\ndef reward_fn(record): return len({heavy} & set(sys.modules))\n", "a") == [0.0]


def test_abort_ends_a_call_that_hangs(pool: Pool) -> None:
    text = f"import os, time\ndef reward_fn(record):\n    os.mkfifo({str(pool.path.parent / 'up')!r})\n    {NEVER}\n"
    rewards = pool.make(text, limit_s=None)
    errors: list[BaseException] = []

    def score() -> None:
        try:
            rewards.score(batch(*GOOD), first_failure_ends=True)
        except RewardsAborted as error:
            errors.append(error)

    thread = threading.Thread(target=score)
    thread.start()
    wait_for(lambda: (pool.path.parent / "up").exists())
    rewards.abort()
    thread.join(30)
    assert len(errors) == 1
    with pytest.raises(RewardsAborted):
        rewards.score(batch(*GOOD), first_failure_ends=True)


def test_processes_end_with_the_run_that_is_killed(tmp_path: Path) -> None:
    """Even by kill -9, and while a call runs that never looks at its socket."""
    mine, up = tmp_path / "mine.py", tmp_path / "up"
    mine.write_text(
        f"import os, time\ndef reward_fn(r):\n    open({str(up)!r}, 'w').write(str(os.getpid()))\n    {NEVER}\n"
    )
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from tests.data.test_reward_pool import batch\n"
        "from fsm_trainer.data.reward_pool import ProcessRewards, inspect_sources\n"
        "s = [sys.argv[1]]\n"
        "rewards = ProcessRewards(s, inspect_sources(s), workers=1, call_limit_s=None)\n"
        "rewards.score(batch('a'), first_failure_ends=True)\n"
    )
    root = str(Path(__file__).parents[2])
    run = subprocess.Popen([sys.executable, "-c", code, str(mine), root], cwd=root)
    try:
        wait_for(lambda: up.exists() and up.read_text() != "")
    finally:
        run.kill()
        run.wait()
    pid = int(up.read_text())
    wait_for(lambda: not is_alive(pid))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import os\nos._exit(7)\n", "cannot be loaded: it ended the process, which exited with code 7"),
        ("raise SystemExit(1)\n", "SystemExit"),
        ("def reward_fn(a, b, c): return 0\n", "has no signature that is known"),
        ("def score(record): return 0\n", "does not define reward_fn; it has score"),
    ],
)
def test_what_cannot_be_loaded(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        inspect_sources([str(path)])


def test_rows_that_cannot_be_sent(pool: Pool) -> None:
    given = batch("a")
    odd = given._replace(prompts=[given.prompts[0]._replace(row={"prompt": "p", "lock": threading.Lock()})])
    rewards = pool.make("def reward_fn(record): return 0.0\n")
    with pytest.raises(ValueError, match="cannot be sent to a reward process .* give --reward-executor thread"):
        rewards.score(odd, first_failure_ends=True)


def test_a_process_that_dies_between_calls_is_replaced_but_not_for_ever(pool: Pool) -> None:
    text = (
        "import os\nclass Dies:\n    def __reduce__(self): return (os._exit, (1,))\ndef reward_fn(record): return 1.0\n"
    )
    rewards = pool.make(text)
    given = batch("a", "b")
    deadly = given._replace(prompts=[given.prompts[0]._replace(row={"prompt": "p", "x": Deadly()})])
    found = rewards.score(deadly, first_failure_ends=False)[0]
    assert [value.kind for value in found if isinstance(value, RewardFailure)] == ["crash"] * 2


class Deadly:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[int]]:
        return os._exit, (1,)


def test_worker_count() -> None:
    info = inspect_infos(None)
    assert worker_count([info], None, 2) == 1
    assert worker_count([info], None, 64) == 8
    assert worker_count([info, inspect_infos(16)], None, 2) == 16
    assert worker_count([inspect_infos(16)], 3, 2) == 3
    assert worker_count([inspect_infos(1000)], None, 2) == 64


def inspect_infos(workers: int | None) -> Any:
    return FunctionInfo("f", Contract.RECORD, False, workers)


def is_alive(pid: int) -> bool:
    """Whether it runs; one that only waits to be reaped does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    """Until something in another process has happened."""
    deadline = threading.Event()
    for _ in range(3000):
        if condition():
            return
        deadline.wait(0.01)
    raise AssertionError("it did not happen")
