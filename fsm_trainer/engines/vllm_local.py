"""vLLM in processes of this run: AsyncLLM here, and the model in a process that vLLM starts for it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from fsm_trainer.engines.base import EngineLost, SamplingParams, Snapshot
from fsm_trainer.engines.hf_model import checkpoint_context, checkpoint_special_tokens
from fsm_trainer.engines.vllm_requests import SCORING_ARGUMENTS, Completion
from fsm_trainer.engines.vllm_rollout import VLLMRolloutEngine
from fsm_trainer.engines.vllm_setup import Setup
from fsm_trainer.engines.vllm_transfer import Receiver

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")
_DEAD = "vLLM's engine process has died; what it said of it is on standard error"
_LOOK_S = 0.5
"""How often it is looked at whether vLLM's process lives, while an answer is waited for."""
_SHUTDOWN_S = 1.0
"""How long vLLM's processes may take to end before they are killed: they have nothing to lose."""
_WARM_UP: dict[str, Any] = {"max_tokens": 2, "temperature": 1.0, "logprobs": 0, "seed": 0}
"""A request that makes vLLM go every way that a run's requests will, so that the first batch need not."""


def vllm_engine(
    ckpt: str,
    sampling: SamplingParams,
    *,
    devices: Sequence[str] = ("cpu",),
    dtype: str = "float32",
    max_model_len: int,
    memory_utilization: float | None = None,
    threads: int = 1,
    seed: int = 0,
    transport: str = "shared-memory",
    keep_cache: bool = False,
    engine_args: Mapping[str, Any] | None = None,
) -> VLLMRolloutEngine:
    """The engine of one replica; `ckpt` gives the architecture alone, the weights come from snapshots.

    `devices`: those of the replica, tensor-parallel over them. `max_model_len`: tokens of the longest prompt and
    completion together. `keep_cache`: see `VLLMRolloutEngine`. `engine_args`: further arguments of vLLM's
    `AsyncEngineArgs`, but those of `vllm_fields.SETTLED`.
    """
    # One more than a sample needs: to score the longest one takes a new token behind it.
    positions = min(max_model_len + 1, checkpoint_context(ckpt) or max_model_len + 1)
    setup = Setup(ckpt, sampling, tuple(devices), dtype, positions, memory_utilization, threads, seed, transport)
    backend = LocalBackend(setup, dict(engine_args or {}))
    return VLLMRolloutEngine(backend, sampling, checkpoint_special_tokens(ckpt).eos, keep_cache=keep_cache)


class LocalBackend:
    """A `vllm_rollout.Backend` on AsyncLLM."""

    def __init__(self, setup: Setup, engine_args: Mapping[str, Any]) -> None:
        """Keep the settings; ValueError for an argument that is the run's, or unknown to the installed vLLM."""
        self.positions = setup.positions
        self._setup, self._arguments = setup, setup.arguments(engine_args)
        self._llm: AsyncLLM | None = None
        self._receiver: Receiver | None = None
        self._ids = itertools.count()

    async def open(self) -> dict[str, float]:
        """Import vLLM, start its processes, and complete a first token."""
        begin = time.perf_counter()
        self._setup.prepare()
        imported = time.perf_counter()
        self._llm = self._setup.build(self._arguments)
        self._receiver = Receiver(self._llm)
        built = time.perf_counter()
        await self._request([0, 0], {**SCORING_ARGUMENTS, **_WARM_UP})
        warm = time.perf_counter()
        return {"import_s": imported - begin, "build_s": built - imported, "warm_up_s": warm - built}

    async def complete(self, prompt: Sequence[int], arguments: dict[str, Any], salt: str) -> list[Completion]:
        """Complete one prompt."""
        return [_completion(output) for output in (await self._request(prompt, arguments, salt)).outputs]

    async def prompt_logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Logprob of every token but the first."""
        rows = (await self._request(tokens, SCORING_ARGUMENTS)).prompt_logprobs
        assert rows is not None
        return tuple(row[token].logprob for token, row in zip(tokens[1:], rows[1:], strict=True))

    async def pause(self, clear_cache: bool) -> None:
        """Stand still."""
        await self._ask(lambda llm: llm.pause_generation(mode="keep", clear_cache=clear_cache))

    async def transfer(self, snapshot: Snapshot, tag: str) -> int:
        """Replace the weights."""
        receiver = self._receiver
        assert receiver is not None
        return await self._ask(lambda _: receiver.transfer(snapshot, tag))

    async def weight_version(self) -> str:
        """The tag of the weights."""
        return str(await self._ask(lambda llm: llm.get_weight_version()))

    async def resume(self) -> None:
        """Go on."""
        await self._ask(lambda llm: llm.resume_generation())

    async def close(self) -> None:
        """End vLLM's processes."""
        if self._llm is not None:
            self._llm.shutdown(timeout=_SHUTDOWN_S)
            self._llm = self._receiver = None

    async def _request(
        self, prompt: Sequence[int], arguments: dict[str, Any], salt: str | None = None
    ) -> RequestOutput:
        """One request's final output."""
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = VLLMSamplingParams(**arguments, output_kind=RequestOutputKind.FINAL_ONLY)
        asked = TokensPrompt(prompt_token_ids=list(prompt))
        if salt is not None:
            asked["cache_salt"] = salt

        async def request(llm: AsyncLLM) -> RequestOutput:
            final: RequestOutput | None = None
            name = str(next(self._ids))
            async for output in llm.generate(asked, params, name):
                final = output
            assert final is not None
            return final

        return await self._ask(request)

    async def _ask(self, what: Callable[[AsyncLLM], Coroutine[Any, Any, T]]) -> T:
        """What vLLM answers. EngineLost once vLLM's own process is dead: of some requests it never says so itself."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if (llm := self._llm) is None:
            raise RuntimeError("vLLM is not started, or closed")
        answer = asyncio.ensure_future(what(llm))
        try:
            while not (await asyncio.wait({answer}, timeout=_LOOK_S))[0]:
                if llm.errored:
                    raise EngineLost(_DEAD)
            return answer.result()
        except EngineDeadError as error:
            raise EngineLost(_DEAD) from error
        finally:
            answer.cancel()


def _completion(output: CompletionOutput) -> Completion:
    tokens = list(output.token_ids)
    logprobs = [row[token].logprob for token, row in zip(tokens, output.logprobs or (), strict=True)]
    spans = [(span.version, span.end - span.start) for span in output.weight_versions or ()]
    return Completion(tokens, logprobs, output.finish_reason, spans)
