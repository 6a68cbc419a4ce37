"""Load a checkpoint's tokenizer and turn prompts into tokens. Knows nothing of batches or models."""

from __future__ import annotations

from typing import Any, Protocol


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that prompts need."""

    bos_token_id: int | None
    chat_template: str | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any:
        """Text of a conversation up to where the assistant's answer begins."""


def load_tokenizer(ckpt: str) -> Any:
    """The tokenizer of a checkpoint folder or hub name."""
    # transformers takes seconds to import.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ckpt)


def adds_bos(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer begins a text with its BOS token by itself."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer.encode("a")[:1] == [bos]


def render_prompt(tokenizer: Tokenizer, prompt: str | list[dict[str, Any]]) -> str:
    """A plain text as it is; chat messages through the tokenizer's chat template, ready for the assistant's turn."""
    if isinstance(prompt, str):
        return prompt
    if not tokenizer.chat_template:
        raise ValueError("the prompt is chat messages but the tokenizer has no chat template; give a plain text")
    return str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))


def encode_prompt(
    tokenizer: Tokenizer, prompt: str | list[dict[str, Any]], *, bos: bool
) -> tuple[str, tuple[int, ...]]:
    """Text and tokens of a prompt.

    No special tokens are added, except BOS (with `bos`) before a plain text: an EOS that some tokenizers append would
    end the prompt, and a chat template writes its own.
    """
    text = render_prompt(tokenizer, prompt)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if bos and isinstance(prompt, str):
        assert tokenizer.bos_token_id is not None
        ids = [tokenizer.bos_token_id, *ids]
    return text, tuple(int(i) for i in ids)
