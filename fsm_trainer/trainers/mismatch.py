"""The mismatch gate: rollout engines and the trainer must give the same tokens the same logprobs for one version.

Three places where they are held against each other, each before anything is learnt from what may be wrong: after a load
of weights (a probe that both sides score), after a generation (the engine's own scores of a few of its samples), and
in a step on a batch that the current weights generated. docs/mismatch.md says what each catches and costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from fsm_trainer.config import TrainConfig
from fsm_trainer.core.batch import AsyncTrainBatch
from fsm_trainer.core.events import Record
from fsm_trainer.engines.base import Rollout, Scores, TrainEngine
from fsm_trainer.engines.logprob_gap import GapLimit, LogprobGap, LogprobMismatch
from fsm_trainer.trainers.sync_costs import load_row, loads_among

PROBE_TOKENS = 256
"""Tokens of a probe sequence at most."""
RESCORED_SAMPLES = 2
RESCORED_TOKENS = 64
"""Samples of a batch that the engine scores again, and how many tokens of each."""
_PROBE_TEMPERATURE = 1.0
_log = structlog.get_logger("fsm_train")


class Calls(Protocol):
    """The part of an engine's host that is used here."""

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Call a method of the engine."""


@dataclass
class MismatchGate:
    """Compares, and raises LogprobMismatch; used by the trainer's lane and the engines' lanes at once."""

    limit: GapLimit | None
    """None: nothing is compared."""
    probe: tuple[tuple[int, ...], ...] = ()
    """Token ids of a few sequences that both sides score after each sync; empty: no probe."""
    temperature: float = 1.0
    """At which the run samples and trains."""
    gaps: dict[int, LogprobGap] = field(default_factory=dict)
    """Engine -> gap of the probe at its newest load."""
    _expected: dict[int, Scores] = field(default_factory=dict)
    _served: dict[int, int | None] = field(default_factory=dict)
    """Engine -> version of its newest load; None while it loads, which may be amid a generation."""
    _told: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, config: TrainConfig, prompts: Sequence[Sequence[int]] = ()) -> MismatchGate:
        """The gate of a resolved configuration with these prompts as its probe; one of one token has no score."""
        probe = tuple(tuple(prompt[:PROBE_TOKENS]) for prompt in prompts if len(prompt) > 1)
        return cls(GapLimit(config.max_logprob_gap) if config.max_logprob_gap else None, probe, config.temperature)

    def limit_of_step(self, batch: AsyncTrainBatch, train_version: int) -> GapLimit | None:
        """What a step holds its batch to: where other weights drew some of it, its gap is only measured."""
        return self.limit if batch.rollout_versions == {train_version} else None

    def exported(self, version: int, trainer: TrainEngine) -> None:
        """Score the probe with the weights that were just published as `version`, before a step changes them."""
        if self.limit is None or not self.probe:
            return
        scores = trainer.score(self.probe, _PROBE_TEMPERATURE)
        if scores is None:
            self._tell_unchecked("the train engine cannot score given tokens, so loads of weights are not checked")
            return
        if not all(math.isfinite(score) for row in scores for score in row):
            raise FloatingPointError(
                f"the weights after optimiser step {version} give logprobs that are not finite: training has diverged; "
                f"try a lower --lr, and go on from an earlier checkpoint with --resume"
            )
        self._expected[version] = scores

    def released(self, version: int) -> None:
        """The version will not be loaded any more."""
        self._expected.pop(version, None)

    def loading(self, engine: int) -> None:
        """An engine begins to load; `check_load` says that it has."""
        self._served[engine] = None

    def check_load(self, engine: int, version: int, host: Calls) -> None:
        """Have an engine score the probe with what it has just loaded."""
        expected = self._expected.get(version)
        self._served[engine] = version
        self.gaps.pop(engine, None)
        if self.limit is None or expected is None:
            return
        scores: Scores | None = host.submit("score", self.probe, _PROBE_TEMPERATURE).result()
        if scores is None:
            self._tell_unchecked(f"engine {engine} cannot score given tokens, so its loads of weights are not checked")
            return
        gap = self.gaps[engine] = LogprobGap.between(expected, scores)
        if not self.limit.admits(gap):
            raise LogprobMismatch(
                f"engine {engine} has loaded version {version} but gives the {len(self.probe)} probe prompts other "
                f"logprobs than the trainer did: {self._numbers(gap)}. The load is refused. Likely causes: weights "
                f"damaged or lost on the way, an older version still in place, another model, or another precision",
                gap,
            )

    def check_generation(
        self, engine: int, prompts: Sequence[Sequence[int]], rollout: Rollout, host: Calls
    ) -> LogprobGap | None:
        """Have an engine score a few samples that it has just generated; None where nothing could be compared.

        Only with the weights that drew them: an engine may load others amid the generation, or before it has scored.
        """
        if self.limit is None or not self._still_serves(engine, rollout):
            return None
        picked = _picked(prompts, rollout)
        scores: Scores | None = host.submit("score", [(*p, *t) for p, t, _ in picked], self.temperature).result()
        if scores is None:
            self._tell_unchecked(f"engine {engine} cannot score given tokens, so its generations are not checked")
            return None
        if not self._still_serves(engine, rollout):
            return None
        gap = LogprobGap.between(
            [row[len(prompt) - 1 :] for (prompt, _, _), row in zip(picked, scores, strict=True)],
            [logprobs for _, _, logprobs in picked],
        )
        if not self.limit.admits(gap):
            raise LogprobMismatch(
                f"engine {engine} generated with version {rollout.version_first} but scores its own samples otherwise: "
                f"{self._numbers(gap)}. The batch is refused. Likely causes: a cache that is older than the weights, "
                f"a prompt that the engine changed (template, BOS, truncation), or logprobs of another distribution "
                f"(temperature, top-p, top-k)",
                gap,
            )
        return gap

    def probe_rows(self, records: Sequence[Record]) -> list[Record]:
        """The log's metric rows of the loads among these records: the probe's gap, by engine and version."""
        return [
            load_row(load, name, value, rate)
            for load in loads_among(records)
            if load.engine in self.gaps
            for gap in [self.gaps[load.engine]]
            for name, value, rate in (
                ("probe_gap", gap.mean, (gap.absolute, float(gap.tokens))),
                ("probe_gap_max", gap.largest, None),
            )
        ]

    def explain_step(self, error: LogprobMismatch, batch_id: int, version: int, engine: int | None) -> LogprobMismatch:
        """The error of a refused step, with what a person needs to know."""
        who = "its producer" if engine is None else f"engine {engine}"
        return LogprobMismatch(
            f"batch {batch_id} was generated by {who} with version {version}, but the trainer's own logprobs for that "
            f"version are others: {self._numbers(error.gap)}. The step was not taken. Likely causes: a cache that is "
            f"older than the weights, wrong weights, tokens other than those generated (template, BOS, truncation), or "
            f"logprobs of another distribution (temperature, top-p, top-k)",
            error.gap,
        )

    def _still_serves(self, engine: int, rollout: Rollout) -> bool:
        return rollout.version_first == rollout.version_last == self._served.get(engine, rollout.version_last)

    def _numbers(self, gap: LogprobGap) -> str:
        return f"{gap} (--max-logprob-gap allows {self.limit})"

    def _tell_unchecked(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            _log.warning("mismatch_unchecked", message=why)


def _picked(
    prompts: Sequence[Sequence[int]], rollout: Rollout
) -> list[tuple[Sequence[int], tuple[int, ...], tuple[float, ...]]]:
    """Prompt, tokens and logprobs of the first samples of prompts spread over the batch."""
    places = range(0, len(prompts), max(1, -(-len(prompts) // RESCORED_SAMPLES)))
    samples = [(prompts[at], rollout.groups[at][0]) for at in places]
    return [(prompt, s.tokens[:RESCORED_TOKENS], s.logprobs[:RESCORED_TOKENS]) for prompt, s in samples]
