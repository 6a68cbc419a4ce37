"""Reward of the copy task: the share of positions that match, over the longer of the two texts."""


def reward_fn(record):
    """1.0 for the exact answer, less for each wrong, missing or surplus character."""
    longest = max(len(record.answer), len(record.completion))
    hits = sum(a == b for a, b in zip(record.answer, record.completion, strict=False))
    return hits / longest
