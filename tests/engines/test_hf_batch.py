"""Micro-batches as tensors."""

from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, MambaConfig

from fsm_trainer.core.batch import TrainSequence
from fsm_trainer.engines.hf_batch import check_sequences, collate, input_length, normalizers

CPU = torch.device("cpu")
ROWS = [
    TrainSequence((5, 6, 7, 8), (0.0, 0.0, -0.3, -0.4), 2, (0, 0, 1, 1), 0.5, 0.0),
    TrainSequence((9, 10), (0.0, 0.0), 2, (0, 0), 1.0, 0.0),
    TrainSequence((11, 12, 13, 14), (0.0, -0.1, -0.2, -0.3), 1, (0, 1, 0, 1), -1.0, 0.0),
]


def test_padded_by_hand():
    batch = collate(ROWS, 99, CPU, packed=False)
    assert batch.input_ids.tolist() == [[5, 6, 7], [11, 12, 13]]
    assert batch.position_ids is None
    assert batch.sources.tolist() == [1, 2, 3, 5]
    assert batch.targets.tolist() == [7, 8, 12, 14]
    assert batch.places.tolist() == [0, 1, 3, 5]
    assert batch.mask.tolist() == [[1, 1, 0], [1, 0, 1]]
    torch.testing.assert_close(batch.rollout_logprobs, torch.tensor([[-0.3, -0.4, 0.0], [-0.1, -0.2, -0.3]]))
    assert batch.advantages.tolist() == [0.5, -1.0]
    assert batch.spread(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [[1, 2, 0], [3, 0, 4]]


@pytest.mark.parametrize("packed", [False, True])
def test_tokens_know_their_span_where_versions_are_mixed(packed):
    assert collate(ROWS, 99, CPU, packed=packed).spans is None
    mixed = [replace(ROWS[0], version_spans=((3, 1), (4, 1))), ROWS[1], ROWS[2]]
    assert collate(mixed, 99, CPU, packed=packed).spans.tolist() == [[1, 0, 0], [0, 0, 0]]
    mixed[2] = replace(ROWS[2], version_spans=((1, 1), (3, 1), (4, 1)))
    assert collate(mixed, 99, CPU, packed=packed).spans.tolist() == [[1, 0, 0], [1, 2, 0]]


def test_packed_by_hand():
    batch = collate(ROWS, 99, CPU, packed=True)
    assert batch.input_ids.tolist() == [[5, 6, 7, 11, 12, 13]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert batch.sources.tolist() == [1, 2, 3, 5]
    assert batch.places.tolist() == [0, 1, 3, 5]


def test_rows_of_different_lengths_are_filled_up():
    short = TrainSequence((20, 21), (0.0, -1.0), 1, (0, 1), 1.0, 0.0)
    batch = collate([ROWS[0], short], 99, CPU, packed=False)
    assert batch.input_ids.tolist() == [[5, 6, 7], [20, 99, 99]]
    assert batch.sources.tolist() == [1, 2, 3]


def test_nothing_in_the_loss_is_no_micro_batch():
    assert collate([ROWS[1]], 0, CPU, packed=True) is None
    assert [input_length(row) for row in ROWS] == [3, 0, 3]
    totals = normalizers(ROWS)
    assert (totals.tokens, totals.sequences) == (4, 2)


def test_a_sequence_that_the_model_cannot_read_is_refused():
    config = GPT2Config(n_positions=4, vocab_size=15)
    check_sequences(config, ROWS)
    long = TrainSequence((1,) * 5, (0.0,) * 5, 1, (0,) * 5, 0.0, 0.0)
    with pytest.raises(ValueError, match="sequence 1 has 5 tokens but the model has 4 positions; lower max_prompt"):
        check_sequences(config, [ROWS[0], long])
    with pytest.raises(ValueError, match="sequence 2 holds a token outside 0 to 13"):
        check_sequences(GPT2Config(n_positions=4, vocab_size=14), ROWS)
    check_sequences(MambaConfig(vocab_size=15), [long])
