import sys
import threading

import pytest

from fsm_trainer.runtime.threads import SWITCH_INTERVAL_S, LaneThread, brisk_switching


def test_jobs_run_in_order_on_one_daemon_thread() -> None:
    lane = LaneThread("a-lane")
    done: list[tuple[int, str, bool]] = []
    for index in range(20):
        lane.post(
            lambda index=index: done.append((index, threading.current_thread().name, threading.current_thread().daemon))
        )
    lane.close()
    assert lane.join(10)
    assert done == [(index, "a-lane", True) for index in range(20)]


def test_a_lane_is_busy_until_its_last_job_is_done() -> None:
    lane = LaneThread("a-lane")
    assert not lane.busy
    begun, release = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        release.wait()

    lane.post(job)
    begun.wait()
    lane.close()
    assert lane.busy
    assert not lane.join(0)
    release.set()
    assert lane.join(10)
    assert not lane.busy


def test_brisk_switching_is_undone_whatever_happens() -> None:
    before = sys.getswitchinterval()
    seen: list[float] = []

    def fail_inside() -> None:
        with brisk_switching():
            seen.append(sys.getswitchinterval())
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        fail_inside()
    assert seen == [pytest.approx(min(before, SWITCH_INTERVAL_S))]
    assert sys.getswitchinterval() == before
