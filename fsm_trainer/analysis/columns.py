"""What each column of each frame means, and its unit: the one place, from which docs/analysis.md has its tables.

`python -m fsm_trainer.analysis.columns` renews them.
"""

from __future__ import annotations

from pathlib import Path

_SINCE = "s since the log's first row"
_S, _STEPS, _VERSION = "s", "optimiser steps", "optimiser steps"

_EFFECTS = {
    "reward_mean": ("", "mean reward of its samples"),
    "ratio_mean": ("", "mean importance ratio of the trained policy to the one that sampled; 1 on fresh weights"),
    "ratio_max": ("", "largest importance ratio"),
    "clip_fraction": ("share", "ratios whose gradient the clipping took away"),
    "approx_kl": ("nats", "KL of the sampling to the trained policy, estimated by k3"),
    "logprob_gap": ("nats", "gap between the logprobs of rollout and trainer, if the run measures it"),
}

COLUMNS: dict[str, dict[str, tuple[str, str]]] = {
    "batches_frame": {
        "batch_id": ("", "prompt batch, from 0 in order of admission"),
        "worker": ("", "rollout worker that carried it"),
        "engine": ("", "rollout engine that generated it"),
        "state": ("", "how it ended: trained, dropped, failed, cancelled; or open"),
        "reason": ("", "why it ended so; NA of a trained one"),
        "admitted_at_s": (_SINCE, "a worker was given it"),
        "loaded_at_s": (_SINCE, "its prompts were there"),
        "started_at_s": (_SINCE, "its generation started"),
        "generated_at_s": (_SINCE, "its last completion was there"),
        "rewarded_at_s": (_SINCE, "it was scored, and offered to the train queue"),
        "queued_at_s": (_SINCE, "it entered the train queue; nan if the trainer took it from its worker"),
        "consumed_at_s": (_SINCE, "the trainer took it"),
        "ended_at_s": (_SINCE, "it was trained, dropped, failed or cancelled"),
        "tokens": ("tokens", "generated"),
        "rollout_version_first": (_VERSION, "version of the policy at its first token"),
        "rollout_version_last": (_VERSION, "version of the policy at its last token"),
        "train_version_started": (_VERSION, "train_version when its generation started"),
        "train_version_rewarded": (_VERSION, "train_version when it was offered to the train queue"),
        "train_version_consumed": (_VERSION, "train_version when the trainer took it"),
        "staleness": (_STEPS, "train_version_consumed less rollout_version_first"),
        "staleness_at_start": (_STEPS, "the part of it that its engine's weights had already when generation started"),
        "staleness_in_flight": (_STEPS, "the part until it was offered to the queue, that at the start included"),
        "staleness_in_queue": (_STEPS, "the part from then on: parked at its worker, or in the queue"),
        "loading_s": (_S, "admitted to loaded"),
        "ready_s": (_S, "loaded to started: its engine's gate was closed, or its version not there"),
        "generating_s": (_S, "started to generated"),
        "rewarding_s": (_S, "generated to rewarded"),
        "parked_s": (_S, "rewarded to queued (or consumed): the queue was full"),
        "queue_s": (_S, "queued to consumed; 0 if the trainer took it from its worker"),
        "training_s": (_S, "consumed to ended"),
        "generate_op_s": (_S, "what the engine's thread spent generating; the loop's part is not in it"),
        "reward_op_s": (_S, "what the reward thread spent"),
        "train_op_s": (_S, "what the trainer's thread spent"),
    },
    "steps_frame": {
        "step": (_VERSION, "train_version after the step"),
        "batch_id": ("", "batch it was taken on"),
        "stepped_at_s": (_SINCE, "the step was done"),
        "interval_s": (_S, "since the step before; of the first, since the run was up"),
        "training_s": (_S, "of the interval, the trainer took the step"),
        "syncing_s": (_S, "of the interval, it exported weights"),
        "saving_s": (_S, "of the interval, it wrote a checkpoint"),
        "checking_s": (_S, "of the interval, it checked a batch"),
        "waiting_s": (_S, "of the interval, it waited for a batch: the sum of those that follow"),
        "waiting_generation_s": (_S, "the furthest batch was being generated"),
        "waiting_reward_s": (_S, "it was being scored"),
        "waiting_prompts_s": (_S, "its prompts were not there"),
        "waiting_weight_sync_s": (_S, "it waited for its engine's weights"),
        "waiting_older_batch_s": (_S, "a finished batch had to let an older one go first"),
        "waiting_admission_s": (_S, "no batch was admitted"),
        "waiting_starting_s": (_S, "the run was starting"),
        "waiting_stopping_s": (_S, "the run was stopping"),
        "rollout_version_first": (_VERSION, "of its batch"),
        "staleness": (_STEPS, "of its batch"),
        "staleness_in_flight": (_STEPS, "of its batch"),
        "staleness_in_queue": (_STEPS, "of its batch"),
        "generating_s": (_S, "of its batch"),
        "rewarding_s": (_S, "of its batch"),
        "parked_s": (_S, "of its batch"),
        "queue_s": (_S, "of its batch"),
        "train_op_s": (_S, "what the trainer's thread spent on it"),
    },
    "residency_frame": {
        "window_start_s": (_SINCE, "begin of the window"),
        "window_end_s": (_SINCE, "its end"),
        "machine": ("", "run, trainer, rollout or engine"),
        "entity": ("", "which one, such as rollout-0"),
        "state": ("", "its state"),
        "cause": ("", "what it waited for; NA when it did not wait"),
        "time_s": (_S, "time spent so in the window"),
        "share": ("share", "of the window"),
    },
    "staleness_frame": {
        "batch_id": ("", "prompt batch"),
        "step": (_VERSION, "the optimiser step it gave; NA if none"),
        "engine": ("", "rollout engine that generated it"),
        "state": ("", "what became of it: trained, dropped or failed; training, if it is under way: open"),
        "reason": ("", "why it was dropped: stale, degenerate or no_step"),
        "consumed_at_s": (_SINCE, "the trainer took it"),
        "rollout_version_first": (_VERSION, "version of the policy at its first token"),
        "train_version_consumed": (_VERSION, "train_version when the trainer took it"),
        "staleness": (_STEPS, "their difference"),
        "staleness_at_start": (_STEPS, "as in batches_frame"),
        "staleness_in_flight": (_STEPS, "as in batches_frame"),
        "staleness_in_queue": (_STEPS, "as in batches_frame"),
        "tokens": ("tokens", "generated"),
        **_EFFECTS,
    },
    "sync_frame": {
        "version": (_VERSION, "version that was published"),
        "engine": ("", "rollout engine"),
        "loaded": ("", "whether the engine loaded it; false if it went on to a newer one, or the run ended"),
        "previous_version": (_VERSION, "what the engine loaded before; NA if nothing"),
        "lag": (_STEPS, "train_version at the end of the load less the version: 0 if it is the newest"),
        "due_at_s": (_SINCE, "the export began"),
        "exported_at_s": (_SINCE, "the snapshot was there"),
        "closed_at_s": (_SINCE, "the engine's gate was closed for it; nan at the first load"),
        "load_at_s": (_SINCE, "the load began"),
        "loaded_at_s": (_SINCE, "the load was done, the gate open again"),
        "export_s": (_S, "what the trainer's thread spent on the export"),
        "drain_s": (_S, "gate closed to load begun: the engine finished its work, or waited for the snapshot"),
        "load_s": (_S, "what the engine's thread spent on the load"),
        "closed_s": (_S, "how long the engine began no generation for it"),
        "publish_s": (_S, "from due to loaded"),
    },
}
"""Frame -> column -> (unit, meaning). `steps_frame` has the metrics of the run besides, in columns of their names."""

BEGIN, END = "<!-- columns: made by `python -m fsm_trainer.analysis.columns` -->", "<!-- end of columns -->"
DOCS = Path(__file__).parents[2] / "docs" / "analysis.md"


def tables() -> str:
    """All columns as Markdown."""
    sections = []
    for frame, columns in COLUMNS.items():
        lines = [f"### `{frame}`", "", "| column | unit | meaning |", "|---|---|---|"]
        lines += [f"| `{name}` | {unit} | {meaning} |" for name, (unit, meaning) in columns.items()]
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def with_tables(page: str) -> str:
    """The page, with today's tables between its marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{tables()}\n\n{END}{tail}"


if __name__ == "__main__":
    DOCS.write_text(with_tables(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
