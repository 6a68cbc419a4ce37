"""Device lists as users write them: `cpu`, `0`, `0,1`, `0..3`, `cuda:1`. Knows nothing of which devices exist."""

from __future__ import annotations

import re

from fsm_trainer.config.errors import ConfigError

# Four digits name more devices than any machine has; a longer range would only fill the memory.
_RANGE = re.compile(r"(?:cuda:)?([0-9]{1,4})\.\.([0-9]{1,4})")
_SINGLE = re.compile(r"(?:cuda:)?([0-9]{1,4})")


def parse_devices(name: str, text: str) -> tuple[str, ...]:
    """Torch device names of a list; `name` is the flag, for messages. An empty text gives no devices."""
    if not text.strip():
        return ()
    if text.strip() == "cpu":
        return ("cpu",)
    devices: list[str] = []
    for part in (p.strip() for p in text.split(",")):
        span, single = _RANGE.fullmatch(part), _SINGLE.fullmatch(part)
        if span and int(span[1]) <= int(span[2]):
            devices += [f"cuda:{i}" for i in range(int(span[1]), int(span[2]) + 1)]
        elif single:
            devices.append(f"cuda:{int(single[1])}")
        else:
            raise ConfigError(f"{name} is {text!r}, expected cpu, or CUDA numbers such as 0, 0,1 or 0..3")
    if len(set(devices)) < len(devices):
        raise ConfigError(f"{name} is {text!r}, which names a device twice; name each once")
    return tuple(devices)
