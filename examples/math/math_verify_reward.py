"""Reward of mathematical answers: 1.0 where math-verify finds the completion equal to the solution, else 0.0."""

import logging


def reward_fn(record):
    """Compare the final answer in a completion with the row's solution as mathematics, not as text."""
    parse, verify = _math_verify()
    if record.answer is None:
        raise ValueError("the row has none of solutions, answer and solution, so there is nothing to compare with")
    expected = str(record.answer).rsplit("####", 1)[-1].strip()
    # math-verify's own time limits use signals, which only work in the main thread; --reward-call-timeout-s bounds
    # this. It would warn of that at every call.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = parse(expected, parsing_timeout=None)
    found = parse(record.completion, parsing_timeout=None)
    return 1.0 if verify(gold, found, timeout_seconds=None) else 0.0


def _math_verify():
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ImportError("this reward needs the extra `math`: pip install 'fsm-trainer[math]'") from error
    return parse, verify
