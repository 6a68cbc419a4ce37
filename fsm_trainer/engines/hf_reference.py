"""The reference policy of a KL term: a frozen copy of the trained tensors, put in the model's place for a pass.

With LoRA only the adapters are copied: the base weights are the same in both. Knows nothing of when KL is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class FrozenWeights:
    """A copy of some parameters that can stand in for them."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], refresh_steps: int | None = None) -> None:
        """Copy the parameters. `refresh_steps` is the optimiser steps between two copies; None keeps the first."""
        if refresh_steps is not None and refresh_steps < 1:
            raise ValueError(f"reference_refresh_steps is {refresh_steps}, expected at least 1 or unset (never)")
        self._parameters, self._refresh_steps = list(parameters), refresh_steps
        self.tensors: list[Tensor] = [parameter.detach().clone() for parameter in parameters]
        """The copy, in the order of the parameters; what a resumed run must restore."""

    def after_step(self, steps: int) -> None:
        """Copy anew when `steps`, the optimiser steps taken so far, is a multiple of the interval."""
        if self._refresh_steps is not None and steps % self._refresh_steps == 0:
            for tensor, parameter in zip(self.tensors, self._parameters, strict=True):
                tensor.copy_(parameter.detach())

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make the model compute with the copy; no gradient of the trained tensors may be pending."""
        self._swap()
        try:
            with torch.no_grad():
                yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for index, parameter in enumerate(self._parameters):
            parameter.data, self.tensors[index] = self.tensors[index], parameter.data
