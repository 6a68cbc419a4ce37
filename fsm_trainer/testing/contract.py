"""What every rollout engine and every train engine must do, as named checks for your own tests.

>>> CHECKS = engine_contract(make_my_engine, sampling=SamplingParams(n_samples=4, max_new_tokens=16))
>>> @pytest.mark.parametrize("check", CHECKS, ids=str)
... def test_contract(check):
...     check()

Each check builds an engine of its own, starts and closes it. It knows engines by their protocols only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsm_trainer.core.batch import TrainSequence
from fsm_trainer.engines.base import RolloutEngine, SamplingParams, Snapshot, TrainEngine
from fsm_trainer.testing.contract_rollout import PROMPTS, RolloutContract
from fsm_trainer.testing.contract_train import TrainContract


@dataclass(frozen=True)
class Check:
    """One named promise; calling it raises AssertionError if the engine does not keep it."""

    name: str
    promise: str
    """The promise in words."""
    run: Callable[[], None]

    def __call__(self) -> None:
        """Hold the engine to it."""
        self.run()

    def __str__(self) -> str:
        """The name, for a test's id."""
        return self.name


def engine_contract(
    factory: Callable[[], RolloutEngine] | Callable[[], TrainEngine],
    *,
    sampling: SamplingParams | None = None,
    publish: Callable[[int], Snapshot] | None = None,
    prompts: tuple[tuple[int, ...], ...] = PROMPTS,
    slow_factory: Callable[[], RolloutEngine] | None = None,
    broken_snapshot: Snapshot | None = None,
    sequences: Sequence[TrainSequence] | None = None,
    flat_sequences: Sequence[TrainSequence] | None = None,
    bad_sequences: Sequence[TrainSequence] | None = None,
    read: Callable[[Snapshot], bytes] | None = None,
) -> list[Check]:
    """The checks that apply to the engine that `factory` makes, not started; what is not given is not checked.

    A rollout engine: `sampling` is what the factory gave it; `publish(version)` makes a snapshot that it can load, of
    the same weights each time; `slow_factory` makes one whose generation lasts long enough to be aborted;
    `broken_snapshot` cannot be loaded.

    A train engine: `sequences` give a step; `flat_sequences` give none; `bad_sequences` have a loss that is not finite;
    `read(snapshot)` gives the bytes of a snapshot's weights and raises once it is released.
    """
    if _is_train_engine(factory):
        contract: TrainContract | RolloutContract = TrainContract(
            factory,  # type: ignore[arg-type]
            sequences=sequences,
            flat_sequences=flat_sequences,
            bad_sequences=bad_sequences,
            read=read,
        )
    else:
        contract = RolloutContract(
            factory,  # type: ignore[arg-type]
            sampling=sampling or SamplingParams(),
            publish=publish,
            prompts=prompts,
            slow_factory=slow_factory,
            broken_snapshot=broken_snapshot,
        )
    return [Check(run.__name__, (run.__doc__ or "").strip(), run) for run in contract.checks()]


def _is_train_engine(factory: Callable[[], object]) -> bool:
    """Ask one engine, which is not started and so need not be closed."""
    engine = factory()
    trains, generates = hasattr(engine, "train"), hasattr(engine, "generate")
    if trains == generates:
        raise ValueError(f"{type(engine).__name__} is neither a rollout engine (generate) nor a train engine (train)")
    return trains
