"""The arguments and the environment that vLLM is started with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from fsm_trainer.engines.base import SamplingParams
from fsm_trainer.engines.vllm_fields import SETTLED
from fsm_trainer.engines.vllm_plugin import MARK
from fsm_trainer.engines.vllm_setup import Setup, environment
from fsm_trainer.engines.vllm_worker import PATH


def setup(**changes: Any) -> Setup:
    given: dict[str, Any] = {
        "ckpt": "MODEL",
        "sampling": SamplingParams(),
        "devices": ("cuda:2", "cuda:3"),
        "dtype": "bfloat16",
        "positions": 100,
        "memory_utilization": 0.4,
        "threads": 3,
        "seed": 7,
        "transport": "shared-memory",
    }
    return Setup(**{**given, **changes})


def test_arguments_follow_from_the_run() -> None:
    arguments = setup().arguments({})
    expected = {
        "model": "MODEL",
        "dtype": "bfloat16",
        "seed": 7,
        "max_model_len": 100,
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.4,
        "load_format": "dummy",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": PATH,
        "enable_prefix_caching": True,
    }
    assert {name: arguments[name] for name in expected} == expected
    assert "enforce_eager" not in arguments


def test_on_a_cpu_nothing_is_compiled_and_no_share_of_memory_is_given() -> None:
    arguments = setup(devices=("cpu",), memory_utilization=None).arguments({})
    assert arguments["enforce_eager"] is True
    assert "gpu_memory_utilization" not in arguments


def test_what_people_add_wins_where_the_run_does_not_settle_it() -> None:
    arguments = setup(devices=("cpu",)).arguments({"enforce_eager": False, "block_size": 32})
    assert (arguments["enforce_eager"], arguments["block_size"]) == (False, 32)


@pytest.mark.parametrize("name", [*SETTLED, "max_model_len"])
def test_what_the_run_settles_cannot_be_given(name: str) -> None:
    with pytest.raises(ValueError, match=f"vLLM's argument {name} follows from the run's own settings; leave it out"):
        setup().arguments({"block_size": 32, name: "x"})


def test_people_may_add_no_other_of_the_runs_arguments_than_these() -> None:
    given = setup(devices=("cpu",)).arguments({}).keys()
    assert given - SETTLED.keys() - {"max_model_len"} == {
        "enable_prefix_caching",
        "load_format",
        "enforce_eager",
        "enable_chunked_prefill",
    }


def test_what_the_installed_vllm_does_not_take_cannot_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"block_size": frozenset({"int"}), "kv_transfer_config": None}
    monkeypatch.setattr("fsm_trainer.engines.vllm_setup.engine_fields", lambda: fields)
    with pytest.raises(ValueError, match="blok_size=32: the installed vLLM has no such argument, expected block_size"):
        setup().arguments({"blok_size": 32})
    with pytest.raises(ValueError, match='block_size="a", expected a whole number; correct the value'):
        setup().arguments({"block_size": "a"})
    mine = object()  # of a type that only vLLM knows
    assert setup().arguments({"block_size": 32, "kv_transfer_config": mine})["kv_transfer_config"] is mine


@pytest.mark.parametrize(
    ("visible", "devices", "expected"),
    [
        (None, ("cuda:2", "cuda:3"), "2,3"),
        ("4,5,6,7", ("cuda:2", "cuda:3"), "6,7"),
        ("GPU-a,GPU-b", ("cuda:1",), "GPU-b"),
    ],
)
def test_vllm_sees_the_replicas_gpus_alone(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, devices: tuple[str, ...], expected: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    seen = setup(devices=devices)._process_environment()
    assert (seen[MARK], seen["CUDA_VISIBLE_DEVICES"]) == (str(os.getpid()), expected)


def test_on_a_cpu_it_gets_the_runs_threads() -> None:
    seen = setup(devices=("cpu",))._process_environment()
    assert (seen[MARK], seen["OMP_NUM_THREADS"]) == (str(os.getpid()), "3")
    assert "CUDA_VISIBLE_DEVICES" not in seen


def test_the_environment_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSM_TEST_OLD", "old")
    monkeypatch.delenv("FSM_TEST_NEW", raising=False)
    with environment({"FSM_TEST_OLD": "other", "FSM_TEST_NEW": "1"}):
        assert (os.environ["FSM_TEST_OLD"], os.environ["FSM_TEST_NEW"]) == ("other", "1")
    assert os.environ["FSM_TEST_OLD"] == "old"
    assert "FSM_TEST_NEW" not in os.environ


def test_a_terminals_signals_do_not_reach_the_processes_that_are_started() -> None:
    # In a fresh interpreter, where multiprocessing's tracker, which unblocks them, does not run yet.
    script = """
import signal, subprocess, sys
from multiprocessing import resource_tracker
from fsm_trainer.engines.vllm_setup import interrupts_blocked
show = "import signal; print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
with interrupts_blocked():
    resource_tracker.ensure_running()
    subprocess.run([sys.executable, "-c", show], check=True)
subprocess.run([sys.executable, "-c", show], check=True)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [str(sorted([signal.SIGINT, signal.SIGHUP])), "[]"]
