"""From rollouts and rewards to aligned rows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_trainer.algorithms.advantages import group_advantages
from fsm_trainer.algorithms.materialize import has_policy_gradient, materialize


def test_rows_are_aligned_and_in_order():
    sequences, degenerate = materialize(
        [(5, 6), (7,)],
        [[((1, 2), (-0.1, -0.2)), ((3,), (-0.3,))], [((4,), (-0.4,)), ((8, 9, 2), (-0.5, -0.6, -0.7))]],
        [[1.0, 0.0], [0.0, 2.0]],
        eos_token_id=2,
    )
    assert not degenerate
    assert [s.tokens for s in sequences] == [(5, 6, 1, 2), (5, 6, 3), (7, 4), (7, 8, 9, 2)]
    assert [s.logprobs for s in sequences] == [(0, 0, -0.1, -0.2), (0, 0, -0.3), (0, -0.4), (0, -0.5, -0.6, -0.7)]
    assert [s.loss_mask for s in sequences] == [(0, 0, 1, 1), (0, 0, 1), (0, 1), (0, 1, 1, 1)]
    assert [s.prompt_len for s in sequences] == [2, 2, 1, 1]
    assert [s.reward for s in sequences] == [1.0, 0.0, 0.0, 2.0]
    flat = [value for group in group_advantages([[1.0, 0.0], [0.0, 2.0]]) for value in group]
    assert [s.advantage for s in sequences] == flat
    assert {s.eos_token_id for s in sequences} == {2}


def test_an_empty_completion_counts_in_the_baseline_and_has_nothing_in_the_loss():
    sequences, degenerate = materialize([(5,)], [[((), ()), ((1,), (-1.0,))]], [[0.0, 1.0]])
    assert not degenerate
    assert sequences[0].tokens == (5,)
    assert sequences[0].loss_mask == (0,)
    assert sequences[0].advantage < 0
    assert not has_policy_gradient(sequences[0])
    assert sequences[1].advantage == -sequences[0].advantage


@pytest.mark.parametrize(
    ("groups", "rewards"),
    [
        ([[((1,), (-1.0,)), ((2,), (-1.0,))]], [[1.0, 1.0]]),  # no spread
        ([[((1,), (-1.0,))]], [[1.0]]),  # a group of one
        ([[((), ()), ((), ())]], [[0.0, 1.0]]),  # spread, but nothing in the loss
    ],
)
def test_degenerate_batches(groups, rewards):
    assert materialize([(5,)], groups, rewards)[1]


def test_one_group_with_spread_is_enough():
    completion = ((1,), (-1.0,))
    _, degenerate = materialize([(5,), (6,)], [[completion] * 2] * 2, [[1.0, 1.0], [0.0, 1.0]])
    assert not degenerate


def test_another_advantage_is_used():
    def constant(rewards):
        return tuple(tuple(3.0 for _ in group) for group in rewards)

    sequences, degenerate = materialize([(5,)], [[((1,), (-1.0,))]], [[1.0]], advantage=constant)
    assert sequences[0].advantage == 3.0
    assert not degenerate


@pytest.mark.parametrize(
    ("prompts", "groups", "rewards", "message"),
    [
        ([(5,), (6,)], [[((1,), (-1.0,))]], [[1.0]], "2 prompts, 1 groups"),
        ([(5,)], [[((1,), (-1.0,))]], [[1.0, 2.0]], "1 completions but 2 rewards"),
        ([(5,)], [[((1, 2), (-1.0,))]], [[1.0]], "2 tokens but 1 logprobs"),
        ([(5,)], [[((1,), (float("nan"),))]], [[1.0]], "finite"),
        ([()], [[((1,), (-1.0,))]], [[1.0]], "prompt_len is 0"),
    ],
)
def test_what_does_not_match_is_refused(prompts, groups, rewards, message):
    with pytest.raises(ValueError, match=message):
        materialize(prompts, groups, rewards)


_completions = st.lists(st.tuples(st.integers(0, 9), st.floats(-20, 0)), max_size=6)
_groups = st.lists(st.lists(st.tuples(_completions, st.floats(-5, 5)), min_size=1, max_size=4), min_size=1, max_size=4)


@given(_groups, st.integers(1, 4))
def test_any_batch_keeps_every_sample_whole(groups, prompt_len):
    prompts = [tuple(range(prompt_len))] * len(groups)
    completions = [[(tuple(t for t, _ in c), tuple(p for _, p in c)) for c, _ in group] for group in groups]
    rewards = [[reward for _, reward in group] for group in groups]
    sequences, degenerate = materialize(prompts, completions, rewards)
    flat = [completion for group in completions for completion in group]
    assert [(s.tokens[s.prompt_len :], s.logprobs[s.prompt_len :]) for s in sequences] == flat
    assert [sum(s.loss_mask) for s in sequences] == [len(tokens) for tokens, _ in flat]
    assert degenerate == all(s.advantage == 0 or not any(s.loss_mask) for s in sequences)


def test_a_completion_without_a_reward_is_in_no_baseline_and_not_in_the_loss():
    completion = ((1, 2), (-1.0, -1.0))
    groups = [[completion] * 3, [completion] * 2, [completion] * 2]
    sequences, degenerate = materialize([(5,), (6,), (7,)], groups, [[1.0, None, 0.0], [None, None], [None, 3.0]])
    assert not degenerate
    whole = [value for group in group_advantages([[1.0, 0.0]]) for value in group]
    assert [s.advantage for s in sequences] == [whole[0], 0.0, whole[1], 0.0, 0.0, 0.0, 0.0]
    assert [sum(s.loss_mask) for s in sequences] == [2, 0, 2, 0, 0, 0, 2]
    assert [s.reward != s.reward for s in sequences] == [False, True, False, True, True, True, False]


def test_nothing_but_masked_completions_is_degenerate():
    sequences, degenerate = materialize([(5,)], [[((1,), (-1.0,))] * 2], [[None, None]])
    assert degenerate
    assert not any(any(s.loss_mask) for s in sequences)


def test_versions_of_tokens_come_along_where_there_are_several():
    completion = ((1, 2, 3, 4), (-1.0,) * 4)
    spans = [[((3, 1), (5, 3)), ((3, 4),), (), ((3, 1), (3, 2), (4, 1))]]
    sequences, _ = materialize([(5, 6)], [[completion] * 4], [[0.0, 1.0, 2.0, 3.0]], spans=spans)
    assert [s.version_spans for s in sequences] == [((3, 1), (5, 3)), (), (), ((3, 3), (4, 1))]
    assert [s.old_tokens for s in sequences] == [1, 0, 0, 3]
    assert [s.loss_mask for s in sequences] == [(0, 0, 1, 1, 1, 1)] * 4


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        (((3, 1), (4, 2)), "has 3 tokens, expected the 4 of the completion"),
        (((3, 5), (4, -1)), "at least 1 a span"),
        (((3, 0), (4, 4)), "at least 1 a span"),
        (((4, 2), (3, 2)), "must have versions that grow"),
    ],
)
def test_versions_that_do_not_fit_the_tokens_are_refused(spans, message):
    completion = ((1, 2, 3, 4), (-1.0,) * 4)
    with pytest.raises(ValueError, match=message):
        materialize([(5, 6)], [[completion]], [[1.0]], spans=[[spans]])
