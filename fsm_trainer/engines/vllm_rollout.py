"""The vLLM rollout engine: one event loop on a thread of its own, and behind it vLLM itself or a server of it.

All samples of a batch are given to vLLM at once, and several batches may run at the same time; weights are loaded
between its steps, and what runs goes on with them. Knows nothing of rewards, queues, or when to load weights.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeVar

from fsm_trainer.engines.base import (
    EngineLost,
    Loaded,
    Rollout,
    RolloutRequest,
    SamplingParams,
    Scores,
    Snapshot,
)
from fsm_trainer.engines.event_loop import EventLoopThread
from fsm_trainer.engines.vllm_requests import (
    Completion,
    Tags,
    check_filters,
    check_request,
    group_seed,
    sampling_arguments,
    to_group,
    to_rollout,
)

T = TypeVar("T")


class Backend(Protocol):
    """One vLLM, wherever it runs. Methods run on the event loop; EngineLost when it cannot serve any more."""

    positions: int
    """Most tokens of one request, prompt and completion together."""

    async def open(self) -> dict[str, float]:
        """Make it ready; returns the seconds that each part took."""

    async def complete(self, prompt: Sequence[int], arguments: dict[str, Any], salt: str) -> list[Completion]:
        """Complete one prompt as often as `n` of these arguments of `vllm.SamplingParams` says.

        In the prefix cache it finds only what prompts of the same salt have left there.
        """

    async def prompt_logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Logprob of every token but the first, at temperature 1, without a look into the prefix cache."""

    async def pause(self, clear_cache: bool) -> None:
        """Let what runs stand still between two steps; drop all caches if asked to, that of what runs included."""

    async def transfer(self, snapshot: Snapshot, tag: str) -> int:
        """Replace the weights and tag what is drawn from now on; returns the bytes that came."""

    async def weight_version(self) -> str:
        """The tag of the weights."""

    async def resume(self) -> None:
        """Let what stands still go on."""

    async def close(self) -> None:
        """End what `open` began."""


class VLLMRolloutEngine:
    """A `RolloutEngine` on vLLM. It serves only after a first `load_weights`."""

    concurrent: ClassVar[bool] = True

    def __init__(
        self, backend: Backend, sampling: SamplingParams, eos: Sequence[int], *, keep_cache: bool = False
    ) -> None:
        """`eos`: token ids that end a completion.

        `keep_cache`: what runs while weights are loaded goes on with the attention cache that older ones computed,
        instead of being computed anew from its first token.
        """
        check_filters(sampling)
        self._backend = backend
        self._sampling, self._eos = sampling, tuple(eos)
        self._keep_cache = keep_cache
        self._tags = Tags(secrets.token_hex(4))
        self._version: int | None = None
        self._salt = ""
        """New with each load, so that no prompt finds in the prefix cache what was there before it."""
        self._loop: EventLoopThread | None = None
        self._stack = ExitStack()
        self._calls: set[Future[Any]] = set()
        """What is under way on the event loop; closing ends it."""
        self._running: dict[Future[Any], str | None] = {}
        """Of that, what an abort ends -> why it is lost for good, if it is."""
        self._loading = asyncio.Lock()
        self._busy = 0
        """How many calls of `generate` and `score` vLLM is at; counted on the event loop."""
        self._paused = False
        """Whether vLLM stands still: during a load, and after one that failed."""
        self._lock = threading.Lock()

    def start(self) -> dict[str, float]:
        """Make vLLM ready; returns the seconds that each part took."""
        self._loop = loop = EventLoopThread("vllm-rollout")
        self._stack.callback(setattr, self, "_loop", None)
        self._stack.callback(loop.close)
        self._stack.callback(lambda: loop.submit(self._backend.close()).result())
        try:
            return self._call(self._backend.open())
        except BaseException:
            self.close()  # or what vLLM has started so far would live on
            raise

    def load_weights(self, snapshot: Snapshot) -> Loaded:
        """Install a snapshot between two steps of vLLM; after one that failed nothing is served until another succeeds.

        What runs then raises EngineLost: it would go on with weights that nobody knows.
        """
        try:
            return self._call(self._load(snapshot))
        except BaseException as error:
            self._end_running(f"generation aborted: weights could not be loaded amid it ({error})")
            raise

    def generate(self, request: RolloutRequest) -> Rollout:
        """Complete every prompt `n_samples` times."""
        check_request(request, self._backend.positions, self._sampling.max_new_tokens)
        return self._call(self._sample(request), abortable=True)

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> Scores | None:
        """Score given tokens with the weights served now.

        None where vLLM cannot: at another temperature than 1, or a sequence that leaves no position free.
        """
        # It can only score what it also completes, by a token.
        longest = max(map(len, sequences), default=0)
        if temperature != 1.0 or longest >= self._backend.positions:
            return None
        return self._call(self._score(sequences), abortable=True)

    def abort(self) -> None:
        """Make every running `generate` and `score` raise."""
        self._end_running(None)

    def close(self) -> None:
        """End vLLM and its processes, or leave the server as it is; calls under way raise, those that hang too."""
        self._version = None
        with self._lock:
            stack, calls = self._stack.pop_all(), list(self._calls)
        for call in calls:
            call.cancel()
        stack.close()

    def _end_running(self, lost: str | None) -> None:
        with self._lock:
            running = list(self._running)
            if lost is not None:
                self._running.update(dict.fromkeys(running, lost))
        for future in running:
            future.cancel()

    async def _load(self, snapshot: Snapshot) -> Loaded:
        backend = self._backend
        async with self._loading:
            self._version, begin = None, time.perf_counter()
            # After a load that failed it may stand still already, or not: a pause more does no harm.
            if stands_still := self._busy > 0 or self._paused:
                await self._stand_still()
            at_rest = time.perf_counter()
            nbytes = await backend.transfer(snapshot, self._tags.of(snapshot.version))
            version = self._tags.version(await backend.weight_version())
            there = time.perf_counter()
            if stands_still:
                await backend.resume()
                self._paused = False
            self._version, self._salt = version, secrets.token_hex(8)
        loaded = Loaded(version, nbytes, transfer_s=there - at_rest)
        if not stands_still:
            return loaded
        return replace(loaded, pause_s=at_rest - begin, resume_s=time.perf_counter() - there)

    async def _stand_still(self) -> None:
        # Without its cache what runs is computed anew from its first token on once it goes on, so that the logprobs
        # recorded from there on are those of the new weights alone.
        self._paused = True
        await self._backend.pause(clear_cache=not self._keep_cache)

    async def _sample(self, request: RolloutRequest) -> Rollout:
        arguments = sampling_arguments(self._sampling, self._eos)
        async with self._at_work() as (version, salt):
            groups = await _all(
                self._backend.complete(prompt, {**arguments, "seed": group_seed(request, index)}, salt)
                for index, prompt in enumerate(request.prompts)
            )
        # A first token drawn after a load may still come of a prompt that was cached before it, if caches are kept.
        began = version if self._keep_cache else None
        return to_rollout([to_group(group, self._sampling, self._tags) for group in groups], began)

    async def _score(self, sequences: Sequence[Sequence[int]]) -> Scores:
        async with self._at_work():
            scores = await _all(self._backend.prompt_logprobs(tokens) for tokens in sequences)
        self._tags.version(await self._backend.weight_version())  # those of this run, or EngineLost
        return scores

    @asynccontextmanager
    async def _at_work(self) -> AsyncIterator[tuple[int, str]]:
        """A call that vLLM is at, for which a load pauses it; gives the version and the salt that it begins with."""
        # What would begin during a load must not be drawn by the new weights under the old tag.
        async with self._loading:
            if self._version is None:
                raise EngineLost("no weights loaded: load_weights must succeed before generate or score")
            self._busy += 1
            begun = self._version, self._salt
        try:
            yield begun
        finally:
            self._busy -= 1

    def _call(self, work: Coroutine[Any, Any, T], *, abortable: bool = False) -> T:
        """Do it on the event loop and wait for it."""
        if (loop := self._loop) is None:
            work.close()
            raise RuntimeError("the rollout engine is not started, or closed")

        # An abort finds whatever has begun, so nothing begins outside the lock.
        with self._lock:
            future = loop.submit(work)
            self._calls.add(future)
            if abortable:
                self._running[future] = None
        try:
            return future.result()
        except CancelledError as error:
            if (lost := self._running.get(future)) is not None:
                raise EngineLost(lost) from error
            raise RuntimeError("generation aborted" if abortable else "the rollout engine was closed") from error
        finally:
            with self._lock:
                self._calls.discard(future)
                self._running.pop(future, None)


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What each returns; the first that raises ends the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
