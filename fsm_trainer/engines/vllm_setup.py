"""How vLLM is started: its environment, its arguments, and what a run settles for it.

vLLM reads the environment when it is imported and when it starts its processes, so both are prepared here, in this
order.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

from fsm_trainer.engines.base import EngineLost, SamplingParams
from fsm_trainer.engines.vllm_fields import SETTLED, check_known_args, engine_fields
from fsm_trainer.engines.vllm_plugin import MARK, children_bound
from fsm_trainer.engines.vllm_requests import logprobs_mode
from fsm_trainer.engines.vllm_transfer import OFFICIAL
from fsm_trainer.engines.vllm_versions import check_vllm
from fsm_trainer.engines.vllm_worker import PATH
from fsm_trainer.engines.weight_sync.transport import CUDA_IPC

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Gigabytes; and threads that are not nailed to cores, because the trainer runs on them too."""
_ON_CPU = {"enforce_eager": True, "enable_chunked_prefill": False}
"""Nothing to compile for; and a prompt in two parts ends vLLM 0.32 there, if the request has a seed."""
_starting = threading.Lock()
"""The environment is the process's, and several engines may start in one (`--rollout-host inline`)."""


@dataclass(frozen=True)
class Setup:
    """What one engine is started with."""

    ckpt: str
    sampling: SamplingParams
    devices: tuple[str, ...]
    dtype: str
    positions: int
    """Most tokens of one request."""
    memory_utilization: float | None
    threads: int
    seed: int
    transport: str

    @property
    def on_cpu(self) -> bool:
        """Whether the model runs on the CPU."""
        return self.devices[0] == "cpu"

    def prepare(self) -> None:
        """Set what vLLM reads from the environment, and import it. What people have set themselves stays."""
        check_vllm()
        wanted = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
        if self.on_cpu:
            wanted |= CPU_ENVIRONMENT
        if self.transport == CUDA_IPC:
            # Handles of GPU memory are pickled; they go to processes of this engine alone.
            wanted["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        for name, value in wanted.items():
            os.environ.setdefault(name, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what vLLM uses that its own libraries deprecate
            import vllm.v1.engine.async_llm  # noqa: F401

    def arguments(self, further: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments of `AsyncEngineArgs`, `further` among them.

        ValueError for one of these that the run settles, or that the installed vLLM does not take.
        """
        for name in further:
            if name in SETTLED or name == "max_model_len":  # a run gives that as a parameter
                raise ValueError(f"vLLM's argument {name} follows from the run's own settings; leave it out")
        if further and (fields := engine_fields()) is not None:
            check_known_args(further, fields)
        return {
            "model": self.ckpt,
            "skip_tokenizer_init": True,
            "dtype": self.dtype,
            "seed": self.seed,
            "tensor_parallel_size": len(self.devices),
            "logprobs_mode": logprobs_mode(self.sampling),
            "worker_extension_cls": PATH,
            "disable_log_stats": True,
            "enable_log_requests": False,
            "max_model_len": self.positions,
            "enable_prefix_caching": True,
            # The first load brings the weights.
            "load_format": "dummy",
            "generation_config": "vllm",
            **(_ON_CPU if self.on_cpu else {}),
            **({} if self.memory_utilization is None else {"gpu_memory_utilization": self.memory_utilization}),
            **further,
        }

    def build(self, arguments: dict[str, Any]) -> AsyncLLM:
        """Start vLLM's engine process, on an event loop. EngineLost when it refuses to start."""
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        if self.transport in OFFICIAL:
            arguments = {**arguments, "weight_transfer_config": WeightTransferConfig(backend=OFFICIAL[self.transport])}
        with _starting, environment(self._process_environment()), children_bound(), interrupts_blocked():
            try:
                return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
            except (RuntimeError, ValueError) as error:  # its process has failed, and said more on standard error
                raise EngineLost(f"vLLM does not start: {error}") from error

    def _process_environment(self) -> dict[str, str]:
        """What vLLM's own processes are to see, and this one is not."""
        # Killed at the end rather than waited for, they leave shared memory, which Python then frees and deplores.
        ours = {MARK: str(os.getpid()), "PYTHONWARNINGS": "ignore"}
        if self.on_cpu:
            return {**ours, "OMP_NUM_THREADS": str(self.threads)}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = None if not visible else visible.split(",")
        numbers = [int(device.rpartition(":")[2]) for device in self.devices]
        return {**ours, "CUDA_VISIBLE_DEVICES": ",".join(str(n) if names is None else names[n] for n in numbers)}


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Keep a terminal's Ctrl-C and hang-up from the processes that this thread starts inside: the run ends them."""
    resource_tracker.ensure_running()  # it unblocks them for the thread that starts it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the processes that are started inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
