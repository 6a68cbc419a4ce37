import json
import pickle
from pathlib import Path

import pytest

import fsm_trainer
from fsm_trainer.config.checkpoint import FileMark
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.runtime.failures import EngineDied, EngineError, HostClosed, describe
from fsm_trainer.runtime.train_queue import AsyncTrainBatchQueue


def caught(call: object, *args: object) -> Exception:
    with pytest.raises(Exception) as found:  # noqa: PT011 - any will do
        call(*args)  # type: ignore[operator]
    return found.value


def boom(text: str) -> None:
    raise KeyError(text)


def test_the_users_line_is_named_and_the_traceback_kept() -> None:
    failure = describe(caught(boom, "no such answer"))
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "raise KeyError" in text)
    assert failure.type == "KeyError"
    assert failure.where == f"test_failures.py:{line}"
    assert failure.summary == f"'no such answer' (test_failures.py:{line})"
    assert "Traceback" in failure.traceback
    assert "raise KeyError(text)" in failure.traceback


def test_frames_of_python_and_of_this_package_are_not_the_users() -> None:
    broken = caught(lambda: json.loads("{"))
    impossible = caught(lambda: SchedulerConfig(workers=0))
    for error in (broken, impossible):
        assert describe(error).where.startswith("test_failures.py:")


def test_without_a_users_frame_the_innermost_is_named() -> None:
    error = caught(exec, compile("raise RuntimeError('made')", "<generated>", "exec"))
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != "<generated>":
        trace = trace.tb_next
    assert describe(error.with_traceback(trace)).where == "<generated>:1"


def test_what_this_package_or_the_system_refuses_needs_no_traceback(tmp_path: Path) -> None:
    refused = describe(caught(AsyncTrainBatchQueue(1).put, None))
    full = describe(caught(FileMark.of, tmp_path / "none"))
    assert (refused.type, full.type) == ("ValueError", "FileNotFoundError")
    for failure in (refused, full):
        assert failure.traceback == ""
        assert failure.for_log == {"message": failure.summary}


def test_a_mistake_in_this_package_keeps_its_traceback() -> None:
    mistake = describe(caught(exec, compile("int('four')", f"{Path(fsm_trainer.__file__).parent}/made.py", "exec")))
    assert (mistake.type, "Traceback" in mistake.traceback) == ("ValueError", True)
    assert mistake.for_log == {"message": mistake.summary, "exception": mistake.traceback}


def test_an_exception_without_text_is_told_by_its_repr() -> None:
    assert describe(StopIteration()).summary == "StopIteration()"


def test_what_crossed_a_process_keeps_its_origin() -> None:
    failure = describe(EngineError("ValueError", "bad token", "Traceback ...", "model.py:7"))
    assert failure.summary == "bad token (model.py:7)"
    assert failure.type == "ValueError"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-9, "engine process rollout-0 (pid 41) was killed by SIGKILL"),
        (3, "engine process rollout-0 (pid 41) exited with code 3"),
        (-1000, "engine process rollout-0 (pid 41) was killed by signal 1000"),
    ],
)
def test_a_death_says_who_died_of_what(code: int, text: str) -> None:
    death = EngineDied("rollout-0", 41, code)
    assert str(death) == text
    with pytest.raises(EngineDied) as caught:
        raise death
    assert describe(caught.value).for_log == {"message": text}, "where it was noticed says nothing more"


@pytest.mark.parametrize(
    "error", [EngineError("T", "m", "tb", "f.py:1"), EngineDied("rollout-0", 41, -9), HostClosed("closed")]
)
def test_errors_can_be_pickled(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Unprintable(), "(its message cannot be shown: RuntimeError)"),
        (ValueError("a\n  b\tc"), "a b c"),
        (ValueError("half \ud800"), "half \\ud800"),
        (ValueError("y" * 5000), "y" * 997 + "..."),
    ],
)
def test_any_exception_becomes_one_line_of_text(error: Exception, message: str) -> None:
    failure = describe(error)
    assert failure.message == message
    failure.message.encode()
