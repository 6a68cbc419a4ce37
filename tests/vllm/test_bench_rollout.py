"""Pieces of tools/bench_rollout.py, on the session's vLLM: that it measures what it says."""

from __future__ import annotations

import importlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from transformers import PreTrainedModel

from fsm_trainer.engines.base import Loaded, Rollout, RolloutRequest, Snapshot
from fsm_trainer.engines.vllm_local import LocalBackend
from fsm_trainer.engines.vllm_rollout import VLLMRolloutEngine
from tests.engines.fake_vllm_server import FakeVLLMServer
from tests.vllm.beside import LIMIT_S, begun
from tests.vllm.conftest import Engine, Publish

TOOLS = Path(__file__).parents[2] / "tools"
Tool = Callable[[str], ModuleType]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Tool:
    """A module of the tool, found as Python finds it for a script."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module


def test_both_ways_of_a_pair_ask_for_the_same(engine: Engine, publish: Publish, tool: Tool) -> None:
    rollouts = engine(n_samples=3, max_new_tokens=12)
    rollouts.load_weights(publish(0))
    request = RolloutRequest(5, ((4, 5, 6), (7, 8, 9, 14)), seed=3)
    took, outputs = tool("rollout_speed").directly(rollouts, request)
    asked = [[tuple(sample.token_ids) for sample in output.outputs] for output in outputs]
    assert asked == [[sample.tokens for sample in group] for group in rollouts.generate(request).groups]
    assert took.cpu_s > 0
    assert took.wall_s > 0


def test_batches_have_the_length_that_is_divided_by(engine: Engine, publish: Publish, tool: Tool) -> None:
    models = tool("rollout_models")
    batch = models.Batch(prompts=2, samples=3, new_tokens=40)
    rollouts = engine(n_samples=1, max_new_tokens=1)
    rollouts.load_weights(publish(0))
    models.set_batch(rollouts, batch)
    groups = rollouts.generate(batch.request(0)).groups
    # 240 draws of 32 tokens without an end of sequence that ends one.
    assert sum(len(sample.tokens) for group in groups for sample in group) == batch.tokens == 240


def test_the_cost_of_a_load_is_that_of_its_bytes(
    engine: Engine, models: list[PreTrainedModel], tool: Tool, tmp_path: Path
) -> None:
    tensors, rollouts = dict(models[0].named_parameters()), engine(n_samples=1, max_new_tokens=1)
    row = tool("rollout_syncs").cost(rollouts, "tiny", "inline", "directory", tensors, tmp_path, 1, 2.0)
    parameters = models[0].num_parameters()
    assert row["M parameters"] == parameters / 1e6
    assert row["MB"] == pytest.approx(4 * parameters / 1e6, rel=0.02)  # float32, and the files' headers
    assert row["publish GB/s"] == pytest.approx(row["MB"] / row["publish ms"])
    assert row["share of a step %"] == pytest.approx((row["publish ms"] + row["load ms"]) / 20)
    assert row["transfer ms"] < row["load ms"]


@pytest.mark.parametrize(("keep_cache", "called"), [(False, "recompute"), (True, "keep")])
def test_weights_are_loaded_while_a_batch_runs(
    engine: Engine,
    models: list[PreTrainedModel],
    tool: Tool,
    monkeypatch: pytest.MonkeyPatch,
    keep_cache: bool,
    called: str,
) -> None:
    syncs, rollouts = tool("rollout_syncs"), engine(n_samples=1, max_new_tokens=1)
    busy: list[int] = []
    cleared: set[bool] = set()
    generate, load, pause = VLLMRolloutEngine.generate, VLLMRolloutEngine.load_weights, LocalBackend.pause
    waiting = threading.Event()

    def generating(self: VLLMRolloutEngine, request: RolloutRequest) -> Rollout:
        if threading.current_thread() is threading.main_thread():
            return generate(self, request)
        self._call(pause(self._backend, False))  # so that it is not through before the first load
        running = begun(self, lambda: generate(self, request))
        waiting.set()
        return running.result(LIMIT_S)

    def noting(self: VLLMRolloutEngine, snapshot: Snapshot) -> Loaded:
        if len(busy) == 1:
            assert waiting.wait(LIMIT_S)
        busy.append(self._busy)
        return load(self, snapshot)

    async def pausing(self: LocalBackend, clear_cache: bool) -> None:
        cleared.add(clear_cache)
        await pause(self, clear_cache)

    monkeypatch.setattr(LocalBackend, "pause", pausing)
    monkeypatch.setattr(VLLMRolloutEngine, "generate", generating)
    monkeypatch.setattr(VLLMRolloutEngine, "load_weights", noting)
    monkeypatch.setitem(syncs.LONG, "tiny", tool("rollout_models").Batch(8, 1, 200))
    row = syncs.lost(rollouts, "tiny", dict(models[0].named_parameters()), 1, keep_cache)
    assert (row["cache"], cleared) == (called, {not keep_cache})
    assert busy[:2] == [0, 1], "before the batch, and while it runs"
    assert busy[-1] == 0, "that of drained sync"
    assert row["transfer"] > 0
    assert row["of that: pause"] > 0


def test_a_batch_that_is_over_before_it_is_loaded_into_is_left_out(
    engine: Engine,
    models: list[PreTrainedModel],
    tool: Tool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    syncs, rollouts = tool("rollout_syncs"), engine(n_samples=1, max_new_tokens=1)
    monkeypatch.setattr(syncs, "LOADS", 0)
    monkeypatch.setitem(syncs.LONG, "tiny", tool("rollout_models").Batch(1, 1, 2))
    row = syncs.lost(rollouts, "tiny", dict(models[0].named_parameters()), 1, False)
    assert [row[name] for name in ("inflight: lost ms", "of that: pause", "transfer", "resume")] == [None] * 4
    assert row["drain: lost ms"] > 0
    assert "no batch of 1 x 1 x 2 lasted until its first load" in capsys.readouterr().err


def test_a_server_is_asked_for_its_health_while_it_works(tool: Tool) -> None:
    server = FakeVLLMServer()

    def work() -> None:
        already = len(server.asked)
        while len(server.asked) < already + 2:
            os.sched_yield()

    row = tool("rollout_health").answers(server.url, work, 3)
    server.close()
    assert {path for _, path, _ in server.asked} == {"/health"}
    assert row["asked"] == len(server.asked) >= 6
    assert 0 < row["mean ms"] <= row["worst ms"]


def test_a_table_is_markdown(tool: Tool) -> None:
    rows = [{"model": "tiny", "ms": 1.2345}, {"model": "large one", "ms": 123.4}]
    assert tool("bench_rollout").table(rows).splitlines() == [
        "| model     | ms   |",
        "|-----------|------|",
        "| tiny      | 1.23 |",
        "| large one | 123  |",
    ]


def test_what_was_measured_of_other_models_is_kept(tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, file = tool("bench_rollout"), tmp_path / "figures.json"
    for models, value in (("tiny,smollm2", 1.0), ("tiny", 2.0)):
        monkeypatch.setitem(
            bench.PARTS, "start", lambda settings, v=value: (("s", {"model": m, "x": v}) for m in settings.models)
        )
        bench.main(["--only", "start", "--models", models, "--json", str(file), "--folder", str(tmp_path)])
    assert {row["model"]: row["x"] for row in json.loads(file.read_text())["s"]} == {"smollm2": 1.0, "tiny": 2.0}


def test_an_unknown_model_is_refused(tool: Tool, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool("bench_rollout").parse(["--models", "tiny,huge"])
    assert "--models has huge, expected some of" in capsys.readouterr().err
