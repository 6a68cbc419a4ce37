"""Two rewards of one-digit sums: `correct` scores as AReno's functions do, `number_only` as TRL's."""

import re


def correct(record):
    """1.0 if the first number of the completion is the answer, whatever is said around it."""
    first = re.search(r"-?\d+", record.completion)
    return float(first is not None and first.group() == record.answer)


def number_only(completions, **kwargs):
    """1.0 for a number and nothing else, with a full stop if it likes."""
    return [float(re.fullmatch(r"\s*-?\d+\.?\s*", text) is not None) for text in completions]
