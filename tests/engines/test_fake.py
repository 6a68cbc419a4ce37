import functools
import math
import pickle
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fsm_trainer
from fsm_trainer.core.events import COMPLETIONS, NOTICES, Command, CommandKind, Input, InputKind
from fsm_trainer.engines.base import RolloutEngine, RolloutRequest, Snapshot, TrainEngine
from fsm_trainer.engines.fake import (
    Effect,
    FakeBehaviour,
    FakeOperations,
    FakeRolloutEngine,
    FakeTrainEngine,
    Fault,
    Lognormal,
    OperationAborted,
    Pareto,
    Uniform,
)

C, K = CommandKind, InputKind


def generate(batch_id: int = 3, version: int = 5, engine: int = 0, op: int = 9) -> Command:
    return Command(op, C.GENERATE, worker=0, engine=engine, batch_id=batch_id, version=version)


def train(batch_id: int = 3, version: int = 5, op: int = 9) -> Command:
    return Command(op, C.TRAIN, batch_id=batch_id, version=version)


@pytest.mark.parametrize("kind", [kind for kind in C if kind not in NOTICES])
def test_what_is_not_programmed_succeeds_at_once(kind: CommandKind) -> None:
    outcome = FakeBehaviour().outcome(Command(9, kind, worker=0, engine=1, batch_id=2, version=4))
    assert outcome.duration_s == 0
    assert outcome.completion is not None
    assert outcome.completion.kind in COMPLETIONS[kind]
    assert outcome.completion.op == 9


def test_versions_are_reported_as_they_should_be() -> None:
    behaviour = FakeBehaviour(tokens=100)
    assert behaviour.outcome(generate()).completion == Input(
        K.GENERATED, op=9, rollout_version_first=5, rollout_version_last=5, tokens=100
    )
    assert behaviour.outcome(train()).completion == Input(K.TRAINED, op=9, train_version=6)
    load = Command(9, C.LOAD_WEIGHTS, engine=0, version=7)
    assert behaviour.outcome(load).completion == Input(K.WEIGHTS_LOADED, op=9, rollout_version_last=7)


def test_the_source_ends_after_its_batches() -> None:
    behaviour = FakeBehaviour(batches=2)
    outcomes = [behaviour.outcome(Command(0, C.LOAD_PROMPTS, batch_id=batch)).completion for batch in (2, 1, 0, 3)]
    assert [done and done.kind for done in outcomes] == [K.EXHAUSTED, K.LOADED, K.LOADED, K.EXHAUSTED]


def durations(amount: Any, batches: int = 4000, seed: int = 0) -> list[float]:
    behaviour = FakeBehaviour({C.GENERATE: amount}, seed=seed)
    return [behaviour.outcome(generate(batch)).duration_s for batch in range(batches)]


def test_a_number_a_list_and_a_function_are_taken_as_they_are() -> None:
    assert durations(2.5, 2) == [2.5, 2.5]
    assert durations([1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]
    assert durations(lambda command: command.batch_id / 2, 3) == [0, 0.5, 1]


def test_distributions_have_the_moments_of_the_textbook() -> None:
    uniform, lognormal, pareto = (durations(d) for d in (Uniform(1, 3), Lognormal(2, 0.5), Pareto(1.5, 3)))
    assert statistics.mean(uniform) == pytest.approx(2, rel=0.03)
    assert min(uniform) >= 1
    assert max(uniform) <= 3
    assert statistics.median(lognormal) == pytest.approx(2, rel=0.03)
    assert statistics.stdev(math.log(value) for value in lognormal) == pytest.approx(0.5, rel=0.05)
    assert statistics.mean(pareto) == pytest.approx(1.5 * 3 / 2, rel=0.05)
    assert statistics.median(pareto) == pytest.approx(1.5 * 2 ** (1 / 3), rel=0.03)
    assert min(pareto) >= 1.5


def test_a_draw_depends_on_what_it_is_for_and_not_on_the_order_of_calls() -> None:
    programme: dict[CommandKind, Any] = {C.GENERATE: Pareto(1, 1.5), C.TRAIN: Uniform(0, 1)}
    commands = [generate(batch) for batch in range(20)] + [train(batch) for batch in range(20)]
    forward, backward = FakeBehaviour(programme), FakeBehaviour(programme)
    first = {command: forward.outcome(command) for command in commands}
    assert {command: backward.outcome(command) for command in reversed(commands)} == first
    assert len({outcome.duration_s for outcome in first.values()}) == 40
    other = FakeBehaviour(programme, seed=1)
    assert all(other.outcome(command).duration_s != first[command].duration_s for command in commands)


def test_a_draw_is_the_same_in_another_process() -> None:
    code = (
        "from fsm_trainer.engines.fake import *; from fsm_trainer.core.events import *\n"
        "b = FakeBehaviour({CommandKind.GENERATE: Pareto(1, 1.5)})\n"
        "print(b.outcome(Command(9, CommandKind.GENERATE, worker=0, engine=0, batch_id=3, version=5)).duration_s)"
    )
    root = str(Path(fsm_trainer.__path__[0]).parent)
    run = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": root}, capture_output=True, text=True)
    assert float(run.stdout) == durations(Pareto(1, 1.5), 4)[3]


def test_a_negative_duration_is_refused() -> None:
    with pytest.raises(ValueError, match="came out as -1"):
        durations(-1, 1)


@pytest.mark.parametrize(
    ("where", "met"),
    [
        ({"nth": 2}, [1]),
        ({"batch_id": 12}, [2]),
        ({"version": 3}, [3]),
        ({"engine": 1}, [1, 3]),
        ({"engine": 1, "version": 3}, [3]),
        ({}, [0, 1, 2, 3]),
    ],
)
def test_a_fault_meets_the_commands_it_names(where: dict[str, int], met: list[int]) -> None:
    behaviour = FakeBehaviour(faults=[Fault(C.GENERATE, Effect.RAISE, **where)])
    assert behaviour.outcome(train(12, 3)).effect is None, "another kind"
    outcomes = [behaviour.outcome(generate(10 + i, version=i, engine=i % 2)) for i in range(4)]
    assert [i for i, outcome in enumerate(outcomes) if outcome.effect is Effect.RAISE] == met


@pytest.mark.parametrize(
    ("effect", "command", "completion"),
    [
        (Effect.RAISE, generate(), Input(K.FAILED, op=9, reason="RuntimeError", message="boom")),
        (Effect.NAN, train(), Input(K.FAILED, op=9, reason="FloatingPointError", message="boom")),
        (Effect.DIE, generate(), Input(K.FAILED, op=9, reason="EngineDied", message="boom")),
        (Effect.HANG, generate(), None),
        (Effect.NO_STEP, train(), Input(K.TRAINED, op=9, train_version=5, reason="no_step")),
        (Effect.WRONG_VERSION, train(), Input(K.TRAINED, op=9, train_version=7)),
        (
            Effect.WRONG_VERSION,
            generate(),
            Input(K.GENERATED, op=9, rollout_version_first=6, rollout_version_last=6, tokens=64),
        ),
        (Effect.DEGENERATE, Command(9, C.REWARD, worker=0, batch_id=3), Input(K.REWARDED, op=9, reason="degenerate")),
    ],
)
def test_what_each_fault_does(effect: Effect, command: Command, completion: Input | None) -> None:
    behaviour = FakeBehaviour({command.kind: 2.0}, faults=[Fault(command.kind, effect, message="boom")])
    outcome = behaviour.outcome(command)
    assert (outcome.duration_s, outcome.completion, outcome.effect) == (2.0, completion, effect)
    died = Input(K.ENGINE_DIED, engine=0, message="boom")
    assert outcome.death == (died if effect is Effect.DIE else None)


def test_a_fault_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="no_step cannot meet generate: use it on train"):
        Fault(C.GENERATE, Effect.NO_STEP)


@pytest.mark.parametrize("copy", [FakeBehaviour.fresh, lambda behaviour: pickle.loads(pickle.dumps(behaviour))])
def test_a_copy_counts_from_the_start(copy: Callable[[FakeBehaviour], FakeBehaviour]) -> None:
    behaviour = FakeBehaviour(faults=[Fault(C.TRAIN, Effect.RAISE, nth=1)], seed=4, batches=3)
    assert behaviour.outcome(train()).effect is Effect.RAISE
    assert behaviour.outcome(train()).effect is None
    again = copy(behaviour)
    assert again == behaviour
    assert again.outcome(train()).effect is Effect.RAISE


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("early", [True, False])
def test_an_abort_ends_a_hanging_operation(early: bool) -> None:
    operations = FakeOperations(FakeBehaviour(faults=[Fault(C.GENERATE, Effect.HANG)]))
    abort = Command(10, C.ABORT, target=9)
    if early:
        operations.notice(abort)
    thread, errors = in_thread(lambda: operations.execute(generate()))
    if not early:
        operations.notice(abort)
    thread.join()
    assert isinstance(errors[0], OperationAborted)
    assert operations.notices == [abort]
    assert operations.execute(train(op=11)).kind is K.TRAINED, "other operations are as before"


def test_an_engines_death_is_told_before_its_operation_fails() -> None:
    told: list[Input] = []
    die = FakeBehaviour(faults=[Fault(C.GENERATE, Effect.DIE)])
    done = FakeOperations(die, post=told.append).execute(generate())
    assert [event.kind for event in told] == [K.ENGINE_DIED]
    assert (done.kind, done.reason) == (K.FAILED, "EngineDied")


REQUEST = RolloutRequest(3, ((1, 2), (3,), (4, 5)), seed=7)


def test_the_rollout_engine_serves_the_version_it_loaded() -> None:
    fake = FakeRolloutEngine(FakeBehaviour(), n_samples=4, max_new_tokens=6)
    engine: RolloutEngine = fake
    engine.start()
    assert engine.load_weights(Snapshot(2, "", 0)).version == 2
    rollout = engine.generate(REQUEST)
    assert (rollout.version_first, rollout.version_last) == (2, 2)
    assert [len(group) for group in rollout.groups] == [4, 4, 4]
    samples = [sample for group in rollout.groups for sample in group]
    for sample in samples:
        assert 1 <= len(sample.tokens) == len(sample.logprobs) <= 6
        assert all(value <= 0 for value in sample.logprobs)
        assert (sample.finish_reason == "stop") == (sample.tokens[-1] == 0)
        assert 0 not in sample.tokens[:-1]
    assert len({sample.tokens for sample in samples}) > 6
    assert engine.generate(REQUEST) == rollout, "same seed, prompts and weights give the same samples"
    engine.load_weights(Snapshot(3, "", 0))
    assert engine.generate(REQUEST).groups != rollout.groups
    engine.close()


def test_the_rollout_engines_abort_ends_a_generation_and_is_a_no_op_when_idle() -> None:
    waiting = threading.Event()
    engine = FakeRolloutEngine(FakeBehaviour({C.GENERATE: lambda _: waiting.set() or 0.0}, faults=[HANG_ONCE]))
    engine.load_weights(Snapshot(0, "", 0))
    engine.abort()
    thread, errors = in_thread(lambda: engine.generate(REQUEST))
    waiting.wait()  # it has begun, so the abort counts
    engine.abort()
    thread.join()
    assert isinstance(errors[0], OperationAborted)
    assert engine.generate(REQUEST).groups, "it goes on"


HANG_ONCE = Fault(C.GENERATE, Effect.HANG, nth=1)


def test_the_rollout_engines_faults() -> None:
    engine = FakeRolloutEngine(
        FakeBehaviour(
            faults=[
                Fault(C.GENERATE, Effect.RAISE, batch_id=3, message="out of memory"),
                Fault(C.GENERATE, Effect.WRONG_VERSION, batch_id=4),
                Fault(C.LOAD_WEIGHTS, Effect.WRONG_VERSION, version=2),
                Fault(C.START_ENGINE, Effect.DIE),
            ]
        )
    )
    assert engine.load_weights(Snapshot(1, "", 0)).version == 1
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate(REQUEST)
    assert engine.generate(RolloutRequest(4, ((1,),), 0)).version_first == 2
    assert engine.load_weights(Snapshot(2, "", 0)).version == 3
    with pytest.raises(RuntimeError, match="only in a process of its own"):
        engine.start()


def test_an_engine_in_another_process_really_dies() -> None:
    behaviour = FakeBehaviour(faults=[Fault(C.START_ENGINE, Effect.DIE)])
    code = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())().start()"
    root = str(Path(fsm_trainer.__path__[0]).parent)
    factory = pickle.dumps(functools.partial(FakeRolloutEngine, behaviour))
    run = subprocess.run([sys.executable, "-c", code], input=factory, env={"PYTHONPATH": root}, capture_output=True)
    assert (run.returncode, run.stderr) == (13, b"")


def test_the_train_engine_counts_its_steps(tmp_path: Path) -> None:
    faults = [Fault(C.TRAIN, Effect.NO_STEP, nth=2), Fault(C.TRAIN, Effect.NAN, nth=4)]
    fake = FakeTrainEngine(FakeBehaviour(faults=faults))
    engine: TrainEngine = fake
    engine.start()
    results = [engine.train([]) for _ in range(3)]
    assert [(result.stepped, result.train_version) for result in results] == [(True, 1), (False, 1), (True, 2)]
    with pytest.raises(FloatingPointError):
        engine.train([])
    assert engine.export(2).version == 2
    assert fake.published == {2}
    engine.release(2)
    assert fake.published == set()
    engine.save(str(tmp_path / "checkpoint"))
    assert '"train_version": 2' in (tmp_path / "checkpoint" / "fake.json").read_text()
    engine.close()
