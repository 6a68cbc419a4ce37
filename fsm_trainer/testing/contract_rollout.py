"""The promises of a rollout engine; see `contract.engine_contract`."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from fsm_trainer.engines.base import Rollout, RolloutEngine, RolloutRequest, SamplingParams, Snapshot
from fsm_trainer.engines.logprob_gap import GapLimit, LogprobGap

PROMPTS = ((5, 6, 7, 8), (9,), (10, 11))
POLL_S = 0.005
ENDING_S = 5.0
"""How long a thread that was told to end may take: transformers does not wait for the pool that it loads with."""
SCORES = GapLimit(0.2)
"""Wide enough for bfloat16."""


class RolloutContract:
    """Each public method but `checks` is one promise."""

    def __init__(
        self,
        factory: Callable[[], RolloutEngine],
        *,
        sampling: SamplingParams,
        publish: Callable[[int], Snapshot] | None = None,
        prompts: tuple[tuple[int, ...], ...] = PROMPTS,
        slow_factory: Callable[[], RolloutEngine] | None = None,
        broken_snapshot: Snapshot | None = None,
    ) -> None:
        """See `engine_contract`."""
        self._factory = factory
        self._sampling = sampling
        self._publish = publish or (lambda version: Snapshot(version, f"contract:{version}", 0))
        self._slow_factory = slow_factory
        self._broken = broken_snapshot
        self._request = RolloutRequest(3, prompts, seed=11)

    def checks(self) -> list[Callable[[], None]]:
        """The promises that can be checked with what was given."""
        found = [
            self.serves_nothing_before_weights,
            self.reports_the_version_it_loaded,
            self.groups_follow_the_prompts,
            self.tokens_and_logprobs_align,
            self.same_seed_same_samples,
            self.scores_agree_with_its_samples,
            self.abort_is_a_no_op_when_idle,
            self.close_leaves_no_thread,
        ]
        if self._sampling.temperature > 0:
            found.append(self.another_seed_gives_other_samples)
        if self._slow_factory is not None:
            found.append(self.abort_ends_a_generation)
        if self._broken is not None:
            found.append(self.a_failed_load_never_serves_half_loaded_weights)
        return found

    def serves_nothing_before_weights(self) -> None:
        """`generate` raises until a first `load_weights` has succeeded."""
        with self._engine(self._factory) as engine:
            assert _raises(lambda: engine.generate(self._request)), "generate returned before any weights were loaded"

    def reports_the_version_it_loaded(self) -> None:
        """`load_weights` returns, and `generate` stamps, the version of the snapshot loaded last."""
        with self._engine(self._factory) as engine:
            for version in (0, 3, 7):
                served = engine.load_weights(self._publish(version)).version
                assert served == version, f"loaded version {version}, reports {served}"
                rollout = engine.generate(self._request)
                stamps = (rollout.version_first, rollout.version_last)
                assert stamps == (version, version), f"serves version {version}, stamps {stamps}"
                drew = {span.version for group in rollout.groups for sample in group for span in sample.spans}
                assert drew <= {version}, f"serves version {version}, spans of versions {sorted(drew)}"

    def groups_follow_the_prompts(self) -> None:
        """One group for each prompt, `n_samples` samples each."""
        groups = self._rollout().groups
        wanted = [self._sampling.n_samples] * len(self._request.prompts)
        assert [len(group) for group in groups] == wanted, f"groups of {[len(g) for g in groups]}, expected {wanted}"

    def tokens_and_logprobs_align(self) -> None:
        """Each token has its logprob, at most 0 and finite, and its version's span; no sample is longer than asked."""
        for sample in (sample for group in self._rollout().groups for sample in group):
            assert len(sample.tokens) == len(sample.logprobs), f"{len(sample.tokens)} tokens, {sample.logprobs}"
            assert len(sample.tokens) <= self._sampling.max_new_tokens, f"{len(sample.tokens)} tokens"
            assert all(math.isfinite(p) and p <= 0 for p in sample.logprobs), f"logprobs {sample.logprobs}"
            assert sample.finish_reason in ("stop", "length"), f"finish_reason {sample.finish_reason!r}"
            whole = sample.finish_reason == "stop" or len(sample.tokens) == self._sampling.max_new_tokens
            drawn = sum(span.tokens for span in sample.spans)
            assert drawn in (0, len(sample.tokens)), f"spans {sample.spans} of a sample of {len(sample.tokens)} tokens"
            assert whole, f"stopped by length after {len(sample.tokens)} of {self._sampling.max_new_tokens} tokens"

    def same_seed_same_samples(self) -> None:
        """Seed, prompts and weights fix the samples: again, and on another engine."""
        with self._engine(self._factory) as engine:
            engine.load_weights(self._publish(0))
            first, again = engine.generate(self._request), engine.generate(self._request)
        assert first.groups == again.groups, "the same request gave other samples the second time"
        assert first.groups == self._rollout().groups, "the same request gave other samples on another engine"

    def another_seed_gives_other_samples(self) -> None:
        """Sampling takes its randomness from the request's seed."""
        with self._engine(self._factory) as engine:
            engine.load_weights(self._publish(0))
            seen = {engine.generate(replace(self._request, seed=seed)).groups for seed in range(5)}
        assert len(seen) > 1, "five seeds gave the same samples"

    def scores_agree_with_its_samples(self) -> None:
        """`score` gives the tokens of a sample the logprobs that `generate` recorded, or None throughout."""
        with self._engine(self._factory) as engine:
            engine.load_weights(self._publish(0))
            groups = engine.generate(self._request).groups
            rows = [(p, s) for p, group in zip(self._request.prompts, groups, strict=True) for s in group]
            scores = engine.score([(*p, *s.tokens) for p, s in rows], self._sampling.temperature or 1.0)
        if scores is None:
            return
        lengths = [len(p) + len(s.tokens) - 1 for p, s in rows]
        assert [len(values) for values in scores] == lengths, "score gives every token but the first a number"
        own = [values[len(p) - 1 :] for (p, _), values in zip(rows, scores, strict=True)]
        gap = LogprobGap.between(own, [s.logprobs for _, s in rows])
        assert SCORES.admits(gap), f"scores and recorded logprobs: {gap}, expected at most {SCORES}"

    def abort_is_a_no_op_when_idle(self) -> None:
        """`abort` before a generation does not touch it."""
        expected = self._rollout().groups
        with self._engine(self._factory) as engine:
            engine.abort()
            engine.load_weights(self._publish(0))
            engine.abort()
            assert engine.generate(self._request).groups == expected, "an abort while idle changed the next generation"

    def abort_ends_a_generation(self) -> None:
        """`abort` from another thread makes a running `generate` raise, and the engine can load weights after it."""
        assert self._slow_factory is not None
        with self._engine(self._slow_factory) as engine:
            engine.load_weights(self._publish(0))
            raised: list[bool] = []
            thread = threading.Thread(target=lambda: raised.append(_raises(lambda: engine.generate(self._request))))
            thread.start()
            # Before the generation has begun an abort is a no-op, so one is not enough.
            while thread.is_alive():
                engine.abort()
                thread.join(POLL_S)
            assert raised == [True], "generate returned in spite of abort; is slow_factory slow enough?"
            assert engine.load_weights(self._publish(1)).version == 1, "weights cannot be loaded after an abort"

    def a_failed_load_never_serves_half_loaded_weights(self) -> None:
        """After a load that raised, `generate` raises or still serves the old version whole."""
        assert self._broken is not None
        expected = self._rollout().groups
        with self._engine(self._factory) as engine:
            engine.load_weights(self._publish(0))
            broken = self._broken
            assert _raises(lambda: engine.load_weights(broken)), "loading the broken snapshot raised nothing"
            try:
                rollout = engine.generate(self._request)
            except Exception:  # it serves nothing, which is right
                return
            whole = rollout.groups == expected and rollout.version_first == rollout.version_last == 0
            assert whole, "after a failed load it serves something that is not the old version"

    def close_leaves_no_thread(self) -> None:
        """`close` ends whatever the engine started in this process."""
        before = set(threading.enumerate())
        with self._engine(self._factory) as engine:
            engine.load_weights(self._publish(0))
            engine.generate(self._request)
        left = set(threading.enumerate()) - before
        for thread in left:
            thread.join(ENDING_S)
        names = [thread.name for thread in left if thread.is_alive()]
        assert not names, f"threads left after close: {names}"

    def _rollout(self) -> Rollout:
        with self._engine(self._factory) as engine:
            engine.load_weights(self._publish(0))
            return engine.generate(self._request)

    @contextmanager
    def _engine(self, factory: Callable[[], RolloutEngine]) -> Iterator[RolloutEngine]:
        engine = factory()
        engine.start()
        try:
            yield engine
        finally:
            engine.close()


def _raises(call: Callable[[], object]) -> bool:
    try:
        call()
    except Exception:  # which one is the engine's own affair
        return True
    return False
