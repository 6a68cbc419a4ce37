"""What a step minimises, as data: the surrogate, its aggregation, the KL and entropy terms, the off-policy correction.

Every piece is chosen by name and independent of the others; a named algorithm (`registry.py`) is a preset of them.
Knows no tensors, so that the configuration can check a choice without torch; `losses.policy_loss` computes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

RatioLevel = Literal["token", "sequence"]
Surrogate = Literal["clip", "cispo"]
Aggregation = Literal["token-mean", "sequence-mean", "constant"]
KLEstimator = Literal["k1", "k2", "k3"]
Correction = Literal["none", "token-truncate", "sequence-truncate", "token-mask", "sequence-mask", "decoupled"]
SpanPolicy = Literal["keep", "mask", "correct"]

CORRECTIONS: tuple[Correction, ...] = get_args(Correction)

DEFAULT_BANDS: dict[Correction, tuple[float, float]] = {"token-mask": (0.5, 5.0), "sequence-mask": (0.9, 1.1)}
"""Band of each masking correction where none is given: IcePop's for tokens; a geometric mean varies far less."""


@dataclass(frozen=True)
class Objective:
    """One training objective. Raises ValueError for a choice that is unknown or a number out of its range."""

    ratio_level: RatioLevel = "token"
    """Importance ratio of each token, or of the sequence: the geometric mean of its tokens' (GSPO)."""
    surrogate: Surrogate = "clip"
    """`clip`: the pessimistic minimum of PPO. `cispo`: a clipped, detached ratio that weights the log-likelihood."""
    clip_low: float = 0.2
    """A ratio is clipped below 1 - clip_low; from 1 up nothing is."""
    clip_high: float = 0.2
    """A ratio is clipped above 1 + clip_high."""
    aggregation: Aggregation = "token-mean"
    """From losses of tokens to the loss of the optimiser batch: mean over all tokens; mean over sequences of each one's
    mean; or sum over tokens divided by sequences times `constant_length`."""
    constant_length: int | None = None
    """Tokens that stand for a sequence's length; needed by the constant aggregation, otherwise unused."""
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    """Weight of KL(current || reference)."""
    kl_estimator: KLEstimator = "k3"
    correction: Correction = "none"
    """What is done about the policy that sampled being another than the one that trains; see `corrections.py`."""
    correction_cap: float = 2.0
    """Largest weight of the truncating corrections, and of an old span under `span_policy` correct."""
    correction_band: tuple[float, float] | None = None
    """Lowest and highest ratio that the masking corrections let in; None is the default of the correction."""
    span_policy: SpanPolicy = "keep"
    """What is done about tokens that an older version drew than their sample's newest: nothing more than about any
    token; left out of the loss; or weighted by one truncated importance ratio a span, see `corrections.span_weights`.
    """

    def __post_init__(self) -> None:
        """Check every field."""
        self._check_choice("ratio_level", self.ratio_level, get_args(RatioLevel))
        self._check_choice("surrogate", self.surrogate, get_args(Surrogate))
        self._check_choice("aggregation", self.aggregation, get_args(Aggregation))
        self._check_choice("kl_estimator", self.kl_estimator, get_args(KLEstimator))
        self._check_choice("correction", self.correction, CORRECTIONS)
        self._check_choice("span_policy", self.span_policy, get_args(SpanPolicy))
        for name in ("clip_low", "clip_high", "correction_cap"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise ValueError(f"{name} is {value}, expected a positive number")
        for name in ("entropy_coef", "kl_coef"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} is {value}, expected a number of at least 0")
        if self.span_policy == "correct" and self.ratio_level == "sequence":
            raise ValueError(
                "span_policy is 'correct', expected 'keep' or 'mask' with the sequence ratio, which is taken over all "
                "spans of a sample already"
            )
        if self.aggregation == "constant" and (self.constant_length is None or self.constant_length < 1):
            raise ValueError(
                f"constant_length is {self.constant_length}, expected at least 1 with the constant aggregation; "
                f"give the longest completion's tokens"
            )
        low, high = self.band
        if not 0.0 <= low < 1.0 < high < math.inf:
            raise ValueError(f"correction_band is {low:g},{high:g}, expected LOW,HIGH with 0 <= LOW < 1 < HIGH")

    @staticmethod
    def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
        if value not in known:
            raise ValueError(f"{name} is {value!r}, expected one of {', '.join(known)}")

    @property
    def band(self) -> tuple[float, float]:
        """The masking corrections' band, its default filled in."""
        return self.correction_band or DEFAULT_BANDS.get(self.correction, DEFAULT_BANDS["token-mask"])

    @property
    def needs_reference(self) -> bool:
        """Whether `LossInputs.reference_logprobs` must be given."""
        return self.kl_coef != 0.0

    @property
    def needs_proximal(self) -> bool:
        """Whether the ratio is taken to the proximal policy: the trained weights at the start of the step."""
        return self.correction != "none"

    @property
    def moves_without_advantages(self) -> bool:
        """Whether a batch whose advantages are all 0 has a gradient: of the entropy or the KL term."""
        return self.entropy_coef != 0.0 or self.kl_coef != 0.0
