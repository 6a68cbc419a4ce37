"""What this package calls of vLLM is there, with the arguments it gives: what a new version would break first."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any, get_type_hints

import httpx
import pytest

from fsm_trainer.engines.base import SamplingParams, Snapshot
from fsm_trainer.engines.vllm_fields import engine_fields
from fsm_trainer.engines.vllm_health import HEALTH
from fsm_trainer.engines.vllm_requests import SCORING_ARGUMENTS, sampling_arguments
from fsm_trainer.engines.vllm_server import GENERATE
from fsm_trainer.engines.vllm_setup import Setup
from fsm_trainer.engines.vllm_transfer import OFFICIAL
from fsm_trainer.engines.vllm_versions import weight_source
from fsm_trainer.engines.weight_sync import nccl
from tests.vllm.beside import LIMIT_S
from tests.vllm.conftest import Engine

LLM = "vllm.v1.engine.async_llm:AsyncLLM"
TRANSFER = "vllm.distributed.weight_transfer"


def found(where: str) -> Any:
    """What is called so in a module."""
    module, _, name = where.partition(":")
    return attrgetter(name)(importlib.import_module(module))


@pytest.mark.parametrize(
    ("where", "arguments"),
    [
        (f"{LLM}.from_engine_args", {"engine_args"}),
        (f"{LLM}.generate", {"prompt", "sampling_params", "request_id"}),
        (f"{LLM}.pause_generation", {"mode", "clear_cache"}),
        (f"{LLM}.resume_generation", set()),
        (f"{LLM}.collective_rpc", {"method", "args"}),
        (f"{LLM}.update_weight_version", {"new_version"}),
        (f"{LLM}.get_weight_version", set()),
        (f"{LLM}.init_weight_transfer_engine", {"request"}),
        (f"{LLM}.shutdown_weight_transfer_engine", set()),
        (f"{LLM}.start_weight_update", set()),
        (f"{LLM}.update_weights", {"request"}),
        (f"{LLM}.finish_weight_update", {"weight_version"}),
        (f"{LLM}.shutdown", {"timeout"}),
        ("vllm.v1.worker.gpu_worker:Worker.reload_weights", set()),
        ("vllm.v1.worker.cpu_worker:CPUWorker.reload_weights", set()),
        ("vllm.v1.worker.gpu_model_runner:GPUModelRunner.reload_weights", {"weights_iterator"}),
        ("vllm.config:WeightTransferConfig", {"backend"}),
        (f"{TRANSFER}.base:WeightTransferInitRequest", {"init_info"}),
        (f"{TRANSFER}.base:WeightTransferUpdateRequest", {"update_info"}),
        (f"{TRANSFER}:WeightTransferTrainerFactory.trainer_init", {"init_info", "client", "source"}),
        (f"{TRANSFER}.base:TrainerWeightTransferEngine.send_weights", set()),
        (f"{TRANSFER}.base:TrainerWeightTransferEngine.shutdown", set()),
    ],
)
def test_what_is_called_takes_these_arguments(where: str, arguments: set[str]) -> None:
    called: Callable[..., object] = found(where)
    assert arguments <= set(inspect.signature(called).parameters)


def test_a_dead_vllm_says_so() -> None:
    assert isinstance(inspect.getattr_static(found(LLM), "errored"), property)
    assert issubclass(found("vllm.v1.engine.exceptions:EngineDeadError"), Exception)


def test_arguments_of_a_request() -> None:
    made = found("vllm:SamplingParams")
    kind = found("vllm.sampling_params:RequestOutputKind").FINAL_ONLY
    assert made(**sampling_arguments(SamplingParams(), (2,)), seed=1, output_kind=kind).output_kind is kind
    assert made(**SCORING_ARGUMENTS, output_kind=kind).prompt_logprobs == 0


def test_a_server_has_the_routes(server: tuple[str, int], on_server: Engine) -> None:
    wanted: dict[tuple[str, str], set[str]] = {
        ("get", HEALTH): set(),
        ("get", "/version"): set(),
        ("get", "/server_info"): {"config_format"},
        ("get", "/weight_info"): set(),
        ("post", GENERATE): set(),
        ("post", "/abort_requests"): set(),
        ("post", "/pause"): {"mode", "clear_cache"},
        ("post", "/resume"): set(),
        ("post", "/collective_rpc"): set(),
        ("post", "/update_weight_version"): set(),
    }
    on_server(n_samples=1, max_new_tokens=1).start()  # which waits until it is up
    paths = httpx.get(f"{server[0]}/openapi.json", timeout=LIMIT_S).raise_for_status().json()["paths"]
    there = {
        (method, path): {each["name"] for each in paths[path][method].get("parameters", ())}
        for method, path in wanted
        if method in paths.get(path, {})
    }
    assert {route: there.get(route, set()) & wanted[route] for route in there} == wanted


def test_what_a_server_is_asked_for() -> None:
    fields = found("vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateRequest").model_fields
    assert {"token_ids", "sampling_params", "cache_salt"} <= set(fields)


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
    from vllm.inputs import TokensPrompt

    assert {"prompt_token_ids", "cache_salt"} <= set(get_type_hints(TokensPrompt))


def test_what_a_completion_says() -> None:
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

    assert {"outputs", "prompt_logprobs"} <= set(inspect.signature(RequestOutput).parameters)
    assert "logprob" in inspect.signature(Logprob).parameters
    completion = {field.name for field in dataclasses.fields(CompletionOutput)}
    assert {"token_ids", "logprobs", "finish_reason", "weight_versions"} <= completion
    span = WeightVersionSpan(version="a", start=0, end=3)
    assert (span.version, span.end - span.start) == ("a", 3)


def test_vllm_loads_the_plugin_in_its_own_processes() -> None:
    from vllm.plugins import load_plugins_by_group

    assert "fsm_trainer" in load_plugins_by_group("vllm.general_plugins")


def test_the_sender_of_a_broadcast() -> None:
    snapshot = nccl.at_port(Snapshot(1, "", 0, "nccl", nccl.encode({}, 2, 1000)), 4321)
    info = nccl.nccl_init_info(snapshot)
    del info["rank_offset"]
    made = found(f"{TRANSFER}.nccl_engine:NCCLTrainerInitInfo")(**info, rank=0)
    assert (made.master_port, made.world_size, made.packed_buffer_size_bytes) == (4321, 3, 1000)
    client = found(f"{TRANSFER}.base:VLLMWeightSyncClient")
    told = {name for name in vars(client) if not name.startswith("_")}
    assert told <= set(dir(nccl._EngineTold)), "vLLM tells an engine more than we listen to"


def test_what_vllm_calls_its_transports() -> None:
    infos = ("nccl_engine:NCCLTrainerInitInfo", "ipc_engine:IPCTrainerInitInfo")
    assert {found(f"{TRANSFER}.{info}").backend for info in infos} == set(OFFICIAL.values())


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
