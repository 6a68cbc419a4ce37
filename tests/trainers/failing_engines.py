"""Rollout engines that fail in one way, once; light, since a process imports this module at each of their starts."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from fsm_trainer.engines.base import EngineLost, Loaded, Rollout, RolloutRequest, Snapshot
from fsm_trainer.engines.fake import FakeBehaviour, FakeRolloutEngine


class FailingEngine(FakeRolloutEngine):
    """Makes completions up; its second call of `method` fails, in whichever process comes to it first.

    `how`: it dies, hangs (whatever it is asked), says that it is lost, or raises.
    """

    def __init__(self, folder: str, method: str, how: str, times: int = 1) -> None:
        """`folder` is where it leaves a mark, so that its successors do not fail, but for `times` of them."""
        super().__init__(FakeBehaviour(), n_samples=4)
        self._folder, self._method, self._how, self._times = Path(folder), method, how, times
        self._calls: dict[str, int] = {}

    def load_weights(self, snapshot: Snapshot) -> Loaded:
        """Load, or fail."""
        self._perhaps_fail("load_weights")
        return super().load_weights(snapshot)

    def generate(self, request: RolloutRequest) -> Rollout:
        """Generate, or fail."""
        self._perhaps_fail("generate")
        return super().generate(request)

    def _perhaps_fail(self, method: str) -> None:
        self._calls[method] = self._calls.get(method, 0) + 1
        marks = len(list(self._folder.glob("failed-*")))
        if method != self._method or marks >= self._times or self._calls[method] < (2 if not marks else 1):
            return
        (self._folder / f"failed-{marks}").touch()
        if self._how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._how == "hangs":
            threading.Event().wait()
        elif self._how == "lost":
            raise EngineLost("the server is gone")
        else:
            raise RuntimeError("as told")
