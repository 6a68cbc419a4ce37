"""The rollout side of a run that generates by itself: prompts from a dataset, engines in their hosts, rewards."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import structlog

from fsm_trainer.core.events import Command, CommandKind, Input, InputKind, Record
from fsm_trainer.core.machines import BatchState
from fsm_trainer.data.prompts import PromptBatch
from fsm_trainer.engines.base import Rollout, RolloutRequest, TrainEngine
from fsm_trainer.engines.weight_sync.transport import WeightTransport
from fsm_trainer.runtime.clock import Clock
from fsm_trainer.runtime.host import EngineHost
from fsm_trainer.trainers.engine_hosts import EngineHosts
from fsm_trainer.trainers.mismatch import MismatchGate
from fsm_trainer.trainers.operations import OperationAborted, RunOperations, digest, is_batch_end
from fsm_trainer.trainers.run_directory import RunDirectory
from fsm_trainer.trainers.samples import SampleWriter
from fsm_trainer.trainers.saving import Saver
from fsm_trainer.trainers.scoring import Scorer
from fsm_trainer.trainers.sync_costs import SyncCosts

_NOTHING_TO_TRAIN = frozenset({"degenerate", "no_step"})
"""Reasons of drops after which the prompts have had their turn: every completion was worth the same."""
_log = structlog.get_logger("fsm_train")
SCORING_CPU = "score_cpu_s"
"""Metric: processor time that this process's thread spent on a batch's rewards, during which it holds up others."""
ABORT_GRACE_S = 2.0
"""How long an engine may take to end an aborted generation by itself before its host is killed."""


class Source(Protocol):
    """Where prompts come from."""

    def batch(self, batch_id: int) -> PromptBatch | None:
        """Prompts of a batch; None past the end. May wait while batches under way may still come back."""

    def settle(self, batch_id: int) -> None:
        """The batch was trained on, or has nothing to be trained on."""

    def give_back(self, batch_id: int, reason: str, *, attempted: bool = True) -> tuple[int, ...]:
        """The batch came to nothing; returns the rows that are not served again."""

    def close(self) -> None:
        """Release whoever waits."""

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, ready for JSON."""


class RolloutOperations(RunOperations):
    """Generates with rollout engines and scores with the user's reward function."""

    def __init__(
        self,
        *,
        source: Source,
        scorer: Scorer,
        train_engine: TrainEngine,
        make_host: Callable[[int], EngineHost],
        run: RunDirectory,
        seed: int,
        clock: Clock,
        post: Callable[[Input], None],
        samples: SampleWriter | None = None,
        always_steps: bool,
        gate: MismatchGate | None = None,
        saver: Saver | None = None,
        transport: WeightTransport | None = None,
    ) -> None:
        """`always_steps`: the loss has a term (entropy, KL) that makes even a batch without advantages a step.

        `transport`: by which the train engine publishes; None for one that publishes nothing (a fake).
        """
        super().__init__(train_engine=train_engine, run=run, gate=gate, saver=saver)
        self._source = source
        self._scorer = scorer
        self._seed = seed
        self._clock = clock
        self._samples = samples
        self._always_steps = always_steps
        self._hosts = EngineHosts(make_host, post, transport)
        self._sync_costs = SyncCosts()
        scorer.start(run.reward_output)

    def execute(self, command: Command) -> Input:
        """Do it, blocking; raises on failure, and at once if it was aborted before it began."""
        try:
            return super().execute(command)
        finally:
            self._hosts.done(command)

    def start_engine(self, command: Command) -> Input:
        """Start the engine's host, then the engine; what there was of it before has ended."""
        host = self._hosts.start(command)
        if self.was_aborted(command):
            host.kill()  # the abort may have come before there was a host to kill
        began = time.perf_counter()
        parts: dict[str, float] | None = host.submit("start").result()
        seconds = {**(parts or {}), "total_s": time.perf_counter() - began}
        _log.info("engine_started", engine=command.engine, **{name: round(took, 2) for name, took in seconds.items()})
        return Input(InputKind.STARTED)

    def load_prompts(self, command: Command) -> Input:
        """Take the batch's prompts from the source."""
        assert command.batch_id is not None
        prompts = self._source.batch(command.batch_id)
        if prompts is None:
            return Input(InputKind.EXHAUSTED)
        self.work_of(command).prompts = prompts
        return Input(InputKind.LOADED)

    def generate(self, command: Command) -> Input:
        """Let the engine complete the prompts."""
        work = self.work_of(command)
        assert work.prompts is not None and command.engine is not None
        request = RolloutRequest(work.prompts.batch_id, work.prompts.prompt_tokens, self._seed)
        host, begin = self._host_of(command), time.perf_counter()
        rollout: Rollout = host.submit("generate", request).result()
        work.rollout, work.rollout_s, work.engine = rollout, time.perf_counter() - begin, command.engine
        work.rescored = self._gate.check_generation(command.engine, request.prompts, rollout, host)
        samples = [sample for group in rollout.groups for sample in group]
        return Input(
            InputKind.GENERATED,
            rollout_version_first=rollout.version_first,
            rollout_version_last=rollout.version_last,
            tokens=sum(len(sample.tokens) for sample in samples),
            digest=digest(*(part for s in samples for part in (array("q", s.tokens), array("d", s.logprobs)))),
        )

    def reward(self, command: Command) -> Input:
        """Score and materialise; the samples are kept for people."""
        work = self.work_of(command)
        assert work.prompts is not None and work.rollout is not None
        work.scoring = True
        begin_s, now_s = time.thread_time(), self._clock.now_ns() / 1e9
        completions = self._scorer.completions(work.prompts, work.rollout)
        if self._samples is not None:
            self._samples.begun(work.prompts, work.rollout, lambda: [each.text for each in completions])
        scored = self._scorer.score(
            work.prompts, work.rollout, rollout_time_s=work.rollout_s, now_s=now_s, completions=completions
        )
        if self._samples is not None:
            self._samples.rewarded(work.prompts.batch_id, scored.sequences, scored.function_rewards)
        work.train_batch, work.rates = scored.batch, scored.rates
        work.reward_metrics = {**scored.reward_metrics, SCORING_CPU: time.thread_time() - begin_s}
        reason = "degenerate" if scored.degenerate and not self._always_steps else None
        return Input(InputKind.REWARDED, tokens=scored.batch.token_count, reason=reason, message=scored.message)

    def load_weights(self, command: Command) -> Input:
        """Let the engine read the published snapshot; it must then score the probe as the trainer did."""
        host, snapshot = self._host_of(command), self.snapshot_of(command)
        assert command.engine is not None
        self._gate.loading(command.engine)
        loaded = self._hosts.load(host, snapshot, command.engine)
        self._sync_costs.note(command.engine, loaded)
        self._gate.check_load(command.engine, snapshot.version, host)
        return Input(InputKind.WEIGHTS_LOADED, rollout_version_last=loaded.version)

    def abort(self, command: Command) -> None:
        """Ask a generation to end; kill the host of one that does not, or of what cannot be interrupted.

        Of a concurrent engine this ends every generation: one is aborted only when all of them are given up.
        """
        if command.kind is CommandKind.REWARD:
            self._scorer.abort()
        if (host := self._hosts.used_by(command)) is None:
            return
        if command.kind is CommandKind.GENERATE:
            host.submit_urgent("abort")
            if self.ends_within(command, ABORT_GRACE_S):
                return
        host.kill()

    def source_state(self) -> dict[str, Any]:
        """Position, order and what is to be served again; batches under way count as not served."""
        return self._source.state_dict()

    def close_source(self) -> None:
        """Release a load that waits for what becomes of the batches under way."""
        self._source.close()

    def on_step(self, records: Sequence[Record]) -> Sequence[Record]:
        """Tell the source what became of its prompts, before a command of this step can ask it for more."""
        for record in records:
            if is_batch_end(record):
                self._tell_source(record)
                self._tell_samples(record)
        return [*self._gate.probe_rows(records), *self._sync_costs.rows(records), *super().on_step(records)]

    def _tell_source(self, record: Record) -> None:
        assert record.batch_id is not None
        reason = record.reason or str(record.dest)
        if record.dest == BatchState.TRAINED.value or reason in _NOTHING_TO_TRAIN:
            self._source.settle(record.batch_id)
            return
        attempted = record.dest != BatchState.CANCELLED.value
        rows = self._source.give_back(record.batch_id, reason, attempted=attempted)
        if rows:
            _log.warning("prompts_given_up", batch_id=record.batch_id, reason=reason, rows=list(rows))

    def _tell_samples(self, record: Record) -> None:
        assert record.batch_id is not None
        work = self.batch(record.batch_id)
        if self._samples is None or work is None or work.prompts is None or work.rollout is None:
            return
        prompts, rollout = work.prompts, work.rollout
        if not work.scoring:
            texts = partial(self._texts, prompts, rollout)
            self._samples.begun(prompts, rollout, texts)
        self._samples.ended(record.batch_id, str(record.dest), record.reason)

    def _texts(self, prompts: PromptBatch, rollout: Rollout) -> list[str]:
        return [each.text for each in self._scorer.completions(prompts, rollout)]

    def close(self, timeout_s: float) -> None:
        """End every engine, then the trainer's. An engine whose operation was given up is killed at once."""
        self._source.close()
        with ExitStack() as stack:
            stack.callback(self._hosts.join, timeout_s)
            stack.callback(super().close, timeout_s)
            stack.callback(self._close_samples, timeout_s)
            stack.callback(self._scorer.close)
            stack.callback(self._hosts.close, timeout_s)

    def _close_samples(self, timeout_s: float) -> None:
        if self._samples is not None and not self._samples.close(timeout_s):
            _log.warning("samples_left_behind", waited_s=timeout_s)

    def _host_of(self, command: Command) -> EngineHost:
        """The host that the command acts on; OperationAborted if an abort came before it was known."""
        host = self._hosts.of(command)
        if self.was_aborted(command):
            raise OperationAborted(f"{command.kind.value} was aborted before it reached its engine")
        return host
