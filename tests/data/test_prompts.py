"""Which prompts make up which batch, and how they are encoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsm_trainer.data.prompts import PromptSource
from fsm_trainer.data.tokenizer import adds_bos, encode_prompt, load_tokenizer
from tests.data.conftest import CharTokenizer


def source(rows: int = 10, **changes: Any) -> PromptSource:
    settings = {"batch_size": 3, "epochs": 2, "seed": 5, "max_prompt_tokens": 8, **changes}
    return PromptSource([{"prompt": f"{i}="} for i in range(rows)], CharTokenizer(), **settings)


def test_batches_are_aligned_and_end() -> None:
    prompts = source()
    assert (prompts.batches_per_epoch, prompts.total_batches, prompts.dropped_rows_per_epoch) == (3, 6, 1)
    for batch_id in range(6):
        batch = prompts.batch(batch_id)
        assert batch is not None
        assert (batch.batch_id, batch.epoch) == (batch_id, batch_id // 3)
        assert batch.prompt_texts == tuple(f"{i}=" for i in batch.row_indices)
        assert batch.rows == tuple({"prompt": text} for text in batch.prompt_texts)
        assert batch.prompt_tokens == tuple(tuple(map(ord, text)) for text in batch.prompt_texts)
    assert prompts.batch(6) is None
    assert prompts.batch(100) is None


@settings(max_examples=50)
@given(
    rows=st.integers(1, 20),
    batch_size=st.integers(1, 20),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**31 - 1),
    data=st.data(),
)
def test_no_row_twice_in_an_epoch_and_any_order_of_asking(
    rows: int, batch_size: int, epochs: int, seed: int, data: st.DataObject
) -> None:
    if batch_size > rows:
        with pytest.raises(ValueError, match=f"--batch-size is {batch_size} but the dataset has {rows} rows"):
            source(rows, batch_size=batch_size, epochs=epochs, seed=seed)
        return
    prompts = source(rows, batch_size=batch_size, epochs=epochs, seed=seed)
    order = data.draw(st.permutations(range(prompts.total_batches)))
    asked = {i: prompts.batch(i) for i in order}
    again = source(rows, batch_size=batch_size, epochs=epochs, seed=seed)
    assert asked == {i: again.batch(i) for i in range(again.total_batches)}
    for epoch in range(epochs):
        seen = [index for batch in asked.values() if batch and batch.epoch == epoch for index in batch.row_indices]
        assert len(seen) == len(set(seen)) == rows // batch_size * batch_size


def test_epochs_and_seeds_differ() -> None:
    orders = set()
    for seed in range(4):
        prompts = source(30, batch_size=30, epochs=4, seed=seed)
        batches = [prompts.batch(i) for i in range(4)]
        orders |= {batch.row_indices for batch in batches if batch}
    assert len(orders) == 16


def test_overlong_and_empty_prompts() -> None:
    rows = [{"prompt": "123"}, {"prompt": "1234"}]
    options: dict[str, Any] = {"batch_size": 1, "epochs": 1, "seed": 0}
    with pytest.raises(
        ValueError, match=r"^the prompt of dataset row 1 has 4 tokens but --max-prompt-tokens is 3; raise"
    ):
        PromptSource(rows, CharTokenizer(), max_prompt_tokens=3, **options)
    PromptSource(rows, CharTokenizer(), max_prompt_tokens=4, **options)
    with pytest.raises(ValueError, match="^the prompt of dataset row 0 has no tokens"):
        PromptSource([{"prompt": ""}], CharTokenizer(), max_prompt_tokens=4, **options)
    with pytest.raises(
        ValueError, match="^dataset row 0: the prompt is chat messages but the tokenizer has no chat temp"
    ):
        PromptSource([{"prompt": [{"role": "user", "content": "x"}]}], CharTokenizer(), max_prompt_tokens=4, **options)


@pytest.mark.parametrize(
    ("bos", "eos", "expected"),
    [(False, False, [97]), (True, False, [1, 97]), (False, True, [97]), (True, True, [1, 97])],
)
def test_only_bos_is_added_to_a_plain_text(bos: bool, eos: bool, expected: list[int]) -> None:
    tokenizer = CharTokenizer(bos=bos, eos=eos)
    assert adds_bos(tokenizer) is bos
    assert encode_prompt(tokenizer, "a", bos=adds_bos(tokenizer)) == ("a", tuple(expected))


def test_chat_messages_go_through_the_template_and_get_no_second_bos() -> None:
    tokenizer = CharTokenizer(bos=True, chat_template="some")
    text, tokens = encode_prompt(tokenizer, [{"role": "user", "content": "hi"}], bos=True)
    assert text == "<user>hi<assistant>"
    assert tokens == tuple(map(ord, text))


def test_with_a_real_tokenizer(tmp_path: Path) -> None:
    from fsm_trainer.engines.tiny import char_tokenizer

    char_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert not adds_bos(tokenizer)
    text, tokens = encode_prompt(tokenizer, "4821=", bos=False)
    assert tokenizer.convert_ids_to_tokens(list(tokens)) == list("4821=")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    assert encode_prompt(tokenizer, [{"role": "user", "content": "4821"}], bos=False) == (text, tokens)
