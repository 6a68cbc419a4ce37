"""A vLLM server that runs already, as a rollout engine: token ids in, token ids out, weights pushed into it.

It must have been started for that (`python -m fsm_trainer.engines.vllm_serve`): with vLLM's routes for reinforcement
learning, this package's worker extension, and logprobs of the right distribution. That is checked before the first
load; a server that was restarted since shows itself by weights that do not carry this run's tag.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fsm_trainer.engines.base import EngineLost, SamplingParams, Snapshot
from fsm_trainer.engines.hf_model import checkpoint_special_tokens
from fsm_trainer.engines.vllm_requests import SCORING_ARGUMENTS, Completion, logprobs_mode
from fsm_trainer.engines.vllm_rollout import VLLMRolloutEngine
from fsm_trainer.engines.vllm_versions import check_version
from fsm_trainer.engines.vllm_worker import METHOD, PATH, bytes_read, written

if TYPE_CHECKING:
    import httpx

GENERATE = "/inference/v1/generate"
_START = "start it with python -m fsm_trainer.engines.vllm_serve"
_POLL_S = 0.5
_CONNECT_S = 10.0
_BODY = 300
"""Characters of a server's complaint that are passed on."""


def vllm_server_engine(
    base_url: str,
    ckpt: str,
    sampling: SamplingParams,
    *,
    dtype: str = "float32",
    max_model_len: int,
    start_timeout_s: float = 600.0,
) -> VLLMRolloutEngine:
    """The engine of one server; `ckpt` is the model that it must have been started with."""
    backend = ServerBackend(
        base_url, sampling, dtype=dtype, max_model_len=max_model_len, start_timeout_s=start_timeout_s
    )
    return VLLMRolloutEngine(backend, sampling, checkpoint_special_tokens(ckpt).eos)


class ServerBackend:
    """A `vllm_rollout.Backend` over HTTP."""

    def __init__(
        self, base_url: str, sampling: SamplingParams, *, dtype: str, max_model_len: int, start_timeout_s: float
    ) -> None:
        """Keep the settings; nothing is sent before `open`."""
        self.url = base_url.rstrip("/").removesuffix("/v1")
        self.positions = max_model_len + 1
        self._wanted = {"logprobs_mode": logprobs_mode(sampling), "dtype": dtype, "worker_extension_cls": PATH}
        self._needed = max_model_len
        self._start_timeout_s = start_timeout_s
        self._client: httpx.AsyncClient | None = None

    async def open(self) -> dict[str, float]:
        """Wait until the server answers, and check how it was started."""
        import httpx

        begin = time.perf_counter()
        # No limit on an answer: how long a generation may take is the scheduler's to say.
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        self._client = httpx.AsyncClient(
            base_url=self.url, timeout=timeout, limits=httpx.Limits(max_connections=None), trust_env=False
        )
        await self._wait(begin + self._start_timeout_s)
        answered = time.perf_counter()
        await self._check()
        # What a run before this one left behind.
        await self._post("/abort_requests", json={})
        await self._post("/resume")
        return {"wait_s": answered - begin, "check_s": time.perf_counter() - answered}

    async def complete(self, prompt: Sequence[int], arguments: dict[str, Any]) -> list[Completion]:
        """Complete one prompt."""
        choices = (await self._generate(prompt, arguments))["choices"]
        return [_completion(choice) for choice in sorted(choices, key=lambda choice: int(choice["index"]))]

    async def prompt_logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Logprob of every token but the first."""
        rows = (await self._generate(tokens, SCORING_ARGUMENTS))["prompt_logprobs"]
        return tuple(row[str(token)]["logprob"] for token, row in zip(tokens[1:], rows[1:], strict=True))

    async def pause(self) -> None:
        """Stand still, without caches."""
        await self._post("/pause", params={"mode": "keep", "clear_cache": True})

    async def transfer(self, snapshot: Snapshot, tag: str) -> int:
        """Replace the weights."""
        answer = await self._post("/collective_rpc", json={"method": METHOD, "args": [written(snapshot)]})
        nbytes = bytes_read(answer["results"])
        await self._post("/update_weight_version", json={"new_version": tag})
        return nbytes

    async def reset_prefix_cache(self) -> bool:
        """Drop the prefix cache."""
        return bool((await self._post("/reset_prefix_cache"))["success"])

    async def weight_version(self) -> str:
        """The tag of the weights."""
        return str((await self._get("/weight_info"))["weight_version"])

    async def resume(self) -> None:
        """Go on."""
        await self._post("/resume")

    async def close(self) -> None:
        """Hang up; the server stays."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _generate(self, tokens: Sequence[int], arguments: dict[str, Any]) -> Any:
        return await self._post(GENERATE, json={"token_ids": list(tokens), "sampling_params": arguments})

    async def _wait(self, until: float) -> None:
        while True:
            try:
                await self._get("/health")
                return
            except EngineLost as error:
                if time.perf_counter() > until:
                    raise EngineLost(f"{error}; it was waited for {self._start_timeout_s:g} s") from error
            await asyncio.sleep(_POLL_S)

    async def _check(self) -> None:
        """ValueError, with what to do, for a server that was not started for this."""
        check_version(str((await self._get("/version"))["version"]), f"the vLLM server at {self.url}")
        found = (await self._get("/server_info", params={"config_format": "json"}))["vllm_config"]
        model, parallel = found["model_config"], found["parallel_config"]
        has = {**model, "worker_extension_cls": parallel["worker_extension_cls"]}
        for name, wanted in self._wanted.items():
            got = str(has[name]).removeprefix("torch.")
            if got != wanted:
                raise ValueError(f"the vLLM server at {self.url} has {name} {got}, expected {wanted}; {_START}")
        if model["max_model_len"] < self._needed:
            raise ValueError(
                f"the vLLM server at {self.url} has max_model_len {model['max_model_len']}, expected at least "
                f"{self._needed} for a prompt and its completion; {_START} --max-model-len {self.positions}"
            )
        self.positions = min(self.positions, model["max_model_len"])

    async def _get(self, path: str, **options: Any) -> Any:
        return await self._ask("GET", path, **options)

    async def _post(self, path: str, **options: Any) -> Any:
        return await self._ask("POST", path, **options)

    async def _ask(self, method: str, path: str, **options: Any) -> Any:
        """One request's answer. EngineLost where there is none, or one that says the server is in trouble."""
        import httpx

        if self._client is None:
            raise RuntimeError("the vLLM server is not connected, or closed")
        where = f"the vLLM server at {self.url}"
        try:
            answer = await self._client.request(method, path, **options)
        except httpx.HTTPError as error:
            raise EngineLost(f"{where} does not answer {path}: {str(error) or type(error).__name__}") from error
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise ValueError(
                f"{where} has no {path}: it was started without VLLM_SERVER_DEV_MODE=1, or is no vLLM server; {_START}"
            )
        said = f"{where} answers {path} with {answer.status_code}: {' '.join(answer.text.split())[:_BODY]}"
        if answer.is_server_error:
            raise EngineLost(said)
        if answer.is_client_error:
            raise ValueError(f"{said}; look at the server's own log")
        try:
            return answer.json() if answer.content else None
        except ValueError as error:
            raise EngineLost(f"{said}, which is no JSON") from error


def _completion(choice: dict[str, Any]) -> Completion:
    rows = (choice["logprobs"] or {}).get("content") or ()
    spans = [(span["version"], span["end"] - span["start"]) for span in choice["weight_versions"] or ()]
    return Completion(choice["token_ids"], [row["logprob"] for row in rows], choice["finish_reason"], spans)
