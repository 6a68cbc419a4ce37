"""A tokenizer that a test can compute by hand: one token per character, ids are code points."""

from __future__ import annotations

from typing import Any

import pytest


class CharTokenizer:
    def __init__(self, *, bos: bool = False, eos: bool = False, chat_template: str | None = None) -> None:
        self.bos_token_id = 1
        self.eos_token_id = 2
        self.chat_template = chat_template
        self._bos, self._eos = bos, eos

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [ord(c) for c in text]
        if not add_special_tokens:
            return ids
        return [1] * self._bos + ids + [2] * self._eos

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **variables: Any
    ) -> str:
        assert not tokenize
        self.variables = variables
        text = "".join(f"<{m['role']}>{m['content']}" for m in conversation)
        return text + "<assistant>" * add_generation_prompt


@pytest.fixture
def make_tokenizer() -> type[CharTokenizer]:
    return CharTokenizer
