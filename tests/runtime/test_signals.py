import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fsm_trainer.core.events import Input, InputKind
from fsm_trainer.runtime.clock import MonotonicClock
from fsm_trainer.runtime.inbox import ThreadInbox
from fsm_trainer.runtime.signals import stop_signals


@pytest.fixture(autouse=True)
def handlers() -> Iterator[dict[int, Any]]:
    """The handlers before, which must be back after."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield before
    assert {number: signal.getsignal(number) for number in before} == before


def test_each_signal_becomes_a_stop() -> None:
    posted: list[Input] = []
    with stop_signals(posted.append):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert [(event.kind, event.reason) for event in posted] == [
        (InputKind.STOP, "sigterm"),
        (InputKind.STOP, "sigint"),
        (InputKind.STOP, "sigint"),
    ]


def test_the_third_interrupt_is_pythons_own() -> None:
    posted: list[Input] = []
    with stop_signals(posted.append):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert [event.reason for event in posted] == ["sigint", "sigint", "sigterm"]


def test_handlers_are_back_after_an_exception() -> None:
    with pytest.raises(RuntimeError, match="inside"), stop_signals(lambda _: None):
        raise RuntimeError("inside")


def test_outside_the_main_thread_nothing_is_installed(handlers: dict[int, Any]) -> None:
    seen: list[Any] = []

    def run() -> None:
        with stop_signals(lambda _: None):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [handlers[signal.SIGINT]]


def test_a_signal_wakes_a_loop_that_waits_for_its_inbox() -> None:
    inbox = ThreadInbox(MonotonicClock())
    with stop_signals(inbox.put):
        sender = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM))
        sender.start()
        event = inbox.get(None)
        sender.join()
    assert event is not None
    assert event.reason == "sigterm"


def test_a_closed_terminal_is_a_stop() -> None:
    posted: list[Input] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        with stop_signals(posted.append):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert [(event.kind, event.reason) for event in posted] == [(InputKind.STOP, "sighup")]


def test_nohup_is_left_alone() -> None:
    posted: list[Input] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals(posted.append):
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert posted == []
