"""Advice in words: what bounds a run, what each side waits for, and which other setting is predicted to help.

Predictions come from `simulate.whatif`: the scheduler itself, in virtual time, on the durations that the run recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import pyarrow.compute as pc

from fsm_trainer.analysis.causes import CAUSES
from fsm_trainer.eventlog.reader import EventLog
from fsm_trainer.report.run_data import RunData
from fsm_trainer.simulate.settings import FLAGS, Setting, async_algo, devices_needed
from fsm_trainer.simulate.whatif import KNOWN_ERROR, Prediction, Scales, WhatIf, whatif, within

LEARNT_STEPS = 1000
"""Optimiser steps whose durations the predictions are made from: the first of the run."""
SIMULATED_STEPS = 300
"""Steps simulated for each setting, taken from all of those."""
GAIN = KNOWN_ERROR
"""A setting that cuts the wall time by less than this share may not cut it at all, and is not worth a sentence."""
SAME = 0.01
"""Of a combination, a part is named only if it cuts the wall time by this share."""
_SHOWN = 3
_HALVED = {
    "generation": ("generation", Scales(rollout=0.5)),
    "reward": ("the reward", Scales(reward=0.5)),
    "training": ("the train step", Scales(train=0.5)),
    "sync": ("a weight sync", Scales(sync=0.5)),
}
"""What bounds a run, in words, and twice as fast."""

_BOUND = {
    "generation": "Generation-bound",
    "reward": "Bound by rewards",
    "training": "Training-bound",
    "sync": "Bound by weight syncs",
    "balanced": "Balanced: generation and training take about as long",
}


@dataclass(frozen=True)
class Suggestion:
    """Another setting and what it is predicted to change."""

    what: str
    """All that changes, in words."""
    flags: str
    """What to give to `fsm-train` besides the run's own flags; of --rollout-devices how many."""
    wall_change: float
    """Of the wall time, as a share: -0.31 is 31 % less."""
    staleness: float
    """Predicted mean staleness of trained batches."""


@dataclass(frozen=True)
class Advice:
    """What to say about a run."""

    bound: str | None
    """generation, reward, training, sync or balanced; None if the run never trained."""
    sentences: tuple[str, ...]
    suggestions: tuple[Suggestion, ...]
    self_error: float | None
    """The prediction of the run's own setting against what it took, as a share; None without a prediction."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return asdict(self)


def advise(data: RunData) -> Advice:
    """Advice on a run, finished or not."""
    sides = data.summary.sides
    if sides is None:
        return Advice(None, ("The run never trained, so there is nothing to advise on.",), (), None)
    sentences = [_bound(data), *_waits(data), *_losses(data)]
    try:
        predictor = _Predictor.of(data.log)
        suggestions = predictor.suggestions()
        faster = predictor.halved(sides.bound)
    except (KeyError, TypeError, ValueError) as error:
        return Advice(sides.bound, (*sentences, f"Nothing could be predicted: {error}."), (), None)
    sentences += [_sentence(s) for s in suggestions]
    if not suggestions:
        sentences.append(f"No setting next to this one is predicted to cut wall time by {_percent(GAIN)} or more.")
    if faster is not None:
        sentences.append(faster)
    sentences.append(
        f"Predictions are the scheduler's own, run on the durations recorded here in {predictor.known}; the setting "
        f"that this run had comes out {within(predictor.self_error)}, which says nothing of others: those may be off "
        f"by {_percent(KNOWN_ERROR)} or more (docs/what-if.md)."
    )
    return Advice(sides.bound, tuple(sentences), tuple(suggestions), predictor.self_error)


def _bound(data: RunData) -> str:
    sides, overlap = data.summary.sides, data.summary.overlap
    assert sides is not None
    text = (
        f"{_BOUND[sides.bound]}: training idles {_percent(sides.trainer_idle)}, rollout {_percent(sides.rollout_idle)}"
    )
    if overlap is None:
        return text + "."
    if data.summary.synchronous:
        return (
            f"{text}. Nothing overlaps in a synchronous run; full overlap would make a step up to {overlap.limit:.2f} "
            f"times as fast with these durations."
        )
    return (
        f"{text}. Overlap makes a step {overlap.speedup:.2f} times as fast as one part after the other, "
        f"{_percent(overlap.reached)} of what it can give with these durations."
    )


def _waits(data: RunData) -> Iterator[str]:
    """What each side waits for, where that is 5 % or more of the time."""
    for machine, who in (("trainer", "The trainer"), ("rollout", "A rollout worker")):
        named = [f"{_percent(share)} {CAUSES[c]}" for c, share in data.waits(machine).items() if share >= 0.05]
        if named:
            yield f"{who} waits {', '.join(named)}."


def _losses(data: RunData) -> Iterator[str]:
    """What was generated in vain."""
    batches, drops = data.summary.batches, data.summary.drops
    consumed = batches["trained"] + batches["dropped"]
    if (stale := drops.get("stale", 0)) >= 0.01 * max(consumed, 1) and stale:
        yield (
            f"{_percent(stale / consumed)} of the batches were generated and then dropped as stale; "
            f"--async-admission paced never generates one that will be."
        )
    if (flat := drops.get("degenerate", 0)) >= 0.05 * max(consumed, 1) and flat:
        yield (
            f"{_percent(flat / consumed)} of the batches had equal rewards in every prompt group and taught nothing: "
            f"the prompts are too easy or too hard, or --n-samples is too small."
        )


@dataclass(frozen=True)
class _Predictor:
    """What-if on a run, or on the first steps of a long one."""

    log: EventLog
    known: str
    """How much of the run it learns from, in words."""
    own: WhatIf
    """The run's own setting."""

    @classmethod
    def of(cls, log: EventLog) -> _Predictor:
        """ValueError if the log holds nothing to learn from."""
        part, known = _learnt_from(log)
        return cls(part, known, whatif(part, most_steps=SIMULATED_STEPS))

    @property
    def self_error(self) -> float:
        """How far the run's own setting is predicted from what it took, as a share."""
        return self.own.self_error

    def suggestions(self) -> list[Suggestion]:
        """The settings next to the run's own that are predicted to help, the best first.

        Of each combination only what it needs is named, and a costlier setting only if it gives a `GAIN` more.
        """
        now = self.own.recorded
        start = Setting() if now.without_lead else now
        choices = [_parts(start, changes) for changes in _alternatives(start, synchronous=now.without_lead)]
        answer = whatif(self.log, settings=dict.fromkeys(s for c in choices for s in c), most_steps=SIMULATED_STEPS)
        by_setting = {p.setting: p for p in answer.predictions}
        found: list[Suggestion] = []
        for choice in choices:
            suggestion = self._suggestion(_least([by_setting[s] for s in choice]))
            least = min([-GAIN, *(s.wall_change - GAIN for s in found)])
            if suggestion is not None and suggestion.wall_change <= least:
                found.append(suggestion)
        return sorted(found, key=lambda s: s.wall_change)[:_SHOWN]

    def _suggestion(self, prediction: Prediction | None) -> Suggestion | None:
        """Against the prediction of the run's own setting, so that what both have wrong cancels."""
        own, now = self.own.self_check, self.own.recorded
        if prediction is None or prediction.wall_s is None or not own.wall_s or prediction.staleness_mean is None:
            return None
        setting, run_config = prediction.setting, self.log.run_config
        before = asdict(Setting() if now.without_lead else now)
        new = {name: value for name, value in asdict(setting).items() if value != before[name]}
        words = [_WORDS[name].format(value) for name, value in new.items()]
        flags = [f"{FLAGS[name]} {value}" for name, value in new.items() if name != "engines"]
        if now.without_lead:
            words.insert(0, "the async algorithm")
            flags.insert(0, async_algo(run_config))
        text = " ".join(flags)
        if "engines" in new:
            text += f"{', and ' * bool(text)}--rollout-devices with {devices_needed(setting, run_config)} devices"
        return Suggestion(_listed(words), text, prediction.wall_s / own.wall_s - 1.0, prediction.staleness_mean)

    def halved(self, bound: str) -> str | None:
        """What the run would take if what bounds it were twice as fast; None for a balanced one."""
        if bound not in _HALVED:
            return None
        what, scales = _HALVED[bound]
        answer = whatif(self.log, scales=scales, most_steps=SIMULATED_STEPS)
        faster, own = answer.predictions[0].wall_s, answer.self_check.wall_s
        if faster is None or not own:
            return None
        return f"If {what} took half the time, wall time is predicted to be {_percent(1 - faster / own)} shorter."


_WORDS = {
    "admission": "{} admission",
    "queue_size": "a train queue of {}",
    "max_staleness": "a staleness bound of {}",
    "workers": "{} rollout workers",
    "engines": "{} rollout engines",
    "sync_interval": "a weight sync interval of {}",
}


def _alternatives(now: Setting, *, synchronous: bool) -> list[dict[str, int | str]]:
    """Changes of a setting, the cheap ones first, a further device last; for a synchronous run of the async default."""
    if synchronous:
        return [{}, {"workers": 2, "engines": 2}]
    more, twice = now.workers + 1, 2 * now.sync_interval
    # As many batches may be under way as the bound allows, so more workers need more of it.
    bound, rarer = max(now.max_staleness, more - 1), max(now.max_staleness, twice)
    found: list[dict[str, int | str]] = [
        {"queue_size": now.queue_size + 1},
        {"max_staleness": now.max_staleness + 1},
        {"max_staleness": rarer, "sync_interval": twice},
        {"max_staleness": bound, "workers": more},
        {"max_staleness": bound, "workers": max(now.workers, now.engines + 1), "engines": now.engines + 1},
        {"max_staleness": bound, "workers": more, "engines": now.engines + 1},
    ]
    if now.sync_interval > 1:
        found.insert(0, {"sync_interval": now.sync_interval // 2})
    if now.admission != "paced":
        found.insert(0, {"admission": "paced"})
    return found


def _parts(now: Setting, changes: Mapping[str, int | str]) -> list[Setting]:
    """The setting with none, some and all of the changes, the fewest first."""
    some = (combinations(changes.items(), n) for n in range(len(changes) + 1))
    return list(dict.fromkeys(Setting(**{**asdict(now), **dict(taken)}) for chosen in some for taken in chosen))


def _least(predictions: Sequence[Prediction]) -> Prediction | None:
    """The first, hence that of the fewest changes, which is as quick as the quickest; None if none can run."""
    walls = [p.wall_s for p in predictions if p.wall_s is not None]
    return next((p for p in predictions if p.wall_s is not None and p.wall_s <= min(walls) * (1 + SAME)), None)


def _learnt_from(log: EventLog) -> tuple[EventLog, str]:
    """The log as far as the first `LEARNT_STEPS` steps of the run, or the whole of it, and which that is."""
    table = log.table
    is_step = pc.and_(pc.equal(table["kind"], "version"), pc.equal(pc.fill_null(table["trigger"], ""), "step"))
    steps = pc.indices_nonzero(is_step)
    if len(steps) <= LEARNT_STEPS:
        return log, f"its {len(steps)} steps"
    first = table.slice(0, steps[LEARNT_STEPS - 1].as_py() + 1)
    return replace(log, table=first, complete=False), f"its first {LEARNT_STEPS} steps"


def _sentence(s: Suggestion) -> str:
    return (
        f"With {s.what}, wall time is predicted to be {_percent(-s.wall_change)} shorter, "
        f"at a mean staleness of {s.staleness:.1f} ({s.flags})."
    )


def _listed(words: Sequence[str]) -> str:
    return " and ".join([*filter(None, [", ".join(words[:-1])]), words[-1]]) if words else ""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
