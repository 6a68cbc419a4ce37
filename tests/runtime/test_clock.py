import pytest

from fsm_trainer.runtime.clock import MonotonicClock, VirtualClock


def test_the_monotonic_clock_begins_at_zero_and_never_goes_back() -> None:
    clock = MonotonicClock()
    moments = [clock.now_ns() for _ in range(100)]
    assert moments == sorted(moments)
    assert moments[0] >= 0
    assert moments[0] < 3_600e9, "it counts from its creation, not from the boot of the machine"


def test_the_virtual_clock_stands_still_until_it_is_moved() -> None:
    clock = VirtualClock(5)
    assert clock.now_ns() == 5
    clock.advance_to(12)
    clock.advance_to(12)
    assert clock.now_ns() == 12


def test_the_virtual_clock_cannot_go_back() -> None:
    clock = VirtualClock(5)
    with pytest.raises(ValueError, match="back from 5 to 4"):
        clock.advance_to(4)
