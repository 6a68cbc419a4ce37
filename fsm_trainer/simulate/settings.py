"""The settings that a what-if varies, and the grid of their combinations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from fsm_trainer.core.config import ADMISSIONS, SYNC_MODES, SchedulerConfig


@dataclass(frozen=True)
class Setting:
    """What of a scheduler's configuration decides how long a run takes."""

    admission: str = "paced"
    queue_size: int = 2
    max_staleness: int = 1
    workers: int = 1
    engines: int = 1
    sync_interval: int = 1
    sync_mode: str = "drain"

    @classmethod
    def of(cls, config: SchedulerConfig) -> Setting:
        """The setting in a configuration."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    def config(self, base: SchedulerConfig) -> SchedulerConfig:
        """`base` with this setting. Raises ValueError for an impossible one."""
        return replace(base, **{field.name: getattr(self, field.name) for field in fields(self)})

    @property
    def synchronous(self) -> bool:
        """Whether it does one thing after the other, like the algorithms without `async-`."""
        return self.max_staleness == 0 and self.workers == 1 and self.admission != "greedy"

    @property
    def without_lead(self) -> bool:
        """Whether it is the setting of the algorithms without `async-`."""
        return self.synchronous and self.queue_size == 1

    def flags(self, recorded: Setting | None = None) -> str:
        """The flags of `fsm-train` that ask for it, besides the rollout devices, one group of them for each engine.

        The mode of sync is said where it, or that of the `recorded` run, is not the usual one.
        """
        usual = self.sync_mode == (recorded or self).sync_mode == "drain"
        unsaid = {"engines", "sync_mode"} if usual else {"engines"}
        return " ".join(f"{option} {getattr(self, name)}" for name, option in FLAGS.items() if name not in unsaid)


def devices_needed(setting: Setting, run_config: Mapping[str, Any]) -> int:
    """How many `--rollout-devices` the setting's engines need in a run that is otherwise configured like that one."""
    return setting.engines * int(run_config.get("rollout_tp_size") or run_config.get("tp_size") or 1)


def async_algo(run_config: Mapping[str, Any]) -> str:
    """The async algorithm that goes with a run's own, as a flag."""
    return f"--algo async-{str(run_config.get('algo', '...')).removeprefix('async-')}"


FLAGS = {
    "admission": "--async-admission",
    "queue_size": "--async-queue-size",
    "max_staleness": "--async-max-staleness",
    "workers": "--async-rollout-workers",
    "sync_interval": "--async-sync-interval-steps",
    "sync_mode": "--async-sync-mode",
    "engines": "--rollout-engines",
}
_WORDS = {"admission": ADMISSIONS, "sync_mode": SYNC_MODES}
"""Parts that have names for values."""
"""The flag for each part of a setting: those of `fsm-train`, where engines follow from `--rollout-devices`."""

USUAL: dict[str, tuple[int | str, ...]] = {
    "max_staleness": (0, 1, 2, 4),
    "workers": (1, 2),
    "sync_interval": (1, 2),
}
"""What is asked of a run when nothing is asked."""

MOST = 1000
"""Largest number that a setting may have here; `fsm-train` has the same bound for workers."""


def grid(base: Setting, axes: Mapping[str, Sequence[int | str]]) -> list[Setting]:
    """Every combination of the values of `axes`, which are names of a setting's parts; the others are as in `base`.

    Raises ValueError for a name or value that no setting has. A combination may still be impossible.
    """
    for name, values in axes.items():
        if name not in FLAGS:
            raise ValueError(f"{name!r} is no part of a setting, expected one of {', '.join(FLAGS)}")
        for value in values:
            _check(name, value)
    parts: dict[str, Any] = {**{name: [value] for name, value in asdict(base).items()}, **axes}
    choices = itertools.product(*(dict.fromkeys(values) for values in parts.values()))
    return [Setting(**dict(zip(parts, chosen, strict=True))) for chosen in choices]


def _check(name: str, value: int | str) -> None:
    if name in _WORDS:
        if value not in _WORDS[name]:
            raise ValueError(f"{FLAGS[name]} is {value!r}, expected one of {', '.join(_WORDS[name])}")
        return
    low = 0 if name == "max_staleness" else 1
    if not isinstance(value, int) or not low <= value <= MOST:
        raise ValueError(f"{FLAGS[name]} is {value!r}, expected a whole number from {low} to {MOST}")
