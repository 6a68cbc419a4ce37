"""Models and tokenizers of the transformers engines: loading them, and what a run must know about them beforehand.

Shared by the rollout and the train engine. Knows nothing of sampling, losses or versions. Every problem with what the
user gave is a ValueError of one sentence.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Building a model changes torch's global state for a while (default dtype, random numbers): one thread at a time.
LOADING = threading.Lock()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class SpecialTokens:
    """The token ids that end a completion, and the one that fills up rows."""

    eos: tuple[int, ...]
    """Any of them ends a completion; the first is the tokenizer's own if it has one."""
    pad: int


def resolve_dtype(name: str) -> torch.dtype:
    """Map a dtype's name to torch's. Raises ValueError naming the known ones."""
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}, expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def resolve_device(name: str) -> torch.device:
    """Check that a device ("cpu", "cuda", "cuda:1") is there. Raises ValueError when it is not."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}, expected 'cpu', 'cuda' or 'cuda:<number>'") from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ValueError(f"device {name} is not there: torch sees {count} CUDA devices; use 'cpu' or one it sees")
    elif device.type != "cpu":
        raise ValueError(f"device is {name!r}, expected 'cpu', 'cuda' or 'cuda:<number>'")
    return device


def load_config(ckpt: str) -> PretrainedConfig:
    """Read a checkpoint's configuration: a local directory, or a name that the hub or its cache knows."""
    from transformers import AutoConfig

    if Path(ckpt).exists() and not (Path(ckpt) / "config.json").is_file():
        raise ValueError(f"ckpt {ckpt} holds no config.json; expected a directory written by save_pretrained")
    config: PretrainedConfig = _from_pretrained(AutoConfig, ckpt, "configuration")
    return config


def load_model(ckpt: str, device: str = "cpu", dtype: str = "float32", *, seed: int = 0) -> PreTrainedModel:
    """Load a causal language model in evaluation mode, so that dropout never makes two passes differ.

    `seed` fixes what loading draws, and the global random state is left as it was. A checkpoint whose weights are not
    all the model's is a ValueError: transformers would go on with random ones.
    """
    from transformers import AutoModelForCausalLM

    place, precision = resolve_device(device), resolve_dtype(dtype)
    load_config(ckpt)
    with LOADING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel
        # Mismatches are let in, to be told below: what transformers says of them is a table.
        model, found = _from_pretrained(
            AutoModelForCausalLM,
            ckpt,
            "model",
            dtype=precision,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    for name, saved, expected in sorted(found["mismatched_keys"]):
        raise ValueError(
            f"cannot load the model of ckpt {ckpt!r}: its {name} has shape {tuple(saved)}, but its config.json says "
            f"{tuple(expected)}; give the config.json that was saved with the weights"
        )
    lacking = sorted(found["missing_keys"])
    if lacking:
        raise ValueError(
            f"ckpt {ckpt!r} lacks {len(lacking)} of the weights of a {type(model).__name__}, such as {lacking[0]}; "
            f"expected a whole causal language model"
        )
    return model.to(place).eval()


def load_tokenizer(ckpt: str) -> PreTrainedTokenizerBase:
    """Load a checkpoint's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = _from_pretrained(AutoTokenizer, ckpt, "tokenizer")
    return tokenizer


def special_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> SpecialTokens:
    """Collect what ends a completion from the tokenizer, the generation configuration and the configuration."""
    return _special_tokens(model.config, model.generation_config, tokenizer)


def checkpoint_special_tokens(ckpt: str) -> SpecialTokens:
    """The same from a checkpoint's files alone, for an engine that has no model of transformers."""
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(ckpt)
    try:
        generation = GenerationConfig.from_pretrained(ckpt)
    except OSError:  # a checkpoint need not have one
        generation = GenerationConfig.from_model_config(config)
    return _special_tokens(config, generation, load_tokenizer(ckpt))


def _special_tokens(config: object, generation: object, tokenizer: object) -> SpecialTokens:
    candidates = (
        getattr(tokenizer, "eos_token_id", None),
        getattr(generation, "eos_token_id", None),
        getattr(config, "eos_token_id", None),
    )
    eos = tuple(dict.fromkeys(token for candidate in candidates for token in _as_ids(candidate)))
    if not eos:
        raise ValueError("the checkpoint names no EOS token, expected eos_token_id in its tokenizer or config.json")
    pads = (getattr(tokenizer, "pad_token_id", None), getattr(config, "pad_token_id", None), eos[0])
    return SpecialTokens(eos, next(pad for pad in pads if pad is not None))


def context_length(config: PretrainedConfig) -> int | None:
    """Return the most tokens, prompt and completion together, that the model was built for; None if it does not say."""
    length = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return int(length) if length is not None else None


def checkpoint_context(ckpt: str) -> int | None:
    """The same of a checkpoint, from its files."""
    from transformers import AutoConfig

    return context_length(AutoConfig.from_pretrained(ckpt))


def check_context(config: PretrainedConfig, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raise ValueError when a prompt and its completion would not fit the model's context."""
    limit = context_length(config)
    if limit is not None and prompt_tokens + max_new_tokens > limit:
        raise ValueError(
            f"a prompt of {prompt_tokens} tokens and {max_new_tokens} new tokens need {prompt_tokens + max_new_tokens} "
            f"positions but the model has {limit}; lower max_new_tokens or max_prompt_tokens"
        )


def check_prompts(config: PretrainedConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raise ValueError for a prompt that is empty, too long, or holds a token that the model does not have."""
    vocab = config.get_text_config(decoder=True).vocab_size
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty, expected at least one token")
        if not 0 <= min(prompt) <= max(prompt) < vocab:
            raise ValueError(
                f"prompt {index} holds a token outside 0 to {vocab - 1}; is the tokenizer the model's own?"
            )
    check_context(config, max(map(len, prompts), default=0), max_new_tokens)


def cache_argument(model: PreTrainedModel) -> str:
    """Return the forward argument that takes the KV cache: transformers renamed it, model by model."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def set_threads(threads: int) -> None:
    """Set the threads of one torch operation. For the whole process, so engines of one process should agree."""
    if threads < 1:
        raise ValueError(f"threads is {threads}, expected at least 1")
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def _as_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _from_pretrained(factory: Any, ckpt: str, what: str, **arguments: Any) -> Any:
    """Call `from_pretrained` without progress bars or tables, and say plainly what is wrong with the checkpoint."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return factory.from_pretrained(ckpt, **arguments)
    except Exception as error:  # what a broken file makes of transformers' and safetensors' many readers
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ValueError(
            f"cannot load the {what} of ckpt {ckpt!r}, expected a local directory written by "
            f"save_pretrained or a model the hub or its local cache has: {reason}"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
