"""What `fsm-replay verify` prints: how many decisions agree, or the first divergence with both sides."""

from __future__ import annotations

from typing import Any

from fsm_trainer.core.events import Record
from fsm_trainer.replay.verify import Divergence, VerifyResult


def render(result: VerifyResult) -> str:
    """The result in words, one finding a line."""
    log = result.log
    lines = []
    if log.problem is not None:
        kind = "damaged" if log.damaged else "cut off"
        lines.append(f"the log is {kind}: {log.problem}; {log.dropped_bytes} bytes dropped")
    if not log.complete:
        state = "the run is still going" if log.writing else "the run crashed"
        lines.append(f"{state}: the log has no run_end; what there is of it was verified")
    if result.divergence is None:
        changed = "" if result.same_policy else ", though the decision code has changed since the log was written"
        lines.append(f"{_count(result)} agree with the scheduler{changed}")
    else:
        lines.append(f"{_count(result)} agree, then the log diverges")
        lines.extend(_render_divergence(result.divergence))
        if not result.same_policy:
            lines.append("note: the decision code has changed since this log was written")
    return "\n".join(lines)


def to_json(result: VerifyResult) -> dict[str, Any]:
    """The result for programs."""
    divergence = result.divergence
    return {
        "ok": result.ok,
        "inputs": result.inputs,
        "decisions": result.decisions,
        "metrics": result.metrics,
        "state": result.log.state,
        "damaged": result.log.damaged,
        "problem": result.log.problem,
        "dropped_bytes": result.log.dropped_bytes,
        "same_policy": result.same_policy,
        "divergence": None
        if divergence is None
        else {
            "seq": divergence.seq,
            "problem": divergence.problem,
            "columns": list(divergence.columns),
            "expected": filled(divergence.expected),
            "logged": filled(divergence.logged),
        },
    }


def filled(record: Record | None) -> dict[str, Any] | None:
    """The columns of a record that are not null."""
    if record is None:
        return None
    values = record._asdict()
    values["kind"] = record.kind.value
    return {name: value for name, value in values.items() if value is not None}


def _count(result: VerifyResult) -> str:
    return f"{result.decisions} decisions on {result.inputs} inputs"


def _render_divergence(divergence: Divergence) -> list[str]:
    return [
        f"first divergence at seq {divergence.seq}: {divergence.problem}",
        f"  scheduler: {_render_record(divergence.expected, 'nothing')}",
        f"  log:       {_render_record(divergence.logged, 'the end')}",
    ]


def _render_record(record: Record | None, absent: str) -> str:
    values = filled(record)
    if values is None:
        return absent
    return " ".join(f"{name}={value}" for name, value in values.items())
