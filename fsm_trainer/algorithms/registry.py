"""The algorithms by name: which advantage and which loss each one uses, and whether its loop is asynchronous.

An asynchronous algorithm is the same advantage and the same loss in another loop, so its spec refers to the very same
objects. Knows nothing of engines or loops, and needs no torch: a loss may be a "module:function" path that is imported
when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from fsm_trainer.algorithms.advantages import AdvantageFn, group_advantages

if TYPE_CHECKING:
    from fsm_trainer.algorithms.losses import LossFn

GRPO_LOSS = "fsm_trainer.algorithms.losses:grpo_loss"
GSPO_LOSS = "fsm_trainer.algorithms.losses:gspo_loss"


@dataclass(frozen=True)
class AlgorithmSpec:
    """One algorithm. Two specs with the same `loss` and `advantage` learn the same from the same batch."""

    name: str
    loss: str | Callable[..., object]
    """The loss (see `losses.LossFn`), or where it is, as "module:function"."""
    advantage: AdvantageFn
    clip_eps: float
    """Default clipping range of the loss's ratio."""
    asynchronous: bool = False
    experimental: bool = False
    description: str = ""

    def resolve_loss(self) -> LossFn:
        """Return the loss function itself, imported now if `loss` is a path (this imports torch)."""
        if not isinstance(self.loss, str):
            return self.loss  # type: ignore[return-value]
        module, _, function = self.loss.partition(":")
        loss: LossFn = getattr(import_module(module), function)
        return loss


_SPECS: dict[str, AlgorithmSpec] = {}


def register_algorithm(spec: AlgorithmSpec) -> AlgorithmSpec:
    """Add an algorithm. Raises ValueError when its name is empty or taken."""
    if not spec.name:
        raise ValueError("an algorithm's name is empty, expected a word such as 'grpo'")
    if spec.name in _SPECS:
        raise ValueError(f"algorithm {spec.name!r} is registered already; choose another name")
    _SPECS[spec.name] = spec
    return spec


def get_algorithm(name: str) -> AlgorithmSpec:
    """Return the algorithm of that name. Raises ValueError naming the known ones."""
    if name not in _SPECS:
        raise ValueError(f"algorithm is {name!r}, expected one of {', '.join(algorithm_names())}")
    return _SPECS[name]


def algorithm_names() -> tuple[str, ...]:
    """All registered names, sorted."""
    return tuple(sorted(_SPECS))


register_algorithm(
    AlgorithmSpec(
        name="grpo",
        loss=GRPO_LOSS,
        advantage=group_advantages,
        clip_eps=0.2,
        description="group-relative advantages, token-level clipped ratio (Shao et al. 2024)",
    )
)
register_algorithm(
    AlgorithmSpec(
        name="gspo",
        loss=GSPO_LOSS,
        advantage=group_advantages,
        clip_eps=3e-4,
        description="group-relative advantages, sequence-level clipped ratio (Zheng et al. 2025)",
    )
)
for _base in ("grpo", "gspo"):
    register_algorithm(
        AlgorithmSpec(
            name=f"async-{_base}",
            loss=_SPECS[_base].loss,
            advantage=_SPECS[_base].advantage,
            clip_eps=_SPECS[_base].clip_eps,
            asynchronous=True,
            experimental=True,
            description=f"{_base} with generation running ahead of training within the staleness bound",
        )
    )
