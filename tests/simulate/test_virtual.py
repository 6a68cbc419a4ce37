import pytest

from fsm_trainer.core.config import Deadlines, SchedulerConfig
from fsm_trainer.core.events import Command, CommandKind, Input, InputKind, Record, RecordKind
from fsm_trainer.simulate.world import SECOND_NS, VirtualWorld
from fsm_trainer.testing import Effect, FakeBehaviour, Fault, Lognormal, MemorySink, Starved, VirtualClock, VirtualRun

C, K, R = CommandKind, InputKind, RecordKind


def world(behaviour: FakeBehaviour | None = None, **options: int) -> VirtualWorld:
    return VirtualWorld(behaviour or FakeBehaviour({C.GENERATE: 2.0}), VirtualClock(), **options)


def generate(op: int, worker: int = 0) -> Command:
    return Command(op, C.GENERATE, worker=worker, engine=0, batch_id=op, version=0)


def test_completions_come_in_the_order_of_their_moments() -> None:
    w = world(FakeBehaviour({C.GENERATE: [3.0, 1.0, 2.0]}))
    for op in range(3):
        w.dispatch(generate(op, worker=op))
    done = [w.get(None) for _ in range(3)]
    assert [(event.op, event.finished_ns) for event in done if event] == [
        (1, SECOND_NS),
        (2, 2 * SECOND_NS),
        (0, 3 * SECOND_NS),
    ]
    assert w.in_flight() == []


def test_one_lane_does_one_thing_at_a_time() -> None:
    w = world()
    w.dispatch(generate(0))
    w.dispatch(generate(1))
    first, second = w.get(None), w.get(None)
    assert first is not None
    assert second is not None
    assert (second.posted_ns, second.started_ns, second.finished_ns) == (0, 2 * SECOND_NS, 4 * SECOND_NS)


def test_a_deadline_that_comes_first_moves_the_clock_there() -> None:
    w = world()
    w.dispatch(generate(0))
    assert w.get(SECOND_NS) is None
    assert w._clock.now_ns() == SECOND_NS
    event = w.get(2 * SECOND_NS)  # at the same moment the input goes first
    assert event is not None
    assert event.op == 0


def test_an_abort_fails_a_running_and_a_waiting_command() -> None:
    w = world(FakeBehaviour(faults=[Fault(C.GENERATE, Effect.HANG, batch_id=0)]))
    w.dispatch(generate(0))
    w.dispatch(generate(1))
    w.dispatch(Command(2, C.ABORT, target=1))
    w.dispatch(Command(3, C.ABORT, target=0))
    events = [w.get(None), w.get(None)]
    assert [(event.kind, event.op, event.reason) for event in events if event] == [
        (K.FAILED, 0, "OperationAborted"),
        (K.FAILED, 1, "OperationAborted"),
    ]


def test_waiting_for_nothing_is_an_error_and_so_is_no_end() -> None:
    with pytest.raises(Starved, match="nothing is in flight"):
        world().get(None)
    w = world(max_inputs=1)
    w.put(Input(K.STOP))
    w.put(Input(K.STOP))
    w.get(None)
    with pytest.raises(Starved, match="after 1 inputs"):
        w.get(None)


def test_a_hang_without_a_deadline_is_found_at_once() -> None:
    endless = Deadlines(*[0.0] * len(Deadlines.__dataclass_fields__))
    hang = FakeBehaviour(faults=[Fault(C.TRAIN, Effect.HANG, nth=2)])
    with pytest.raises(Starved):
        VirtualRun(SchedulerConfig(max_steps=5, deadlines=endless), hang).run()


@pytest.mark.parametrize("admission", ["paced", "greedy", "lockstep"])
def test_a_run_repeats_exactly(admission: str) -> None:
    config = SchedulerConfig(max_steps=30, workers=3, engines=2, admission=admission, max_staleness=3)
    behaviour = FakeBehaviour(
        {C.GENERATE: Lognormal(1.0, 1.0), C.TRAIN: 0.5}, faults=[Fault(C.TRAIN, Effect.NO_STEP, nth=4)]
    )
    first, second = (VirtualRun(config, behaviour).run() for _ in range(2))
    assert first == second
    assert first.outcome == "completed"


def test_synchronous_training_takes_the_sum_of_its_parts() -> None:
    """Staleness 0 overlaps nothing: each step is rollout + reward + train + export + load."""
    parts = {C.GENERATE: 1.0, C.REWARD: 0.25, C.TRAIN: 0.5, C.EXPORT: 0.125, C.LOAD_WEIGHTS: 0.0625}
    result = VirtualRun(SchedulerConfig(max_steps=16, max_staleness=0), FakeBehaviour(parts)).run()
    # The first publication precedes the first step, and nothing is published after the last.
    assert result.end_ns == round(16 * sum(parts.values()) * SECOND_NS)


def test_asynchronous_training_takes_the_slower_side() -> None:
    """One worker, staleness 1: rollouts follow each other without a gap, and the last is trained after them."""
    parts = {C.GENERATE: 1.0, C.TRAIN: 0.5}
    result = VirtualRun(SchedulerConfig(max_steps=16, max_staleness=1), FakeBehaviour(parts)).run()
    assert result.end_ns == 16 * SECOND_NS + SECOND_NS // 2


def test_events_from_outside_come_at_their_second() -> None:
    stop = Input(K.STOP, reason="user")
    run = VirtualRun(SchedulerConfig(), FakeBehaviour({C.GENERATE: 1.0, C.TRAIN: 0.5}), events=[(4.25, stop)])
    result = run.run()
    assert result.outcome == "interrupted"
    (row,) = [r for r in result.of_kind(R.INPUT) if r.trigger == "stop"]
    assert row.t_ns == 4_250_000_000


def test_a_sink_of_ones_own_sees_the_records() -> None:
    sink = MemorySink()
    result = VirtualRun(SchedulerConfig(max_steps=2), FakeBehaviour(), sink=sink).run()
    assert result.records == []
    assert sink.records[-1].kind is R.RUN_END
    assert sink.syncs[-1] == len(sink.records)


def test_a_sink_told_to_fail_keeps_nothing_from_there_on() -> None:
    sink = MemorySink(fail_at=1)
    sink.append(Record(0, 0, R.INPUT))
    for call in (lambda: sink.append(Record(1, 0, R.INPUT)), sink.flush, sink.sync):
        with pytest.raises(OSError, match="no space"):
            call()
    assert len(sink.records) == 1
