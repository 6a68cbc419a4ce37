"""The algorithms by name: each a preset of the objective's pieces and of the advantage, in a synchronous or async loop.

An asynchronous algorithm is the same preset in another loop. Knows nothing of engines or loops, and needs no torch:
only an algorithm that brings a loss of its own may name it as a "module:function" path, imported when first asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fsm_trainer.algorithms.advantages import AdvantageFn, group_advantages, mean_centred_advantages
from fsm_trainer.algorithms.objective import Aggregation, Correction, Objective, RatioLevel, Surrogate

if TYPE_CHECKING:
    from fsm_trainer.algorithms.losses import LossFn

POLICY_LOSS = "fsm_trainer.algorithms.losses:policy_loss"
DEFAULT_ASYNC_CORRECTION: Correction = "none"
"""What async-grpo, async-dr-grpo and async-dapo do about stale batches unless told otherwise. GSPO and CISPO take none:
their own ratio to the rollout is a correction, which another would replace."""


@dataclass(frozen=True)
class AlgorithmSpec:
    """One algorithm: defaults, each of which has a flag of its own. Equal pieces learn the same from the same batch."""

    name: str
    advantage: AdvantageFn = group_advantages
    ratio_level: RatioLevel = "token"
    surrogate: Surrogate = "clip"
    clip_low: float = 0.2
    clip_high: float | None = None
    """None: the same as `clip_low`, also where that is given by a flag."""
    aggregation: Aggregation = "token-mean"
    correction: Correction = "none"
    dynamic_sampling: bool = False
    """Groups without spread make room for spare ones."""
    loss: str | Callable[..., object] = POLICY_LOSS
    """The loss (see `losses.LossFn`), or where it is, as "module:function"."""
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

    def objective(self, *, max_new_tokens: int, **given: Any) -> Objective:
        """The preset's objective with the fields that are `given` (not None) instead of its own.

        `max_new_tokens` is the length of the constant aggregation. ValueError as from `Objective`.
        """
        given = {name: value for name, value in given.items() if value is not None}
        preset = {name: getattr(self, name) for name in ("ratio_level", "surrogate", "aggregation", "correction")}
        preset["clip_low"] = given.get("clip_low", self.clip_low)
        preset["clip_high"] = preset["clip_low"] if self.clip_high is None else self.clip_high
        return Objective(**{**preset, "constant_length": max_new_tokens, **given})


_SPECS: dict[str, AlgorithmSpec] = {}


def register_algorithm(spec: AlgorithmSpec) -> AlgorithmSpec:
    """Add an algorithm; `--algo` takes its name from then on. Raises ValueError when the name is empty or taken."""
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
    """All registered names, in the order of registration."""
    return tuple(_SPECS)


_PRESETS = (
    AlgorithmSpec(
        name="grpo",
        description="group-relative advantages, token-level clipped ratio (Shao et al. 2024)",
    ),
    AlgorithmSpec(
        name="gspo",
        ratio_level="sequence",
        clip_low=3e-4,
        aggregation="sequence-mean",
        description="group-relative advantages, sequence-level clipped ratio (Zheng et al. 2025)",
    ),
    AlgorithmSpec(
        name="cispo",
        surrogate="cispo",
        clip_low=1.0,
        clip_high=4.0,
        description="a clipped, detached ratio weights the log-likelihood (MiniMax-M1 2025)",
    ),
    AlgorithmSpec(
        name="dr-grpo",
        advantage=mean_centred_advantages,
        aggregation="constant",
        description="GRPO without the two biases: no standard deviation, constant length (Liu et al. 2025)",
    ),
    AlgorithmSpec(
        name="dapo",
        clip_high=0.28,
        dynamic_sampling=True,
        description="GRPO with clip-higher, token mean and dynamic sampling (Yu et al. 2025)",
    ),
)
for _spec in _PRESETS:
    register_algorithm(_spec)
for _spec in _PRESETS:
    register_algorithm(
        replace(
            _spec,
            name=f"async-{_spec.name}",
            correction=DEFAULT_ASYNC_CORRECTION
            if _spec.surrogate == "clip" and _spec.ratio_level == "token"
            else "none",
            asynchronous=True,
            experimental=True,
            description=f"{_spec.name} with generation running ahead of training within the staleness bound",
        )
    )
