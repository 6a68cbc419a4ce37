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
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **variables: Any
    ) -> Any:
        """Text of a conversation up to where the assistant's answer begins; `variables` are the template's own."""


def load_tokenizer(ckpt: str) -> Any:
    """The tokenizer of a checkpoint folder or hub name."""
    # transformers takes seconds to import.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ckpt)


def adds_bos(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer begins a text with its BOS token by itself."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer.encode("a")[:1] == [bos]


def takes_thinking(tokenizer: Tokenizer) -> bool:
    """Whether the chat template has a switch for thinking."""
    return "enable_thinking" in str(tokenizer.chat_template or "")


def render_prompt(tokenizer: Tokenizer, prompt: str | list[dict[str, Any]], *, thinking: bool = True) -> str:
    """A plain text as it is; chat messages through the tokenizer's chat template, ready for the assistant's turn.

    `thinking` False tells a template that has a switch for it to do without.
    """
    if isinstance(prompt, str):
        return prompt
    if not tokenizer.chat_template:
        raise ValueError("the prompt is chat messages but the tokenizer has no chat template; give a plain text")
    variables = {} if thinking or not takes_thinking(tokenizer) else {"enable_thinking": False}
    messages = [_without_empty(message) for message in prompt]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
    except Exception as error:  # the template is a program that came with the tokenizer: it may raise anything
        raise ValueError(f"the chat template does not take these messages: {type(error).__name__}: {error}") from error
    return str(text)


def _without_empty(message: dict[str, Any]) -> dict[str, Any]:
    # Tables give every message the keys of all, with None in them, which templates take for something given.
    return {key: value for key, value in message.items() if value is not None or key in ("role", "content")}


def encode_prompt(
    tokenizer: Tokenizer, prompt: str | list[dict[str, Any]], *, bos: bool, thinking: bool = True
) -> tuple[str, tuple[int, ...]]:
    """Text and tokens of a prompt.

    No special tokens are added, except BOS (with `bos`) before a plain text: an EOS that some tokenizers append would
    end the prompt, and a chat template writes its own.
    """
    text = render_prompt(tokenizer, prompt, thinking=thinking)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if bos and isinstance(prompt, str):
        assert tokenizer.bos_token_id is not None
        ids = [tokenizer.bos_token_id, *ids]
    return text, tuple(int(i) for i in ids)
