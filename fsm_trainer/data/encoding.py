"""All prompts of a dataset as tokens, once, before the run. Knows nothing of batches or epochs."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from fsm_trainer.data.rows import Rows, column
from fsm_trainer.data.tokenizer import Tokenizer, adds_bos, encode_prompt

Overlong = Literal["drop", "error"]


@dataclass(frozen=True)
class EncodedPrompts:
    """The usable prompts in the dataset's order; the tuples but the last are aligned."""

    indices: tuple[int, ...]
    """Rows of the dataset, by number."""
    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    overlong: tuple[int, ...]
    """Rows left out because they have too many tokens."""

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same rows with the same tokens only."""
        found = hashlib.blake2b(digest_size=16)
        for index, tokens in zip(self.indices, self.tokens, strict=True):
            found.update(array("q", (index, len(tokens), *tokens)).tobytes())
        return found.hexdigest()


def encode_rows(
    rows: Rows, tokenizer: Tokenizer, max_tokens: int, overlong: Overlong, *, thinking: bool = True, name: str
) -> EncodedPrompts:
    """Encode every row's prompt. ValueError names the first that cannot be, and where none is left."""
    kept: list[tuple[int, str, tuple[int, ...]]] = []
    too_long: list[int] = []
    for index, text, tokens in _encoded(column(rows, "prompt"), tokenizer, thinking, name):
        if len(tokens) <= max_tokens:
            kept.append((index, text, tokens))
        elif overlong == "drop":
            too_long.append(index)
        else:
            raise ValueError(
                f"dataset {name} row {index} column prompt has {len(tokens)} tokens but --max-prompt-tokens is "
                f"{max_tokens}; raise it, shorten the prompt or give --overlong-prompts drop"
            )
    if not kept:
        raise ValueError(
            f"all {len(too_long)} prompts of dataset {name} have more than --max-prompt-tokens {max_tokens} tokens, so "
            f"none is left; raise it"
        )
    indices, texts, all_tokens = zip(*kept, strict=True)
    return EncodedPrompts(indices, texts, all_tokens, tuple(too_long))


def _encoded(
    prompts: Sequence[Any], tokenizer: Tokenizer, thinking: bool, name: str
) -> Iterator[tuple[int, str, tuple[int, ...]]]:
    bos = adds_bos(tokenizer)
    for index, prompt in enumerate(prompts):
        try:
            text, tokens = encode_prompt(tokenizer, prompt, bos=bos, thinking=thinking)
        except ValueError as error:
            raise ValueError(f"dataset {name} row {index} column prompt: {error}") from error
        if not tokens:
            raise ValueError(f"dataset {name} row {index} column prompt has no tokens; give a text the tokenizer knows")
        yield index, text, tokens
