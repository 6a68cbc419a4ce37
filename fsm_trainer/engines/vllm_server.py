"""A vLLM server that runs already, as a rollout engine: token ids in, token ids out, weights pushed into it.

It must have been started for that (`python -m fsm_trainer.engines.vllm_serve`): with vLLM's routes for reinforcement
learning, this package's worker extension, and logprobs of the right distribution. That is checked before the first
load; a server that was restarted since shows itself by weights that do not carry this run's tag.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import index
from typing import TYPE_CHECKING, Any

from fsm_trainer.engines.base import EngineLost, SamplingParams, Snapshot
from fsm_trainer.engines.hf_model import checkpoint_special_tokens
from fsm_trainer.engines.vllm_health import HEALTH, ServerHealth
from fsm_trainer.engines.vllm_requests import SCORING_ARGUMENTS, Completion, logprobs_mode, requested
from fsm_trainer.engines.vllm_rollout import VLLMRolloutEngine
from fsm_trainer.engines.vllm_versions import check_version, untried
from fsm_trainer.engines.vllm_worker import (
    HALF_LOADED,
    METHOD,
    PATH,
    REPORT,
    SHAPE_METHOD,
    bytes_read,
    model_shape,
    written,
)

if TYPE_CHECKING:
    import httpx

GENERATE = "/inference/v1/generate"
_START = "start it with python -m fsm_trainer.engines.vllm_serve"
_POLL_S = 0.5
_CONNECT_S = 10.0
"""For a connection, and for an answer to whether the server is up."""
_KEPT_S = 2.0
"""A connection idle for longer is not used again: vLLM hangs up after 5 s, and a request must not meet that."""
_FLOOR = -9999.0
"""What vLLM's server sends for a logprob of -inf or NaN, and for one that it does not have: JSON knows none of them."""
_BODY = 300
"""Characters of a server's complaint that are passed on."""


def vllm_server_engine(
    base_url: str,
    ckpt: str,
    sampling: SamplingParams,
    *,
    dtype: str = "float32",
    max_model_len: int,
    keep_cache: bool = False,
    start_timeout_s: float = 600.0,
    warn: Callable[[str, str], None] | None = None,
) -> VLLMRolloutEngine:
    """The engine of one server; `ckpt` is the model that it must have been started with.

    A server that is not up is waited for; `warn` is told once why it seems not to be ("server_awaited"), and
    of a version that never was tried ("engine_untried"). `keep_cache`: see `VLLMRolloutEngine`.
    """
    from transformers import AutoConfig

    backend = ServerBackend(
        base_url,
        sampling,
        dtype=dtype,
        max_model_len=max_model_len,
        start_timeout_s=start_timeout_s,
        warn=warn,
        shape=model_shape(AutoConfig.from_pretrained(ckpt)),
    )
    return VLLMRolloutEngine(backend, sampling, checkpoint_special_tokens(ckpt).eos, keep_cache=keep_cache)


class ServerBackend:
    """A `vllm_rollout.Backend` over HTTP."""

    def __init__(
        self,
        base_url: str,
        sampling: SamplingParams,
        *,
        dtype: str,
        max_model_len: int,
        start_timeout_s: float,
        warn: Callable[[str, str], None] | None = None,
        shape: Mapping[str, int] | None = None,
    ) -> None:
        """Keep the settings; nothing is sent before `open`. Without the model's `shape` any model is taken."""
        self.url = base_url.rstrip("/").removesuffix("/v1")
        self.positions = max_model_len + 1
        self._wanted = {"logprobs_mode": logprobs_mode(sampling), "dtype": dtype, "worker_extension_cls": PATH}
        self._least = {
            "max_model_len": (max_model_len, self.positions, "a prompt and its completion"),
            "max_num_seqs": (requested(sampling), requested(sampling), "a prompt's --n-samples"),
        }
        """Number -> at least how much, how much is best, and for what."""
        self._start_timeout_s = start_timeout_s
        self._warn = warn or (lambda event, said: None)
        self._shape = dict(shape or {})
        self._client: httpx.AsyncClient | None = None
        self._health = ServerHealth(self._where)

    async def open(self) -> dict[str, float]:
        """Wait until the server answers, and check how it was started."""
        import httpx

        begin = time.perf_counter()
        # No limit on an answer: how long a generation may take is the scheduler's to say.
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        self._client = httpx.AsyncClient(
            base_url=self.url,
            timeout=timeout,
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEPT_S),
            trust_env=False,
            # Reading the certificates takes half a second.
            verify=self.url.startswith("https:"),
        )
        await self._wait(begin + self._start_timeout_s)
        answered = time.perf_counter()
        await self._check()
        # What a run before this one left behind.
        await self._post("/abort_requests", json={})
        await self._post("/resume")
        checked = time.perf_counter()
        await self.prompt_logprobs([0, 0])
        warm = time.perf_counter()
        return {"wait_s": answered - begin, "check_s": checked - answered, "warm_up_s": warm - checked}

    async def complete(self, prompt: Sequence[int], arguments: dict[str, Any], salt: str) -> list[Completion]:
        """Complete one prompt."""
        answer = await self._generate(prompt, arguments, cache_salt=salt)
        with self._reading(GENERATE):
            return [
                _completion(choice) for choice in sorted(answer["choices"], key=lambda choice: int(choice["index"]))
            ]

    async def prompt_logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Logprob of every token but the first."""
        answer = await self._generate(tokens, SCORING_ARGUMENTS)
        with self._reading(GENERATE):
            rows = list(zip(tokens, answer["prompt_logprobs"], strict=True))
            return tuple(_logprob(row[str(token)]) for token, row in rows[1:])

    async def pause(self, clear_cache: bool) -> None:
        """Stand still."""
        await self._post("/pause", params={"mode": "keep", "clear_cache": clear_cache})

    async def transfer(self, snapshot: Snapshot, tag: str) -> int:
        """Replace the weights."""
        answer = await self._post("/collective_rpc", json={"method": METHOD, "args": [written(snapshot)]})
        with self._reading("/collective_rpc"):
            first, *others = [{name: each[name] for name in REPORT} for each in answer["results"]]
        nbytes = bytes_read([first, *others])
        await self._post("/update_weight_version", json={"new_version": tag})
        return nbytes

    async def weight_version(self) -> str:
        """The tag of the weights."""
        answer = await self._get("/weight_info")
        with self._reading("/weight_info"):
            return str(answer["weight_version"])

    async def resume(self) -> None:
        """Go on."""
        await self._post("/resume")

    async def close(self) -> None:
        """Hang up; the server stays."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _generate(self, tokens: Sequence[int], arguments: dict[str, Any], **options: str) -> Any:
        owed = len(tokens) + arguments.get("n", 1) * arguments["max_tokens"]
        asked = {"token_ids": list(tokens), "sampling_params": arguments, **options}
        return await self._post(GENERATE, owed, json=asked)

    async def _wait(self, until: float) -> None:
        told = False
        while True:
            try:
                await self._get(HEALTH, timeout=_CONNECT_S)
                return
            except EngineLost as error:
                if time.perf_counter() + _POLL_S > until:
                    raise EngineLost(f"{error}; it was waited for {self._start_timeout_s:g} s") from error
                if not told:
                    self._warn("server_awaited", f"{error}; waiting for it to come up")
                    told = True
            await asyncio.sleep(_POLL_S)

    async def _check(self) -> None:
        """ValueError, with what to do, for a server that was not started for this."""
        answer = await self._get("/version")
        with self._reading("/version"):
            version = str(answer["version"])
        check_version(version, self._where)
        if (doubt := untried(version)) is not None:
            self._warn("engine_untried", f"{self._where}: {doubt}")
        info = await self._get("/server_info", params={"config_format": "json"})
        with self._reading("/server_info"):
            config = info["vllm_config"]
            has = {**config["scheduler_config"], **config["parallel_config"], **config["model_config"]}
            got = {name: str(has[name] or "none").removeprefix("torch.") for name in self._wanted}
            most = {name: int(has[name]) for name in self._least}
        for name, wanted in self._wanted.items():
            if got[name] != wanted:
                raise ValueError(
                    f"{self._where} has {name} {got[name]}, expected {wanted}; {_START} --{name.replace('_', '-')} "
                    f"{wanted}"
                )
        for name, (least, best, what) in self._least.items():
            if most[name] < least:
                raise ValueError(
                    f"{self._where} has {name} {most[name]}, expected at least {least} for {what}; {_START} "
                    f"--{name.replace('_', '-')} {best}"
                )
        self.positions = min(self.positions, most["max_model_len"])
        await self._check_model()

    async def _check_model(self) -> None:
        """ValueError for half a model, or another one, whose weights would end vLLM part way through the first load."""
        answer = await self._post("/collective_rpc", json={"method": SHAPE_METHOD})
        with self._reading("/collective_rpc"):
            served = dict(answer["results"][0])
            half_loaded = any(worker["half_loaded"] for worker in answer["results"])
        if half_loaded:
            raise ValueError(f"{self._where} has no whole model: {HALF_LOADED}; start the server anew")
        for name, wanted in self._shape.items():
            if served.get(name) != wanted:
                has = f"serves a model of {name} {served.get(name)}"
                raise ValueError(f"{self._where} {has}, expected {wanted} as in --ckpt; {_START} and that model")

    @property
    def _where(self) -> str:
        return f"the vLLM server at {self.url}"

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        """EngineLost where an answer is not what vLLM's looks like."""
        try:
            yield
        except (LookupError, TypeError, ValueError) as error:
            raise EngineLost(f"{self._where} answers {path} with something that vLLM does not: {error!r}") from error

    async def _get(self, path: str, **options: Any) -> Any:
        return await self._ask("GET", path, **options)

    async def _post(self, path: str, tokens: int = 0, **options: Any) -> Any:
        return await self._ask("POST", path, tokens, **options)

    async def _ask(self, method: str, path: str, tokens: int = 0, **options: Any) -> Any:
        """One request's answer. EngineLost where there is none, or one that says the server is in trouble."""
        import httpx

        if self._client is None:
            raise RuntimeError("the vLLM server is not connected, or closed")
        where = self._where
        try:
            request = self._client.request(method, path, **options)
            answer = await self._health.watched(self._client, path, request, tokens)
        except httpx.HTTPError as error:
            raise EngineLost(f"{where} does not answer {path}: {str(error) or type(error).__name__}") from error
        if answer.status_code in (httpx.codes.NOT_FOUND, httpx.codes.FORBIDDEN):
            needed = "--enable-scale-out" if path == GENERATE else "VLLM_SERVER_DEV_MODE=1"
            raise ValueError(f"{where} has no {path}: it was started without {needed}, or is no vLLM server; {_START}")
        said = f"{where} answers {path} with {answer.status_code}: {' '.join(answer.text.split())[:_BODY]}"
        if answer.is_server_error:
            raise EngineLost(said)
        if not answer.is_success:
            raise ValueError(f"{said}; look at --rollout-base-url and at the server's own log")
        try:
            return answer.json() if answer.content else None
        except ValueError as error:
            raise EngineLost(f"{said}, which is no JSON") from error


def _completion(choice: dict[str, Any]) -> Completion:
    rows = (choice["logprobs"] or {}).get("content") or ()
    spans = [(span["version"], span["end"] - span["start"]) for span in choice["weight_versions"] or ()]
    tokens, logprobs = [*map(index, choice["token_ids"])], [_logprob(row) for row in rows]
    return Completion(tokens, logprobs, choice["finish_reason"], spans)


def _logprob(row: Mapping[str, float]) -> float:
    found = float(row["logprob"])
    return found if found > _FLOOR else -math.inf
