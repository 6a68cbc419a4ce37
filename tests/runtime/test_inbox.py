import threading

from fsm_trainer.core.events import Input, InputKind
from fsm_trainer.runtime.clock import VirtualClock
from fsm_trainer.runtime.inbox import ThreadInbox

TRAINED = Input(InputKind.TRAINED, op=3)
STOP = Input(InputKind.STOP)


def test_inputs_come_out_in_order() -> None:
    inbox = ThreadInbox(VirtualClock())
    inbox.put(TRAINED)
    inbox.put(STOP)
    assert [inbox.get(None), inbox.get(None)] == [TRAINED, STOP]


def test_a_deadline_that_has_come_gives_none() -> None:
    inbox = ThreadInbox(VirtualClock(100))
    assert inbox.get(100) is None
    assert inbox.get(50) is None
    assert inbox.get(100 + 1_000_000) is None  # the real wait is a millisecond


def test_what_is_there_goes_before_a_deadline_that_has_come() -> None:
    inbox = ThreadInbox(VirtualClock(100))
    inbox.put(TRAINED)
    assert inbox.get(50) == TRAINED


def test_a_waiting_reader_is_woken() -> None:
    inbox = ThreadInbox(VirtualClock())
    got: list[Input | None] = []
    reader = threading.Thread(target=lambda: got.append(inbox.get(None)))
    reader.start()
    inbox.put(STOP)
    reader.join()
    assert got == [STOP]
