"""Causes of waits in words: what comes after "waits"."""

CAUSES: dict[str, str] = {
    "generation": "for generation",
    "reward": "for rewards",
    "prompts": "for prompts",
    "weight_sync": "for engines to load new weights",
    "older_batch": "for an older batch than those that are finished",
    "admission": "for a batch to be admitted",
    "staleness_bound": "for training to catch up (the staleness bound)",
    "queue_full": "for a place in the train queue",
    "policy_version": "for the weights that the next batch must be generated with",
    "max_steps": "for the end: all steps are under way",
    "exhausted": "for the end: the prompts are used up",
    "starting": "for the run to start",
    "draining": "for the run to end",
    "stopping": "for the run to end",
    "generating": "for its generation to finish",
    "snapshot": "for the snapshot of the weights",
    "no_batch": "for a batch",
}
