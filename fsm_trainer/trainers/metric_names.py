"""The name and the meaning of every number that a train step or a load leaves in the log.

`python -m fsm_trainer.trainers.metric_names` rewrites the table in docs/metrics.md; tests hold the page and real runs
to this list.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PAGE = "docs/metrics.md"
_BEGIN, _END = "<!-- metrics: begin (generated) -->", "<!-- metrics: end -->"


class Metric(NamedTuple):
    """One metric. A rate is numerator / denominator; any other is only a value."""

    name: str
    meaning: str
    numerator: str | None = None
    denominator: str | None = None


_GAP = "sum of |trainer - rollout|"
_TOKENS = "tokens in the loss"
_RATIOS = "ratios: tokens, or sequences for a sequence-level ratio"

METRICS: tuple[Metric, ...] = (
    Metric("reward_mean", "mean reward of all samples that have one", "sum of rewards", "samples with a reward"),
    Metric("reward/NAME", "the same of one reward function, where there are several", "sum", "samples it scored"),
    Metric("reward_errors", "calls of reward functions that failed"),
    Metric("reward_timeouts", "calls that came too late"),
    Metric("reward_unscorable", "samples that no function could score"),
    Metric("advantage_mean", "mean advantage of the sequences in the loss", "sum", "sequences"),
    Metric("advantage_abs_mean", "mean absolute advantage", "sum", "sequences"),
    Metric("advantage_square_mean", "mean square of the advantages", "sum", "sequences"),
    Metric("advantage_std", "their standard deviation"),
    Metric("advantage_min", "least advantage"),
    Metric("advantage_max", "largest advantage"),
    Metric("zero_variance_fraction", "prompt groups without a gradient: all rewards alike", "such groups", "groups"),
    Metric("groups_used_fraction", "prompt groups trained on, of those generated", "groups used", "groups"),
    Metric("overlong_penalty_mean", "what the length penalty adds to a reward", "sum", "samples"),
    Metric("overlong_fraction", "samples that it touches", "such samples", "samples"),
    Metric("prompt_tokens_mean", "prompt length, tokens", "prompt tokens", "sequences trained on"),
    Metric("completion_tokens_mean", "completion length, tokens", "completion tokens", "sequences trained on"),
    Metric("completion_tokens_min", "shortest completion in the loss, tokens"),
    Metric("completion_tokens_max", "longest completion in the loss, tokens"),
    Metric("completion_truncated_fraction", "samples cut off at --max-new-tokens", "such samples", "samples"),
    Metric(
        "span_old_fraction",
        "tokens drawn by an older version than their sample's newest",
        "such tokens",
        "completion tokens trained on",
    ),
    Metric("loss", "loss of the optimiser batch", "loss", "steps"),
    Metric("grad_norm", "global gradient norm before clipping"),
    Metric("lr", "learning rate of the step"),
    Metric("loss_tokens", "tokens in the loss"),
    Metric("skipped_steps", "steps so far that a value that is not finite has cost (--nonfinite skip)"),
    Metric("entropy", "entropy of the current policy, nats a token", "sum", _TOKENS),
    Metric("kl", "estimate of KL(current || reference), nats a token", "sum", _TOKENS),
    Metric("approx_kl", "k3 estimate of KL(rollout || current), nats a token", "sum", _TOKENS),
    Metric("ratio_mean", "importance ratio current / rollout; 1 for a fresh batch", "sum of ratios", _RATIOS),
    Metric("ratio_min", "least ratio"),
    Metric("ratio_max", "largest ratio"),
    Metric("clip_fraction_low", "ratios clipped below, the gradient with them", "such ratios", _RATIOS),
    Metric("clip_fraction_high", "ratios clipped above", "such ratios", _RATIOS),
    Metric("truncated_fraction", "tokens whose correction weight was capped", "such tokens", _TOKENS),
    Metric("masked_fraction", "tokens that the correction left out", "such tokens", _TOKENS),
    Metric("span_truncated_fraction", "tokens whose old span's weight was capped", "such tokens", _TOKENS),
    Metric(
        "effective_sample_size",
        "(sum w)^2 / sum w^2 of the importance weights, as a share",
        "(sum w)^2 / sum w^2",
        "weights",
    ),
    Metric("logprob_gap", "gap of the trainer's logprobs to the rollout's, nats a token", _GAP, _TOKENS),
    Metric("logprob_gap_signed", "the same with its sign: the mean log-ratio", "sum of trainer - rollout", _TOKENS),
    Metric("logprob_gap_max", "largest |trainer - rollout| of a token"),
    Metric("rescore_gap", "gap of the engine's own scores of a few samples to what it recorded", _GAP, "tokens scored"),
    Metric("rescore_gap_max", "largest of them"),
    Metric("probe_gap", "of a load: gap of engine and trainer on the probe prompts", _GAP, "tokens of the probe"),
    Metric("probe_gap_max", "largest of them"),
    Metric("sync_pause_s", "of a load: seconds until what ran stood still; none if nothing did"),
    Metric("sync_transfer_s", "of a load: seconds to read and install the weights"),
    Metric("sync_resume_s", "of a load: seconds until it went on; none likewise"),
    Metric("sync_bytes", "of a load: bytes of the weights that came over"),
    Metric("staleness_mean", "steps that the batch's weights lagged", "sum of staleness", "batches"),
    Metric("staleness_max", "largest of them"),
    Metric("queue_len", "batches in the train queue"),
    Metric("tokens", "prompt and completion tokens of the batch"),
    Metric("tokens_per_s", "prompt and completion tokens a second of a train step", "tokens", "seconds"),
    Metric("rollout_tokens_per_s", "completion tokens a second of a generation", "tokens", "seconds"),
    Metric("mfu", "model FLOPs utilisation of the train step, on a GPU that is known", "share x seconds", "seconds"),
    Metric("rollout_s", "seconds to generate the batch"),
    Metric("reward_s", "seconds to score it"),
    Metric("materialize_s", "seconds to align it"),
    Metric("score_cpu_s", "processor seconds of both in this process, which hold up a train step on the CPU"),
    Metric("train_s", "seconds of the train call"),
    Metric("sync_s", "seconds of publishing and loading weights since the step before"),
    Metric("wait_s", "seconds that the trainer waited since the step before"),
)
"""In the order of the page."""

BY_NAME = {metric.name: metric for metric in METRICS}


def find(name: str) -> Metric | None:
    """The metric of that name; one of a reward function is `reward/NAME`."""
    return BY_NAME.get("reward/NAME" if name.startswith("reward/") else name)


def table() -> str:
    """Markdown."""
    lines = ["| metric | meaning | numerator | denominator |", "|---|---|---|---|"]
    for metric in METRICS:
        cells = (f"`{metric.name}`", metric.meaning, metric.numerator or "", metric.denominator or "")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """`page` with the generated part between its two marks renewed."""
    before, rest = page.split(_BEGIN)
    return f"{before}{_BEGIN}\n\n{table()}\n{_END}{rest.split(_END)[1]}"


if __name__ == "__main__":
    path = Path(__file__).resolve().parents[2] / PAGE
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
