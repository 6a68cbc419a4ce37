"""The engine contract: kept by the fake and the transformers engines, and each check fails an engine that breaks it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fsm_trainer.core.batch import TrainSequence
from fsm_trainer.engines.base import (
    Loaded,
    Rollout,
    RolloutRequest,
    SamplingParams,
    Scores,
    Snapshot,
    TrainResult,
    VersionSpan,
)
from fsm_trainer.engines.logprob_gap import GapLimit
from fsm_trainer.testing import (
    Check,
    CommandKind,
    Effect,
    FakeBehaviour,
    FakeRolloutEngine,
    FakeTrainEngine,
    Fault,
    contract_rollout,
    engine_contract,
)
from fsm_trainer.testing.contract_train import SEQUENCES

C = CommandKind
SAMPLING = SamplingParams(n_samples=2, max_new_tokens=4)
HANG = FakeBehaviour(faults=[Fault(C.GENERATE, Effect.HANG)])
FLAT = [replace(sequence, advantage=0.0) for sequence in SEQUENCES]


def fake_rollout_checks(engine: Callable[..., Any] = FakeRolloutEngine) -> list[Check]:
    return engine_contract(
        partial(engine, FakeBehaviour()), sampling=SAMPLING, slow_factory=partial(engine, HANG.fresh())
    )


def fake_train_checks(engine: Callable[..., Any] = FakeTrainEngine, **faults: Effect) -> list[Check]:
    options: dict[str, Any] = dict.fromkeys(faults, FLAT)
    return engine_contract(
        lambda: engine(FakeBehaviour(faults=[Fault(C.TRAIN, effect, nth=2) for effect in faults.values()])), **options
    )


@pytest.mark.parametrize("check", fake_rollout_checks(), ids=str)
def test_the_fake_rollout_engine(check: Check) -> None:
    check()


@pytest.mark.parametrize(
    "check",
    [
        *fake_train_checks(),
        *fake_train_checks(flat_sequences=Effect.NO_STEP)[-1:],
        *fake_train_checks(bad_sequences=Effect.NAN)[-1:],
    ],
    ids=str,
)
def test_the_fake_train_engine(check: Check) -> None:
    check()


def test_checks_say_what_they_promise() -> None:
    checks = fake_rollout_checks()
    assert len({check.name for check in checks}) == len(checks) == 10
    assert all(check.promise.endswith(".") for check in checks)


def test_what_is_no_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="object is neither a rollout engine"):
        engine_contract(object)  # type: ignore[arg-type]


class Eager(FakeRolloutEngine):
    """Serves before it has weights."""

    def start(self) -> None:
        super().start()
        self._version = 0


class Boastful(FakeRolloutEngine):
    """Stamps another version than it serves."""

    def generate(self, request: RolloutRequest) -> Rollout:
        return replace(super().generate(request), version_last=9)


class Stuck(FakeRolloutEngine):
    """Reports the first version it loaded for ever."""

    def load_weights(self, snapshot: Snapshot) -> Loaded:
        super().load_weights(snapshot)
        return Loaded(0)


class Short(FakeRolloutEngine):
    """Loses a sample."""

    def generate(self, request: RolloutRequest) -> Rollout:
        whole = super().generate(request)
        return replace(whole, groups=(whole.groups[0][:1], *whole.groups[1:]))


class Misaligned(FakeRolloutEngine):
    """Loses a logprob."""

    def generate(self, request: RolloutRequest) -> Rollout:
        whole = super().generate(request)
        bad = tuple(replace(sample, logprobs=sample.logprobs[:-1]) for sample in whole.groups[0])
        return replace(whole, groups=(bad, *whole.groups[1:]))


class Lossy(FakeRolloutEngine):
    """Its spans lack a token."""

    def generate(self, request: RolloutRequest) -> Rollout:
        whole = super().generate(request)
        spans = (VersionSpan(whole.version_first, len(whole.groups[0][0].tokens) - 1),)
        first = replace(whole.groups[0][0], spans=spans)
        return replace(whole, groups=((first, *whole.groups[0][1:]), *whole.groups[1:]))


class Nostalgic(FakeRolloutEngine):
    """Says that an older version drew its tokens than the one it stamps."""

    def generate(self, request: RolloutRequest) -> Rollout:
        whole = super().generate(request)
        old = tuple(replace(sample, spans=(VersionSpan(0, len(sample.tokens)),)) for sample in whole.groups[0])
        return replace(whole, groups=(old, *whole.groups[1:]))


class Moody(FakeRolloutEngine):
    """Samples otherwise each time."""

    calls = 0

    def generate(self, request: RolloutRequest) -> Rollout:
        Moody.calls += 1
        return super().generate(replace(request, seed=request.seed + Moody.calls))


class Seedless(FakeRolloutEngine):
    """Ignores the seed."""

    def generate(self, request: RolloutRequest) -> Rollout:
        return super().generate(replace(request, seed=0))


class Deaf(FakeRolloutEngine):
    """Its generation ends by itself, but not by an abort."""

    def generate(self, request: RolloutRequest) -> Rollout:
        try:
            return super().generate(request)
        except RuntimeError:
            return Rollout((), self._version, self._version)


class Guesser(FakeRolloutEngine):
    """Scores otherwise than it recorded."""

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> Scores:  # type: ignore[override]
        return [(-9.0,) * (len(tokens) - 1) for tokens in sequences]


class Curt(FakeRolloutEngine):
    """Scores one token too few."""

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> Scores:  # type: ignore[override]
        return [(-1.0,) * (len(tokens) - 2) for tokens in sequences]


class Nervous(FakeRolloutEngine):
    """An abort while idle ends the next generation."""

    aborted = False

    def abort(self) -> None:
        self.aborted = True
        super().abort()

    def generate(self, request: RolloutRequest) -> Rollout:
        if self.aborted:
            raise RuntimeError("aborted")
        return super().generate(request)


class Leaky(FakeRolloutEngine):
    """Leaves a thread behind."""

    release = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self.release.wait, name="leak", daemon=True).start()


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        (Eager, "serves_nothing_before_weights"),
        (Boastful, "reports_the_version_it_loaded"),
        (Nostalgic, "reports_the_version_it_loaded"),
        (Stuck, "reports_the_version_it_loaded"),
        (Short, "groups_follow_the_prompts"),
        (Misaligned, "tokens_and_logprobs_align"),
        (Lossy, "tokens_and_logprobs_align"),
        (Moody, "same_seed_same_samples"),
        (Seedless, "another_seed_gives_other_samples"),
        (Guesser, "scores_agree_with_its_samples"),
        (Curt, "scores_agree_with_its_samples"),
        (Deaf, "abort_ends_a_generation"),
    ],
)
def test_a_rollout_engine_that_breaks_a_promise_fails_its_check(engine: Callable[..., Any], name: str) -> None:
    (check,) = [check for check in fake_rollout_checks(engine) if check.name == name]
    with pytest.raises(AssertionError):
        check()


class Ending(FakeRolloutEngine):
    """Its thread has been told to end by the time that `close` returns, and ends a moment later."""

    def start(self) -> None:
        super().start()
        self._told = threading.Event()
        self._pool = threading.Thread(target=self._told.wait, name="ending", daemon=True)
        self._pool.start()

    def close(self) -> None:
        super().close()
        threading.Timer(0.05, self._told.set).start()


def test_a_thread_that_is_about_to_end_is_none_that_is_left() -> None:
    (check,) = [check for check in fake_rollout_checks(Ending) if check.name == "close_leaves_no_thread"]
    check()


def test_a_thread_left_behind_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract_rollout, "ENDING_S", 0.01)
    (check,) = [check for check in fake_rollout_checks(Leaky) if check.name == "close_leaves_no_thread"]
    with pytest.raises(AssertionError, match="leak"):
        check()
    Leaky.release.set()


def test_an_engine_that_remembers_an_idle_abort_fails_its_check() -> None:
    (check,) = [check for check in fake_rollout_checks(Nervous) if check.name == "abort_is_a_no_op_when_idle"]
    with pytest.raises(RuntimeError, match="aborted"):
        check()


def test_a_failed_load_may_not_serve_half_loaded_weights() -> None:
    class Half(FakeRolloutEngine):
        def load_weights(self, snapshot: Snapshot) -> Loaded:
            if snapshot.location == "broken":
                self._version = snapshot.version
                raise OSError("broken")
            return super().load_weights(snapshot)

    checks = engine_contract(lambda: Half(FakeBehaviour()), sampling=SAMPLING, broken_snapshot=Snapshot(1, "broken", 0))
    with pytest.raises(AssertionError, match="not the old version"):
        checks[-1]()


class Uncounted(FakeTrainEngine):
    def train(self, sequences: Sequence[TrainSequence], max_gap: GapLimit | None = None) -> TrainResult:
        return replace(super().train(sequences), train_version=1)


class Silent(FakeTrainEngine):
    def train(self, sequences: Sequence[TrainSequence], max_gap: GapLimit | None = None) -> TrainResult:
        return replace(super().train(sequences), metrics={"loss": float("nan")})


class OneVersion(FakeTrainEngine):
    def export(self, version: int) -> Snapshot:
        return replace(super().export(version), version=0)


class Untidy(FakeTrainEngine):
    def save(self, directory: str) -> None:
        super().save(directory)
        Path(f"{directory}.tmp").mkdir()


class Forgetful(FakeTrainEngine):
    def restore(self, directory: str) -> int:
        counted = super().restore(directory)
        self.train_version = 0
        return counted


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        (Uncounted, "counts_its_steps"),
        (Silent, "reports_finite_metrics"),
        (OneVersion, "exports_the_version_it_is_told"),
        (Untidy, "saves_a_whole_checkpoint"),
        (Forgetful, "a_restored_engine_goes_on"),
    ],
)
def test_a_train_engine_that_breaks_a_promise_fails_its_check(engine: Callable[..., Any], name: str) -> None:
    (check,) = [check for check in fake_train_checks(engine) if check.name == name]
    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize(
    "options", [{"flat_sequences": FLAT}, {"bad_sequences": FLAT}, {"read": lambda snapshot: b"x"}]
)
def test_what_a_fake_does_not_do_fails_its_checks(options: dict[str, Any]) -> None:
    """A fake steps on everything and publishes nothing."""
    known = {check.name for check in fake_train_checks()}
    checks = engine_contract(lambda: FakeTrainEngine(FakeBehaviour()), **options)
    for check in checks:
        if check.name not in known and check.name != "a_snapshot_keeps_its_weights":
            with pytest.raises(AssertionError):
                check()


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> str:
    from fsm_trainer.engines.tiny import build_tiny_checkpoint

    return str(build_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=0, hidden=32, heads=2, head_dim=16))


@pytest.fixture(scope="module")
def hf_rollout_checks(ckpt: str) -> Iterator[dict[str, Check]]:
    from transformers import AutoModelForCausalLM

    from fsm_trainer.engines.hf_rollout import HFRolloutEngine
    from fsm_trainer.engines.weight_sync.shared_memory import SharedMemoryTransport

    transport = SharedMemoryTransport()
    model = AutoModelForCausalLM.from_pretrained(ckpt)
    snapshots = {version: transport.publish(model.named_parameters(), version) for version in (0, 1, 3, 7)}
    half = transport.publish(list(model.named_parameters())[:3], 9)
    checks = engine_contract(
        partial(HFRolloutEngine, ckpt, SAMPLING),
        sampling=SAMPLING,
        publish=snapshots.__getitem__,
        slow_factory=partial(HFRolloutEngine, ckpt, dataclasses.replace(SAMPLING, max_new_tokens=240)),
        broken_snapshot=half,
    )
    yield {check.name: check for check in checks}
    transport.close()


ROLLOUT_NAMES = [*map(str, fake_rollout_checks()), "a_failed_load_never_serves_half_loaded_weights"]


@pytest.mark.parametrize("name", ROLLOUT_NAMES)
def test_the_transformers_rollout_engine(hf_rollout_checks: dict[str, Check], name: str) -> None:
    assert list(hf_rollout_checks) == ROLLOUT_NAMES
    hf_rollout_checks[name]()


@pytest.fixture(scope="module")
def hf_train_checks(ckpt: str) -> dict[str, Check]:
    import torch

    from fsm_trainer.engines.hf_train import HFTrainEngine
    from fsm_trainer.engines.weight_sync.transport import read_snapshot

    def read(snapshot: Snapshot) -> bytes:
        return b"".join(
            tensor.contiguous().view(torch.uint8).numpy().tobytes() for _, tensor in read_snapshot(snapshot)
        )

    checks = engine_contract(
        lambda: HFTrainEngine(ckpt, lr=1e-2),
        flat_sequences=FLAT,
        bad_sequences=[replace(SEQUENCES[0], advantage=float("inf")), SEQUENCES[1]],
        read=read,
    )
    return {check.name: check for check in checks}


TRAIN_NAMES = [
    *map(str, fake_train_checks()),
    "a_batch_without_gradient_is_no_step",
    "a_loss_that_is_not_finite_raises",
    "a_snapshot_keeps_its_weights",
    "a_step_changes_the_weights",
    "release_frees_a_snapshot",
]


@pytest.mark.parametrize("name", TRAIN_NAMES)
def test_the_transformers_train_engine(hf_train_checks: dict[str, Check], name: str) -> None:
    assert list(hf_train_checks) == TRAIN_NAMES
    hf_train_checks[name]()
