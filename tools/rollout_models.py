"""The models, batches and engines that tools/bench_rollout.py measures with."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_servers import vllm_serve

from fsm_trainer.engines.base import RolloutRequest, SamplingParams
from fsm_trainer.engines.hf_model import SpecialTokens, load_model
from fsm_trainer.engines.hf_rollout import HFRolloutEngine
from fsm_trainer.engines.tiny import build_tiny_checkpoint, char_tokenizer
from fsm_trainer.engines.vllm_local import vllm_engine
from fsm_trainer.engines.vllm_rollout import VLLMRolloutEngine
from fsm_trainer.engines.vllm_server import vllm_server_engine

ROOT = Path(__file__).parents[1]
MODELS = ("tiny", "smollm2", "qwen3-0.6b")
"""168 thousand, 135 million and 596 million parameters."""
POSITIONS = 512
"""Most tokens of a prompt and its completion."""
Engine = VLLMRolloutEngine | HFRolloutEngine


@dataclass(frozen=True)
class Batch:
    """Prompts of equal length, and how many samples of how many tokens each gets. None ends early."""

    prompts: int
    samples: int
    new_tokens: int
    prompt_tokens: int = 16

    @property
    def tokens(self) -> int:
        """Tokens drawn."""
        return self.prompts * self.samples * self.new_tokens

    @property
    def label(self) -> str:
        """Prompts x samples x tokens."""
        return f"{self.prompts} x {self.samples} x {self.new_tokens}"

    def request(self, number: int) -> RolloutRequest:
        """The batch with random prompts of its own; every model has tokens 4 to 31."""
        draw = random.Random(number)
        prompts = (tuple(draw.choices(range(4, 32), k=self.prompt_tokens)) for _ in range(self.prompts))
        return RolloutRequest(number, tuple(prompts), seed=number)


def set_batch(engine: Engine, batch: Batch) -> None:
    """Make a started engine draw this batch, to its full length: without EOS both kinds draw as many tokens.

    Engines have no way to do so, since a run never changes its sampling; starting one for each batch takes too long.
    """
    engine._sampling = SamplingParams(n_samples=batch.samples, max_new_tokens=batch.new_tokens)
    if isinstance(engine, HFRolloutEngine):
        engine._special = SpecialTokens((-1,), engine._special.pad)
    else:
        engine._eos = ()


def checkpoint(model: str, folder: Path) -> str:
    """The model's folder, made if it is not there yet: SmolLM2 takes half a minute."""
    path = folder / model
    if not path.exists():
        part = folder / f".part-{model}"
        if model == "tiny":
            build_tiny_checkpoint(part, seed=0, context=POSITIONS + 1)
        elif model == "smollm2":
            _make_smollm2(part)
        else:
            _make_qwen3(part)
        part.rename(path)
    return str(path)


@contextmanager
def local_vllm(model: str, folder: Path, threads: int) -> Iterator[VLLMRolloutEngine]:
    """A started engine in this process, without weights."""
    engine = vllm_engine(checkpoint(model, folder), SamplingParams(), max_model_len=POSITIONS, threads=threads)
    try:
        engine.start()
        yield engine
    finally:
        engine.close()


@contextmanager
def vllm_server(model: str, folder: Path, threads: int) -> Iterator[VLLMRolloutEngine]:
    """An engine on a server that is just being started; it is ready when `start` returns."""
    ckpt, log = checkpoint(model, folder), folder / "server.log"
    options = ("--load-format", "dummy", "--skip-tokenizer-init", "--enable-prefix-caching")
    quiet = ("--uvicorn-log-level", "error")
    environment = {"OMP_NUM_THREADS": str(threads), "VLLM_LOGGING_LEVEL": "ERROR"}
    with vllm_serve(ckpt, POSITIONS + 1, log, *options, *quiet, **environment) as (url, _):
        engine = vllm_server_engine(url, ckpt, SamplingParams(), max_model_len=POSITIONS, start_timeout_s=300)
        try:
            yield engine
        finally:
            engine.close()


def weights(model: str, folder: Path) -> dict[str, Any]:
    """The checkpoint's parameters by name, in float32 as they are trained."""
    return dict(load_model(checkpoint(model, folder)).named_parameters(remove_duplicate=False))


def _make_smollm2(folder: Path) -> None:
    """As examples/smollm2 does."""
    spec = importlib.util.spec_from_file_location("make_smollm2", ROOT / "examples" / "smollm2" / "make_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.convert(module.gguf_file(), folder)


def _make_qwen3(folder: Path) -> None:
    """Qwen3-0.6B's architecture with random weights; in bfloat16, to need half the disk."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=POSITIONS + 1,
        tie_word_embeddings=True,
        eos_token_id=2,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    char_tokenizer(context=POSITIONS + 1).save_pretrained(folder)
