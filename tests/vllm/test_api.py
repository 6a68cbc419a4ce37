"""What this package calls of vLLM is there, with the arguments it gives: what a new version would break first."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import get_type_hints

import pytest

from fsm_trainer.engines.base import SamplingParams
from fsm_trainer.engines.vllm_fields import engine_fields
from fsm_trainer.engines.vllm_setup import Setup
from fsm_trainer.engines.vllm_versions import weight_source


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("generate", {"prompt", "sampling_params", "request_id"}),
        ("pause_generation", {"mode", "clear_cache"}),
        ("resume_generation", set()),
        ("collective_rpc", {"method", "args"}),
        ("update_weight_version", {"new_version"}),
        ("get_weight_version", set()),
        ("init_weight_transfer_engine", {"request"}),
        ("shutdown_weight_transfer_engine", set()),
        ("start_weight_update", set()),
        ("update_weights", {"request"}),
        ("finish_weight_update", {"weight_version"}),
        ("shutdown", {"timeout"}),
    ],
)
def test_methods_of_async_llm(method: str, arguments: set[str]) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    found: Callable[..., object] = getattr(AsyncLLM, method)
    assert arguments <= set(inspect.signature(found).parameters)


def test_arguments_of_the_engine() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    setup = Setup("model", SamplingParams(), ("cpu",), "float32", 64, 0.5, 1, 0, "nccl")
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert set(setup.arguments({})) | {"weight_transfer_config"} <= known


def test_the_engines_fields_are_read_without_importing_it() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    found = engine_fields()
    assert found is not None
    assert found.keys() == {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert found["max_num_seqs"] == {"int", "None"}
    script = "import sys; from fsm_trainer.engines.vllm_fields import engine_fields; assert engine_fields()\n"
    script += "print('vllm' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"
    )


def test_the_prefix_cache_can_be_kept_apart() -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
    from vllm.inputs import TokensPrompt

    assert "cache_salt" in get_type_hints(TokensPrompt)
    assert "cache_salt" in GenerateRequest.model_fields


def test_what_a_completion_says() -> None:
    from vllm.outputs import CompletionOutput, WeightVersionSpan

    completion = {field.name for field in dataclasses.fields(CompletionOutput)}
    assert {"token_ids", "logprobs", "finish_reason", "weight_versions"} <= completion
    span = WeightVersionSpan(version="a", start=0, end=3)
    assert (span.version, span.end - span.start) == ("a", 3)


def test_vllm_loads_the_plugin_in_its_own_processes() -> None:
    from vllm.plugins import load_plugins_by_group

    assert "fsm_trainer" in load_plugins_by_group("vllm.general_plugins")


def test_the_source_of_a_broadcast() -> None:
    import torch
    from vllm.distributed.weight_transfer import WeightSource

    tensors = {"a": torch.zeros(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    source = weight_source(tensors)
    older = callable(source.metadata)
    described = source.metadata() if older else source.metadata
    assert isinstance(source, WeightSource)
    assert [(each.name, each.dtype, each.shape) for each in described] == [
        ("a", torch.float32, (2, 3)),
        ("b", torch.bfloat16, (4,)),
    ]
    assert list(source if older else source.iter_full()) == list(tensors.items())
