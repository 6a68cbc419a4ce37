"""A log verifies; every edit of it, however small, does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Command, CommandKind, Input, InputKind, Record, RecordKind, input_record
from fsm_trainer.eventlog.reader import read_log, records
from fsm_trainer.eventlog.schema import CONFIG_KEY, LOG_NAME, POLICY_KEY, log_metadata
from fsm_trainer.eventlog.writer import write_log
from fsm_trainer.replay import verify as verify_module
from fsm_trainer.replay.verify import VerifyResult, verify
from fsm_trainer.replay.verify_text import render, to_json
from tests.replay.virtual_run import log_of, virtual_run

CONFIG = SchedulerConfig(max_steps=4)


@pytest.fixture(scope="module")
def history() -> list[Record]:
    """A short run with metrics."""
    return virtual_run(CONFIG, metrics=True)


def rewrite(directory: Path, rows: list[Record], target: Path) -> Path:
    """The log of `directory` with other rows, renumbered and with right checksums: a hand edit."""
    numbered = [row._replace(seq=seq) for seq, row in enumerate(rows)]
    target.mkdir()
    write_log(target / LOG_NAME, numbered, read_log(directory).metadata)
    return target


def verify_rows(path: Path, rows: list[Record], config: SchedulerConfig = CONFIG) -> VerifyResult:
    (path / LOG_NAME).unlink(missing_ok=True)
    return verify(log_of(path, rows, config))


@pytest.mark.parametrize(
    "config",
    [
        SchedulerConfig(max_steps=6),
        SchedulerConfig(max_steps=12, workers=3, engines=2, max_staleness=2, sync_interval=2, save_interval=5),
        SchedulerConfig(max_steps=12, workers=2, engines=2, admission="greedy", queue_size=1),
        SchedulerConfig(max_steps=12, workers=2, admission="lockstep", max_staleness=2, sync_interval=2),
        SchedulerConfig(max_staleness=0),
    ],
    ids=lambda config: f"{config.admission}-{config.workers}",
)
@pytest.mark.parametrize("fault", [{}, {"fail_generation_of": 3}])
def test_every_run_verifies(tmp_path: Path, config: SchedulerConfig, fault: dict[str, int]) -> None:
    rows = virtual_run(config, prompts=9, degenerate={2}, no_step={4}, metrics=True, **fault)
    result = verify(log_of(tmp_path, rows, config))
    inputs = [row for row in rows if row.kind is RecordKind.INPUT]
    metrics = [row for row in rows if row.kind is RecordKind.METRIC]
    assert result.divergence is None, render(result)
    assert result.ok
    assert result.complete
    assert result.same_policy
    assert (result.inputs, result.metrics) == (len(inputs), len(metrics))
    assert result.inputs + result.metrics + result.decisions == len(rows)


def test_one_flipped_transition_with_right_checksums_fails(tmp_path: Path, history: list[Record]) -> None:
    rows = list(history)
    at = next(i for i, row in enumerate(rows) if row.dest == "trained")
    rows[at] = rows[at]._replace(dest="dropped")
    edited = rewrite(log_of(tmp_path / "run", history, CONFIG), rows, tmp_path / "edited")
    assert read_log(edited).problem is None, "nothing but the verification can tell"
    result = verify(edited)
    assert not result.ok
    assert result.divergence is not None
    assert (result.divergence.seq, result.divergence.columns) == (at, ("dest",))
    assert result.divergence.expected == history[at]
    assert result.divergence.logged == rows[at]
    text = render(result)
    assert f"first divergence at seq {at}: dest differ" in text
    assert "dest=trained" in text
    assert "dest=dropped" in text


def test_an_edit_of_any_decision_is_found_where_it_is(tmp_path: Path, history: list[Record]) -> None:
    columns = [name for name in Record._fields if name not in ("seq", "kind")]
    seen = set()
    for at, row in enumerate(history):
        if row.kind in (RecordKind.INPUT, RecordKind.METRIC):
            continue
        column = columns[at % len(columns)]
        value = getattr(row, column)
        other = value + 1 if isinstance(value, int) else "x" if column in TEXT else 1
        rows = [*history[:at], row._replace(**{column: other}), *history[at + 1 :]]
        result = verify_rows(tmp_path, rows)
        assert result.divergence is not None, (row, column)
        assert (result.divergence.seq, result.divergence.columns) == (at, (column,))
        seen.add(column)
    assert seen == set(columns)


TEXT = {"machine", "entity", "trigger", "source", "dest", "digest", "reason", "message"}


@pytest.mark.parametrize(
    ("kind", "column", "value"),
    [
        (InputKind.GENERATED, "rollout_version_first", 7),
        (InputKind.TRAINED, "train_version", 9),
        (InputKind.TRAINED, "reason", "no_step"),
        (InputKind.REWARDED, "reason", "degenerate"),
        (InputKind.LOADED, "trigger", "exhausted"),
        (InputKind.GENERATED, "cause_seq", 0),
        (InputKind.BEGIN, "trigger", "tick"),
    ],
)
def test_an_edited_input_leads_elsewhere(
    tmp_path: Path, history: list[Record], kind: InputKind, column: str, value: object
) -> None:
    at = next(i for i, row in enumerate(history) if row.kind is RecordKind.INPUT and row.trigger == kind.value)
    rows = [*history[:at], history[at]._replace(**{column: value}), *history[at + 1 :]]
    result = verify_rows(tmp_path, rows)
    assert result.divergence is not None
    assert result.divergence.seq >= at


def test_an_unknown_input_is_a_divergence_with_the_reason(tmp_path: Path, history: list[Record]) -> None:
    rows = [history[0]._replace(trigger="teleported"), *history[1:]]
    result = verify_rows(tmp_path, rows)
    assert result.divergence is not None
    assert result.divergence.seq == 0
    assert "teleported" in result.divergence.problem
    assert "scheduler: nothing" in render(result)


@pytest.mark.parametrize("chunk", [1, 13, 10_000])
def test_chunks_of_any_size_find_the_same(
    tmp_path: Path, history: list[Record], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps reach over the bounds of chunks; what is found may not hang on where they are."""
    monkeypatch.setattr(verify_module, "_CHUNK", chunk)
    whole = verify_rows(tmp_path, history)
    assert whole.ok
    assert whole.inputs + whole.metrics + whole.decisions == len(history)
    for at in range(0, len(history), 7):
        edit: dict[str, object] = {"message": "x"}
        if history[at].kind in (RecordKind.INPUT, RecordKind.METRIC):
            edit = {"trigger": "teleported"} if history[at].kind is RecordKind.INPUT else {"kind": RecordKind.WAIT}
        rows = [*history[:at], history[at]._replace(**edit), *history[at + 1 :]]
        result = verify_rows(tmp_path, rows)
        assert result.divergence is not None
        assert result.divergence.seq == at
        assert result.inputs + result.metrics + result.decisions == at
    for size in range(0, len(history), 17):
        assert verify_rows(tmp_path, history[:size]).ok


def test_the_first_of_several_divergences_counts(tmp_path: Path, history: list[Record]) -> None:
    """An input that the core cannot take comes after a decision that differs already."""
    decision = next(row.seq for row in history if row.kind is RecordKind.TRANSITION)
    impossible = next(row.seq for row in history[decision:] if row.kind is RecordKind.INPUT)
    rows = list(history)
    rows[decision] = rows[decision]._replace(message="x")
    rows[impossible] = rows[impossible]._replace(trigger="teleported")
    result = verify_rows(tmp_path, rows)
    assert result.divergence is not None
    assert (result.divergence.seq, result.divergence.columns) == (decision, ("message",))


def test_the_first_of_several_edited_rows_counts_whichever_column_it_is_in(
    tmp_path: Path, history: list[Record]
) -> None:
    first, second = [row.seq for row in history if row.kind is RecordKind.TRANSITION][3:5]
    for one, other in (("message", "machine"), ("machine", "message")):
        rows = list(history)
        rows[first] = rows[first]._replace(**{one: "x"})
        rows[second] = rows[second]._replace(**{other: "x"})
        result = verify_rows(tmp_path, rows)
        assert result.divergence is not None
        assert (result.divergence.seq, result.divergence.columns) == (first, (one,))


def test_lost_and_invented_rows_fail(tmp_path: Path, history: list[Record]) -> None:
    run = log_of(tmp_path / "run", history, CONFIG)
    for number, at in enumerate(range(1, len(history) - 1, 9)):
        lost = verify(rewrite(run, [*history[:at], *history[at + 1 :]], tmp_path / f"lost{number}"))
        assert lost.divergence is not None
        twice = verify(rewrite(run, [*history[:at], *history[at - 1 :]], tmp_path / f"twice{number}"))
        assert twice.divergence is not None


def test_another_configuration_diverges(tmp_path: Path, history: list[Record]) -> None:
    result = verify_rows(tmp_path, history, SchedulerConfig(max_steps=4, max_staleness=0))
    assert result.divergence is not None


def test_a_run_cut_anywhere_verifies_as_far_as_it_goes(tmp_path: Path, history: list[Record]) -> None:
    for size in range(0, len(history), 5):
        result = verify_rows(tmp_path, history[:size])
        assert result.ok, render(result)
        assert not result.complete
        assert result.inputs + result.metrics + result.decisions == size
        assert "the run crashed" in render(result)


def test_damage_is_not_ok_though_the_rest_agrees(tmp_path: Path, history: list[Record]) -> None:
    path = log_of(tmp_path, history, CONFIG) / LOG_NAME
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)
    result = verify(tmp_path)
    assert result.divergence is None
    assert not result.ok
    assert "the log is damaged" in render(result)


class Talkative:
    """A core that gives two rows after each input, whatever it is."""

    def __init__(self) -> None:
        self.seq = 0

    def step(self, event: Input) -> tuple[list[Record], list[Command]]:
        first = self.seq
        self.seq += 3
        ends = [Record(first + i, event.t_ns, RecordKind.RUN_END, reason="completed") for i in (1, 2)]
        return [input_record(event, first), *ends], []

    def annotate(self, record: Record) -> Record:
        return record._replace(seq=self.seq)


def test_a_whole_log_must_hold_all_decisions(tmp_path: Path) -> None:
    rows, _ = Talkative().step(Input(InputKind.BEGIN))
    short = verify(log_of(tmp_path / "short", rows[:2], CONFIG), build=lambda config: Talkative())
    assert short.divergence is not None
    assert (short.divergence.seq, short.divergence.expected, short.divergence.logged) == (2, rows[2], None)
    assert "the end" in render(short)
    assert verify(log_of(tmp_path / "whole", rows, CONFIG), build=lambda config: Talkative()).ok


def test_a_row_that_no_input_leads_to(tmp_path: Path, history: list[Record]) -> None:
    result = verify_rows(tmp_path, [Record(0, 0, RecordKind.TRANSITION, machine="trainer"), *history[1:]])
    assert result.divergence is not None
    assert "no logged input" in result.divergence.problem


def test_other_decision_code_is_named_when_it_diverges(tmp_path: Path, history: list[Record]) -> None:
    metadata = {**log_metadata(CONFIG, {}), POLICY_KEY: "0123"}
    rows = [*history[:5], history[5]._replace(t_ns=1), *history[6:]]
    write_log(tmp_path / LOG_NAME, rows, metadata)
    result = verify(tmp_path)
    assert not result.same_policy
    assert "decision code has changed" in render(result)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "no scheduler configuration"),
        ("not json", "no scheduler configuration"),
        (json.dumps({"workers": 0}), "not one of this fsm_trainer"),
        (json.dumps({**CONFIG.to_dict(), "queue_size": 0}), "queue_size is 0"),
        (json.dumps({**CONFIG.to_dict(), "telepathy": 1}), "telepathy"),
    ],
)
def test_a_log_without_a_usable_configuration(
    tmp_path: Path, history: list[Record], config: str | None, message: str
) -> None:
    metadata = {} if config is None else {CONFIG_KEY: config}
    write_log(tmp_path / LOG_NAME, history, metadata)
    with pytest.raises(ValueError, match=message):
        verify(tmp_path)


def test_json_holds_both_sides(tmp_path: Path, history: list[Record]) -> None:
    rows = [*history[:7], history[7]._replace(reason="x"), *history[8:]]
    found = json.loads(json.dumps(to_json(verify_rows(tmp_path, rows))))
    assert (found["ok"], found["divergence"]["seq"], found["divergence"]["columns"]) == (False, 7, ["reason"])
    assert found["divergence"]["logged"]["reason"] == "x"
    assert found["divergence"]["expected"]["kind"] == history[7].kind.value
    assert to_json(verify_rows(tmp_path, history))["divergence"] is None


def test_rows_read_back_are_the_rows_decided(tmp_path: Path) -> None:
    rows = virtual_run(CONFIG)
    assert list(records(read_log(log_of(tmp_path, rows, CONFIG)).table)) == rows


def test_failures_are_told_in_the_log(tmp_path: Path) -> None:
    rows = virtual_run(CONFIG, fail_generation_of=1)
    assert (rows[-1].kind, rows[-1].reason) == (RecordKind.RUN_END, "failed")
    assert rows[-1].message is not None
    assert "no memory" in rows[-1].message
    failed = [row for row in rows if row.kind is RecordKind.INPUT and row.trigger == InputKind.FAILED.value]
    command = rows[failed[0].cause_seq or 0]
    assert (command.trigger, command.batch_id) == (CommandKind.GENERATE.value, 1)
