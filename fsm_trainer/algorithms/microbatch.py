"""How a batch is cut into micro-batches. One batch is one optimiser step, so the cut never changes the gradient.

Pure arithmetic, needed by the configuration's checks as well as by the train engine.
"""

from __future__ import annotations


def micro_batch_slices(
    sequence_count: int, mini_bs: int, gradient_accumulation_steps: int | None = None
) -> tuple[slice, ...]:
    """Cut `sequence_count` rows into micro-batches of `mini_bs`, the last one maybe shorter.

    `gradient_accumulation_steps` is the optimiser's step interval in micro-batches; None, or anything that covers the
    batch, means all of them. Raises ValueError where it is smaller: one batch would be several optimiser
    steps then, the later ones on weights that did not generate it, and versions would no longer count batches.
    """
    for name, value in (("mini_bs", mini_bs), ("gradient_accumulation_steps", gradient_accumulation_steps)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1")
    slices = tuple(slice(start, start + mini_bs) for start in range(0, sequence_count, mini_bs))
    if gradient_accumulation_steps is not None and gradient_accumulation_steps < len(slices):
        raise ValueError(
            f"gradient_accumulation_steps is {gradient_accumulation_steps} but a batch of {sequence_count} sequences "
            f"has {len(slices)} micro-batches of {mini_bs}: one batch is one optimiser step here, so use at least "
            f"{len(slices)} or leave it unset"
        )
    return slices
