"""Whether a vLLM server lives, asked while it owes answers: one that hangs, or whose vLLM died, may never say so.

Knows nothing of what the server is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from fsm_trainer.engines.base import EngineLost

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
HEALTH = "/health"
_LOOK_S = 5.0
"""How long after an answer it is asked again."""
_ANSWER_S = 10.0
"""How long it may take to answer that once."""
_PATIENCE_S = 90.0
"""How long it may go without, if it owes next to nothing: six times in a row."""
_PER_TOKEN_S = 0.0005
"""And how much longer for each token that it owes: vLLM answers nothing while it writes down what ended in one step.

How long that is, `tools/bench_rollout.py --only health` measures.
"""
_LONGER_S = 120.0
"""But never more than this: what a server owes may take hours, and what ends in one step is a part of it."""


class ServerHealth:
    """One server's; of one event loop."""

    def __init__(self, where: str) -> None:
        """`where`: the server in words."""
        self._where = where
        self._owed: dict[asyncio.Future[Any], int] = {}
        """What is waited for -> tokens in it."""
        self._missed = 0
        """How often in a row it was asked in vain."""
        self._looking: asyncio.Task[str] | None = None

    async def watched(self, client: httpx.AsyncClient, what: str, request: Coroutine[Any, Any, T], tokens: int) -> T:
        """What comes of a request for so many tokens. EngineLost once the server is found dead or hanging meanwhile."""
        answer = asyncio.ensure_future(request)
        self._owed[answer] = tokens
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look(client))
        looking = self._looking
        try:
            await asyncio.wait({answer, looking}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise EngineLost(f"{self._where} {looking.result()} during {what}")
            self._missed = 0
            return answer.result()
        finally:
            answer.cancel()
            del self._owed[answer]
            if not self._owed:
                looking.cancel()
                self._looking = None

    async def _look(self, client: httpx.AsyncClient) -> str:
        """Ask until there is something wrong with it; says what.

        It counts questions rather than time, which passes for a run that is itself stopped, too.
        """
        import httpx

        self._missed = 0
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                answer = await client.get(HEALTH, timeout=_ANSWER_S)
            except httpx.HTTPError:
                self._missed += 1
                if self._missed >= self._most():
                    return f"has not answered {HEALTH} {self._missed} times in a row, each within {_ANSWER_S:g} s,"
            else:
                self._missed = 0
                if answer.is_server_error:
                    return f"answers {HEALTH} with {answer.status_code}"

    def _most(self) -> float:
        """How often in a row it may be asked in vain: as often as there is time to ask and to wait for an answer."""
        longer = min(_PER_TOKEN_S * sum(self._owed.values()), _LONGER_S)
        return (_PATIENCE_S + longer) // (_LOOK_S + _ANSWER_S)
