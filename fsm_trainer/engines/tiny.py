"""A tiny causal language model with a character tokenizer, made on the spot: for the quickstart and for tests.

Qwen3 from a configuration with random weights, about 168 thousand parameters. Nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
DEFAULT_VOCAB = "0123456789=+-*/ ,.:abcdefghi"
"""With the special tokens, 32 in all."""


def build_tiny_checkpoint(
    directory: str | Path,
    *,
    seed: int,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    head_dim: int = 32,
    vocab: str = DEFAULT_VOCAB,
    context: int = 256,
) -> Path:
    """Write a checkpoint that `from_pretrained` loads, model and tokenizer; the same seed gives the same weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(SPECIAL_TOKENS) + len(vocab),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL_TOKENS.index("<pad>"),
        bos_token_id=SPECIAL_TOKENS.index("<bos>"),
        eos_token_id=SPECIAL_TOKENS.index("<eos>"),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    path = Path(directory)
    model.save_pretrained(path)
    char_tokenizer(vocab, context=context).save_pretrained(path)
    return path


def char_tokenizer(vocab: str = DEFAULT_VOCAB, *, context: int = 256) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token a character of `vocab`; others become `<unk>`, nothing is added to a text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if len(set(vocab)) != len(vocab):
        raise ValueError(f"vocab is {vocab!r}, expected each character once")
    ids = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *vocab))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
