"""Which prompts make up which batch, what becomes of those that come back, and how they are encoded."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsm_trainer.data.prompts import PromptBatch, PromptSource
from fsm_trainer.data.tokenizer import adds_bos, encode_prompt, load_tokenizer, takes_thinking
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


def ask(prompts: PromptSource, batch_id: int) -> PromptBatch:
    batch = prompts.batch(batch_id)
    assert batch is not None
    return batch


def rows_of(prompts: PromptSource) -> list[tuple[int, ...]]:
    """What is left, batch by batch."""
    found, batch_id = [], 1000
    while (batch := prompts.batch(batch_id)) is not None:
        prompts.settle(batch_id)
        found.append(batch.row_indices)
        batch_id += 1
    return found


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_has_every_row_once_but_the_left_out(drop_last: bool, shuffle: bool) -> None:
    prompts = source(10, drop_last=drop_last, shuffle=shuffle)
    assert prompts.total_batches == prompts.batches_left == (6 if drop_last else 8)
    assert prompts.dropped_rows_per_epoch == (1 if drop_last else 0)
    batches = [ask(prompts, i) for i in range(prompts.total_batches)]
    assert prompts.batch(len(batches)) is None
    assert prompts.batches_left == 0
    for epoch in range(2):
        sizes = [len(b.row_indices) for b in batches if b.epoch == epoch]
        assert sizes == ([3, 3, 3] if drop_last else [3, 3, 3, 1])
        rows = [row for b in batches if b.epoch == epoch for row in b.row_indices]
        assert len(set(rows)) == len(rows) == sum(sizes)
        assert shuffle or rows == list(range(len(rows)))


def test_the_same_seed_gives_the_same_order() -> None:
    assert rows_of(source(30, seed=7)) == rows_of(source(30, seed=7)) != rows_of(source(30, seed=8))


def test_a_dataset_smaller_than_a_batch() -> None:
    with pytest.raises(
        ValueError,
        match=r"^--batch-size is 11 but the dataset has 10 rows, so .* give at most 10, or --no-drop-last$",
    ):
        source(10, batch_size=11)
    assert [len(rows) for rows in rows_of(source(10, batch_size=11, drop_last=False))] == [10, 10]


def test_what_comes_back_is_served_first_in_order_and_counted() -> None:
    prompts = source(12, epochs=1, may_come_back=True)
    first, second, third = (ask(prompts, i) for i in range(3))
    assert prompts.give_back(1, "stale") == ()
    assert prompts.give_back(1, "stale") == ()  # told twice, done once
    assert prompts.give_back(0, "stale") == ()
    assert prompts.batches_left == 3
    again = [ask(prompts, i) for i in (3, 4, 5)]
    assert [b.row_indices for b in again[:2]] == [second.row_indices, first.row_indices]
    assert [b.attempt for b in (first, second, third, *again)] == [1, 1, 1, 2, 2, 1]
    assert [b.batch_id for b in again] == [3, 4, 5]
    assert again[0].rows == second.rows
    assert ask(prompts, 3) == again[0]  # asked again while it is under way


def test_after_the_last_attempt_a_prompt_is_given_up() -> None:
    prompts = source(3, epochs=1, max_attempts=2, may_come_back=True)
    rows = ask(prompts, 0).row_indices
    assert prompts.give_back(0, "cancelled", attempted=False) == ()
    assert ask(prompts, 1).attempt == 1
    assert prompts.give_back(1, "stale") == ()
    assert ask(prompts, 2).attempt == 2
    assert prompts.give_back(2, "failed") == rows
    assert prompts.given_up == {"failed": 3}
    assert prompts.batch(3) is None


@pytest.mark.parametrize("unknown", [PromptSource.settle, lambda prompts, i: prompts.give_back(i, "cancelled")])
def test_a_batch_that_never_had_prompts_is_ignored(unknown: Callable[[PromptSource, int], Any]) -> None:
    prompts = source(3, epochs=1)
    unknown(prompts, 5)
    assert len(rows_of(prompts)) == 1
    assert prompts.settled == 3


class Watched(threading.Condition):
    """Says when somebody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.set()
        return super().wait(timeout)


@pytest.mark.parametrize("end", ["settled", "given back", "given up", "closed"])
def test_the_end_of_the_data_waits_for_what_may_come_back(end: str) -> None:
    prompts = source(6, epochs=1, max_attempts=1 if end == "given up" else 3, may_come_back=True)
    prompts._changed = watched = Watched()
    first, second = ask(prompts, 0), ask(prompts, 1)
    assert prompts.would_wait
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(prompts.batch, 2)
        assert watched.waits.wait(30)
        watched.waits.clear()
        prompts.settle(0)
        assert watched.waits.wait(30)  # batch 1 may still come back
        assert not pending.done()
        if end == "settled":
            prompts.settle(1)
        elif end == "closed":
            prompts.close()
        else:
            prompts.give_back(1, "stale")
        found = pending.result(30)
    if end == "given back":
        assert found is not None
        assert found.row_indices == second.row_indices != first.row_indices
    else:
        assert found is None


def test_nothing_is_waited_for_where_nothing_can_come_back() -> None:
    prompts = source(3, epochs=1, may_come_back=False)
    ask(prompts, 0)
    assert not prompts.would_wait
    assert prompts.batch(1) is None


def test_a_closed_source_still_serves_what_it_has() -> None:
    prompts = source(3, epochs=1, may_come_back=True)
    prompts.close()
    ask(prompts, 0)
    assert prompts.batch(1) is None


def test_the_state_goes_on_where_it_was() -> None:
    straight = source(10, epochs=3, drop_last=False)
    begun = source(10, epochs=3, drop_last=False, may_come_back=True)
    for i in range(5):
        ask(begun, i)
    begun.settle(0)
    begun.give_back(3, "stale")
    begun.settle(2)
    state = json.loads(json.dumps(begun.state_dict()))
    resumed = source(10, epochs=3, drop_last=False)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    order = rows_of(straight)
    # What came back or was under way in the order of the batches, then the rest.
    assert rows_of(resumed) == [order[1], order[3], order[4], *order[5:]]

    assert resumed.settled == begun.settled + 10 * 3 - 6


def test_what_was_given_back_to_an_earlier_run_comes_after_what_this_one_serves() -> None:
    """Saved twice, the second time before all that the first state brought back was served."""
    straight, first = source(10, epochs=2), source(10, epochs=2)
    for i in range(4):
        ask(first, i)
    second = source(10, epochs=2)
    second.load_state_dict(first.state_dict())
    ask(second, 0)
    ask(second, 1)
    second.settle(0)
    third = source(10, epochs=2)
    third.load_state_dict(second.state_dict())
    assert rows_of(third) == rows_of(straight)[1:]


def test_a_state_with_another_batch_size_is_cut() -> None:
    begun = source(10, epochs=1, batch_size=5)
    rows = ask(begun, 0).row_indices
    resumed = source(10, epochs=1, batch_size=2, drop_last=False)
    resumed.load_state_dict(begun.state_dict())
    left = rows_of(resumed)
    assert left[:3] == [rows[0:2], rows[2:4], rows[4:]]
    assert sorted(row for batch in left for row in batch) == list(range(10))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 6}, "the checkpoint's prompts were shuffled with --seed 5, got 6; give that one"),
        ({"shuffle": False}, "the checkpoint's prompts were served with --shuffle; give the same"),
        ({"rows": 11}, "the checkpoint's dataset had 10 rows, this one has 11; give the same dataset"),
        ({"max_prompt_tokens": 1, "overlong": "drop"}, None),
    ],
)
def test_a_state_of_something_else_is_refused(changes: dict[str, Any], message: str | None) -> None:
    state = source(10).state_dict()
    other = (
        source(**{"rows": 10, **changes})
        if message
        else PromptSource(
            [{"prompt": f"{i}!"} for i in range(10)],
            CharTokenizer(),
            batch_size=3,
            epochs=2,
            seed=5,
            max_prompt_tokens=8,
        )
    )
    with pytest.raises(ValueError, match="checkpoint") as caught:
        other.load_state_dict(state)
    assert str(caught.value).startswith(message or "the checkpoint's prompts differ from these though")


def test_a_damaged_state_is_refused() -> None:
    state = source(10).state_dict()
    with pytest.raises(ValueError, match="has format 99, this version reads 1"):
        source(10).load_state_dict({**state, "format": 99})
    del state["epoch"]
    with pytest.raises(ValueError, match="lacks epoch; the checkpoint is damaged"):
        source(10).load_state_dict(state)


@settings(max_examples=150)
@given(
    rows=st.integers(1, 12),
    epochs=st.integers(1, 3),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    max_attempts=st.integers(1, 3),
    seed=st.integers(0, 2**31 - 1),
    data=st.data(),
)
def test_every_prompt_is_trained_given_up_or_back_and_none_twice_an_epoch(
    rows: int, epochs: int, drop_last: bool, shuffle: bool, max_attempts: int, seed: int, data: st.DataObject
) -> None:
    sizes = st.integers(1, rows)

    def make(batch_size: int) -> PromptSource:
        return source(
            rows, batch_size=batch_size, epochs=epochs, seed=seed, drop_last=drop_last, shuffle=shuffle,
            max_attempts=max_attempts, may_come_back=True,
        )  # fmt: skip

    batch_size = largest = data.draw(sizes)
    prompts, under_way, batch_id = make(batch_size), {}, 0
    done: list[tuple[int, int]] = []
    served: dict[tuple[int, int], int] = {}

    def take() -> bool:
        nonlocal batch_id
        batch = prompts.batch(batch_id)
        if batch is not None:
            assert len(batch.row_indices) <= batch_size
            under_way[batch_id] = batch
            for row in batch.row_indices:
                served[batch.epoch, row] = batch.attempt
        batch_id += 1
        return batch is not None

    def end(i: int, how: str) -> None:
        batch = under_way.pop(i)
        pairs = [(batch.epoch, row) for row in batch.row_indices]
        if how == "settle":
            prompts.settle(i)
            done.extend(pairs)
        else:
            lost = prompts.give_back(i, how, attempted=how != "cancelled")
            assert lost in ((), batch.row_indices)
            done.extend(pairs if lost else [])
            assert bool(lost) == (how == "stale" and batch.attempt == max_attempts)

    for move in data.draw(st.lists(st.sampled_from(["take", "take", "settle", "stale", "cancelled", "resume"]))):
        if move == "take" and not prompts.would_wait:
            take()
        elif move == "resume":
            state = json.loads(json.dumps(prompts.state_dict()))
            batch_size = data.draw(sizes)
            largest = max(largest, batch_size)
            prompts = make(batch_size)
            prompts.load_state_dict(state)
            under_way.clear()
        elif under_way and move not in ("take", "resume"):
            end(data.draw(st.sampled_from(sorted(under_way))), move)
    while True:
        for i in sorted(under_way):
            end(i, "settle")
        if not take():
            break
    assert len(done) == len(set(done))
    assert set(done) == set(served)
    assert max(served.values(), default=0) <= max_attempts
    for epoch in range(epochs):
        missing = rows - sum(pair[0] == epoch for pair in done)
        assert missing < largest if drop_last else missing == 0
    assert prompts.settled + sum(prompts.given_up.values()) == len(done)


def test_epochs_and_seeds_differ() -> None:
    orders = set()
    for seed in range(4):
        prompts = source(30, batch_size=30, epochs=4, seed=seed)
        batches = [prompts.batch(i) for i in range(4)]
        orders |= {batch.row_indices for batch in batches if batch}
    assert len(orders) == 16


def test_overlong_prompts() -> None:
    rows = [{"prompt": "123"}, {"prompt": "1234"}, {"prompt": "12"}, {"prompt": "12345"}]
    options: dict[str, Any] = {"batch_size": 2, "epochs": 1, "seed": 0, "name": "D"}
    prompts = PromptSource(rows, CharTokenizer(), max_prompt_tokens=3, overlong="drop", **options)
    assert (prompts.dataset_rows, prompts.usable_rows, prompts.overlong_rows) == (4, 2, 2)
    assert sorted(rows_of(prompts)[0]) == [0, 2]
    with pytest.raises(
        ValueError, match=r"^dataset D row 1 column prompt has 4 tokens but --max-prompt-tokens is 3; raise it, shorten"
    ):
        PromptSource(rows, CharTokenizer(), max_prompt_tokens=3, overlong="error", **options)
    assert PromptSource(rows, CharTokenizer(), max_prompt_tokens=5, overlong="error", **options).overlong_rows == 0
    with pytest.raises(ValueError, match=r"^all 4 prompts of dataset D have more than --max-prompt-tokens 1 tokens"):
        PromptSource(rows, CharTokenizer(), max_prompt_tokens=1, **options)
    with pytest.raises(ValueError, match="^--batch-size is 3 but the dataset has 2 usable rows, so an epoch"):
        PromptSource(rows, CharTokenizer(), max_prompt_tokens=3, **{**options, "batch_size": 3})


def test_prompts_that_cannot_be_encoded() -> None:
    options: dict[str, Any] = {"batch_size": 1, "epochs": 1, "seed": 0, "max_prompt_tokens": 9, "name": "D"}
    chat = [{"prompt": "a"}, {"prompt": [{"role": "user", "content": "x"}]}]
    with pytest.raises(ValueError, match="^dataset D row 0 column prompt has no tokens; give a text the tokenizer kn"):
        PromptSource([{"prompt": ""}], CharTokenizer(), **options)
    with pytest.raises(ValueError, match="^dataset D row 1 column prompt: the prompt is chat messages but the tokeniz"):
        PromptSource(chat, CharTokenizer(), **options)
    tokenizer = CharTokenizer(chat_template="some")
    with pytest.raises(
        ValueError, match=r"^dataset D row 0 column prompt: the chat template does not .*KeyError: 'con"
    ):
        PromptSource([{"prompt": [{"role": "user"}]}], tokenizer, **options)


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


@pytest.mark.parametrize("template", ["{{ enable_thinking }}", "plain"])
@pytest.mark.parametrize("thinking", [True, False])
def test_thinking_is_switched_off_where_the_template_can(template: str, thinking: bool) -> None:
    tokenizer = CharTokenizer(chat_template=template)
    encode_prompt(tokenizer, [{"role": "user", "content": "hi"}], bos=False, thinking=thinking)
    off = not thinking and template != "plain"
    assert tokenizer.variables == ({"enable_thinking": False} if off else {})
    assert takes_thinking(tokenizer) == (template != "plain")


def test_keys_that_a_table_added_to_messages_are_not_given_to_the_template(tmp_path: Path) -> None:
    from fsm_trainer.engines.tiny import char_tokenizer

    tokenizer = char_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ 'yes' if 'name' in m else m['content'] }}{% endfor %}"
    messages = [{"role": "user", "content": "1", "name": None}, {"role": "user", "content": "2", "name": "x"}]
    assert encode_prompt(tokenizer, messages, bos=False)[0] == "1yes"


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
