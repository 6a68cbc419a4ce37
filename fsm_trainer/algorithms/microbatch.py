"""How a batch is cut into micro-batches. One batch is one optimiser step, so the cut never changes the gradient.

Two ways: so many sequences (`mini_bs`), or so many tokens (`max_tokens`). Sequences of like length come together, so
that padding is little; the longest come first, so that a micro-batch too large for the memory fails at once. Pure
arithmetic on lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

MicroBatches = tuple[tuple[int, ...], ...]
"""Row numbers of each micro-batch; every row is in exactly one."""


def plan_by_rows(lengths: Sequence[int], mini_bs: int, gradient_accumulation_steps: int | None = None) -> MicroBatches:
    """Cut rows of the given token counts into micro-batches of `mini_bs`, the last one maybe smaller.

    `gradient_accumulation_steps` is the optimiser's step interval in micro-batches; None, or anything that covers the
    batch, means all of them. Raises ValueError where it is smaller: one batch would be several optimiser
    steps then, the later ones on weights that did not generate it, and versions would no longer count batches.
    """
    for name, value in (("mini_bs", mini_bs), ("gradient_accumulation_steps", gradient_accumulation_steps)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1")
    order = _longest_first(lengths)
    parts = tuple(tuple(order[start : start + mini_bs]) for start in range(0, len(order), mini_bs))
    if gradient_accumulation_steps is not None and gradient_accumulation_steps < len(parts):
        raise ValueError(
            f"gradient_accumulation_steps is {gradient_accumulation_steps} but a batch of {len(lengths)} sequences "
            f"has {len(parts)} micro-batches of {mini_bs}: one batch is one optimiser step here, so use at least "
            f"{len(parts)} or leave it unset"
        )
    return parts


def plan_by_tokens(lengths: Sequence[int], max_tokens: int, *, packed: bool) -> MicroBatches:
    """Cut rows of the given token counts into micro-batches of at most `max_tokens`.

    Packed rows lie one behind the other, so a micro-batch costs the sum of its lengths (first fit, longest first);
    padded rows cost the longest length each. Raises ValueError for a row that is longer than `max_tokens`.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens_per_micro_batch is {max_tokens}, expected at least 1")
    order = _longest_first(lengths)
    if order and lengths[order[0]] > max_tokens:
        raise ValueError(
            f"a sequence has {lengths[order[0]]} tokens but max_tokens_per_micro_batch is {max_tokens}; raise it to "
            f"the longest prompt and completion together"
        )
    parts: list[list[int]] = []
    costs: list[int] = []
    for row in order:
        # Padded, the longest row of a part is its first, and only the newest part can have a like length.
        candidates = range(len(parts)) if packed else range(max(len(parts) - 1, 0), len(parts))
        for index in candidates:
            cost = lengths[row] if packed else lengths[parts[index][0]]
            if costs[index] + cost <= max_tokens:
                parts[index].append(row)
                costs[index] += cost
                break
        else:
            parts.append([row])
            costs.append(lengths[row])
    return tuple(map(tuple, parts))


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])
