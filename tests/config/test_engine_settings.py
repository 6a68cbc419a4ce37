"""Which engines a configuration may ask for, and what auto and the defaults come to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsm_trainer.cli.flags import parse
from fsm_trainer.config import ConfigError, TrainConfig
from fsm_trainer.config.engine_settings import memory_share
from fsm_trainer.config.resolve import resolve
from fsm_trainer.config.resume import ResumePoint
from fsm_trainer.config.yaml_file import read_config_file

URL = "http://localhost:8000"


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusal(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.build(values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://a:8000", ("http://a:8000",)),
        ("http://a:8000/v1/, https://b", ("http://a:8000", "https://b")),
        ("http://[::1]:81/behind/a/proxy/v1", ("http://[::1]:81/behind/a/proxy",)),
        ("HTTP://LocalHost:80/V,https://B:443,http://c:", ("http://localhost/V", "https://b", "http://c")),
        ("none", ()),
    ],
)
def test_servers_are_known_by_their_addresses(given: str, expected: tuple[str, ...]) -> None:
    config = TrainConfig(rollout_base_url=given)
    assert config.base_urls == expected
    assert config.engines == config.workers == max(1, len(expected))
    assert TrainConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    "bad",
    ["a:8000", "ftp://a", "http://", "http://a:port", "http://a:99999", "http://a b", "http://a?x=1", "http://a,"]
    + ["http://a:0", "http://user@a", "http://:secret@a"],
)
def test_what_is_no_address(bad: str) -> None:
    expected = "expected the address of a vLLM server, such as http://localhost:8000"
    assert refusal(rollout_base_url=bad) == f"--rollout-base-url is {bad}, {expected}"


def test_servers_that_do_not_go_with_the_rest() -> None:
    for twice in ("http://a,http://a/v1", "http://a:80,http://A/", "https://a,https://a:443"):
        assert refusal(rollout_base_url=twice).endswith("expected each server once")
    assert refusal(rollout_host="server").startswith("--rollout-host server needs --rollout-base-url; ")
    assert refusal(rollout_host="inline", rollout_base_url=URL).startswith(
        "--rollout-host is inline, but --rollout-base-url names servers, "
    )
    assert refusal(rollout_engine="hf", rollout_base_url=URL).startswith(
        "--rollout-engine is hf, but --rollout-base-url names servers, which are vLLM's; "
    )
    assert refusal(rollout_base_url=URL, vllm_arg={"enforce_eager": True}).startswith(
        "--vllm-arg has no meaning with --rollout-base-url, "
    )
    assert refusal(algo="grpo", rollout_base_url="http://a,http://b") == (
        "the synchronous --algo grpo uses one rollout engine, but --rollout-base-url makes 2; give the server of one "
        "engine or --algo async-grpo"
    )
    assert refusal(async_rollout_workers=1, rollout_base_url="http://a,http://b").startswith(
        "--async-rollout-workers is 1 but --rollout-base-url makes 2 rollout engines; "
    )


def test_engines_arguments_from_flags_and_file() -> None:
    flags = ["--vllm-arg", "enforce-eager=true", "--vllm-arg", 'compilation_config={"level": 0, "a-b": [1]}']
    expected = {"enforce_eager": True, "compilation_config": {"level": 0, "a-b": [1]}}
    assert parse(flags).config.vllm_arg == expected
    Path("run.yaml").write_text("vllm:\n  enforce-eager: true\n  compilation_config: {level: 0, a-b: [1]}\n")
    assert parse(["--config", "run.yaml"]).config.vllm_arg == expected
    assert parse(["--config", "run.yaml", "--vllm-arg", "swap-space=2"]).config.vllm_arg == {"swap_space": 2}
    assert TrainConfig.from_json(TrainConfig(vllm_arg=expected).to_json()).vllm_arg == expected
    assert TrainConfig(vllm_arg={}).vllm_arg is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("enforce-eager", "expected KEY=VALUE, an argument of vLLM's engine such as enforce-eager=true"),
        ("=1", "expected KEY=VALUE, an argument of vLLM's engine such as enforce-eager=true"),
        (["a-b=1", "a_b=2"], "expected each argument once, but a_b is there twice"),
        ("when=2020-01-01", "expected a value of when that JSON can hold; text goes in quotes"),
        ("x=.nan", "expected a value of x that JSON can hold; text goes in quotes"),
        ("x=[", "expected values that YAML or JSON can read; text goes in quotes"),
        ({1: 2}, "expected KEY=VALUE, an argument of vLLM's engine such as enforce-eager=true"),
        (7, "expected KEY=VALUE, an argument of vLLM's engine such as enforce-eager=true"),
    ],
)
def test_what_is_no_engine_argument(given: object, message: str) -> None:
    told = refusal(vllm_arg=given)
    assert told.startswith("--vllm-arg is ")
    assert told.endswith(message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("model=x", "--vllm-arg model=x: the run decides that by --ckpt; give it there"),
        ("tensor-parallel-size=2", "--vllm-arg tensor_parallel_size=2: the run decides that by --rollout-tp-size; "),
        ("gpu-memory-utilization=0.5", "decides that by --rollout-gpu-memory-utilization; give it there"),
        ("logprobs-mode=raw_logits", "logprobs_mode=raw_logits: the run needs its own value of that; leave it out"),
        ("max-model-len=2047", "max_model_len=2047, expected at least 2048: --max-prompt-tokens and --max-new-tokens "),
        ("enable-prefix-caching=no thanks", "enable_prefix_caching=no thanks, expected true or false"),
    ],
)
def test_engine_arguments_that_the_run_decides(given: str, message: str) -> None:
    assert message in refusal(vllm_arg=given, rollout_engine="vllm")


def test_engine_arguments_that_may_be_given() -> None:
    given = ["max-model-len=2048", "enable-prefix-caching=false"]
    assert TrainConfig.build({"vllm_arg": given}).vllm_arg == {"max_model_len": 2048, "enable_prefix_caching": False}


def test_a_file_says_what_the_section_holds() -> None:
    Path("run.yaml").write_text("vllm: 7\n")
    with pytest.raises(ConfigError, match=r"^'vllm' is 7 in run\.yaml, expected a section of KEY: VALUE lines$"):
        read_config_file("run.yaml")
    Path("run.yaml").write_text("vllm: {model: m}\nrollout-base-url: [http://a, http://b]\n")
    values = read_config_file("run.yaml")
    assert values == {"vllm_arg": {"model": "m"}, "rollout_base_url": "http://a,http://b"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rollout_engine": "hf", "vllm_arg": ["a=1"]}, "--vllm-arg is for vllm, but --rollout-engine is hf here; "),
        (
            {"rollout_engine": "hf", "rollout_gpu_memory_utilization": 0.5},
            "--rollout-gpu-memory-utilization is for vllm, but --rollout-engine is hf here; ",
        ),
        ({"rollout_engine": "vllm", "lora_rank": 4}, "--lora-rank 4 does not go with --rollout-engine vllm in this "),
        (
            {"rollout_engine": "vllm", "top_k": 5, "temperature": 0.7},
            "--top-k with --temperature 0.7: vllm cannot say what the policy's logprobs were before these filters ",
        ),
        ({"rollout_engine": "hf", "async_sync_mode": "inflight"}, "--async-sync-mode inflight needs --rollout-engine "),
        (
            {"async_admission": "lockstep", "async_sync_mode": "inflight"},
            "--async-sync-mode inflight does not go with --async-admission lockstep, which fixes the weights ",
        ),
        (
            {"async_admission": "lockstep", "on_engine_failure": "restart"},
            "--on-engine-failure restart does not go with --async-admission lockstep, which cannot lose a batch; ",
        ),
        (
            {"algo": "grpo", "async_sync_mode": "inflight"},
            "--async-sync-mode has no meaning with the synchronous --algo grpo; ",
        ),
        (
            {"async_inflight_cache": "keep"},
            "--async-inflight-cache keep has no meaning with --async-sync-mode drain, which loads no weights amid ",
        ),
        (
            {"async_inflight_cache": "keep", "async_sync_mode": "inflight", "rollout_engine": "hf"},
            "--async-sync-mode inflight needs --rollout-engine vllm: ",
        ),
        (
            {"algo": "grpo", "async_inflight_cache": "keep"},
            "--async-inflight-cache has no meaning with the synchronous --algo grpo; ",
        ),
    ],
)
def test_combinations_that_cannot_be(values: dict[str, Any], message: str) -> None:
    assert refusal(**values).startswith(message)


@pytest.mark.parametrize(
    ("cuda_devices", "installed", "values", "expected"),
    [
        (1, True, {}, "vllm"),
        (1, False, {}, "hf"),
        (0, True, {}, "hf"),
        (1, True, {"rollout_devices": "cpu"}, "hf"),
        (1, True, {"train_devices": "cpu", "rollout_devices": "0"}, "vllm"),
        (1, True, {"lora_rank": 2}, "hf"),
        (1, True, {"top_p": 0.9, "temperature": 0.7}, "hf"),
        (1, True, {"top_p": 0.9}, "vllm"),
        (1, True, {"rollout_engine": "hf"}, "hf"),
        (0, False, {"rollout_engine": "vllm"}, "vllm"),
        (0, False, {"rollout_base_url": URL}, "vllm"),
    ],
)
def test_the_engine_that_auto_means(
    monkeypatch: pytest.MonkeyPatch, cuda_devices: int, installed: bool, values: dict[str, Any], expected: str
) -> None:
    def check_vllm() -> str:
        if not installed:
            raise ValueError("vLLM is not installed")
        return "0.33.0"

    monkeypatch.setattr("fsm_trainer.config.resolve.check_vllm", check_vllm)
    config = resolve(TrainConfig(**values), cuda_devices)
    assert config.rollout_engine == expected
    assert config.rollout_host == ("server" if "rollout_base_url" in values else "process")
    assert TrainConfig.from_json(config.to_json()) == config
    assert resolve(config, cuda_devices) == config


def test_share_of_memory_beside_the_trainer_and_alone() -> None:
    config = TrainConfig(train_devices="0")
    assert memory_share(config, ("cpu",)) is None
    assert memory_share(config, ("cuda:0", "cuda:1")) == 0.4
    assert memory_share(config, ("cuda:1",)) == 0.9
    assert memory_share(TrainConfig(train_devices="0", rollout_gpu_memory_utilization=0.7), ("cuda:0",)) == 0.7


def test_lost_batches_may_come_back() -> None:
    assert not TrainConfig().prompts_may_come_back
    assert TrainConfig(on_engine_failure="restart").prompts_may_come_back


ON_SERVERS = {"rollout_engine": "vllm", "rollout_host": "server", "rollout_base_url": URL, "max_steps": 5}
IN_FLIGHT = {"rollout_engine": "vllm", "async_sync_mode": "inflight", "async_inflight_cache": "keep"}
IN_PROCESSES = {"rollout_engine": "vllm", "vllm_arg": {"enforce_eager": True}, "rollout_gpu_memory_utilization": 0.5}


@pytest.mark.parametrize(
    ("before", "given", "expected"),
    [
        (ON_SERVERS, {}, ON_SERVERS),
        (ON_SERVERS, {"rollout_engine": "hf"}, {"rollout_engine": "hf", "max_steps": 5}),
        (ON_SERVERS, {"rollout_host": "inline"}, {"rollout_engine": "vllm", "rollout_host": "inline", "max_steps": 5}),
        (ON_SERVERS, {"rollout_base_url": "none"}, {**ON_SERVERS, "rollout_host": None, "rollout_base_url": "none"}),
        (
            ON_SERVERS,
            {"rollout_base_url": "http://b"},
            {**ON_SERVERS, "rollout_host": None, "rollout_base_url": "http://b"},
        ),
        (IN_PROCESSES, {"lr": 1e-5}, {**IN_PROCESSES, "lr": 1e-5}),
        (IN_PROCESSES, {"rollout_engine": "hf"}, {"rollout_engine": "hf"}),
        (IN_PROCESSES, {"rollout_base_url": URL}, {**IN_PROCESSES, "vllm_arg": None, "rollout_base_url": URL}),
        (IN_FLIGHT, {}, IN_FLIGHT),
        (IN_FLIGHT, {"async_sync_mode": "drain"}, {"rollout_engine": "vllm", "async_sync_mode": "drain"}),
        (
            {**ON_SERVERS, **IN_FLIGHT},
            {"rollout_engine": "hf", "async_sync_mode": "drain"},
            {"rollout_engine": "hf", "async_sync_mode": "drain", "max_steps": 5},
        ),
    ],
)
def test_a_resumed_run_may_change_its_engines(
    before: dict[str, Any], given: dict[str, Any], expected: dict[str, Any]
) -> None:
    point = ResumePoint(SimpleNamespace(path="run/checkpoints/step-000005"), before)  # type: ignore[arg-type]
    settings = point.settings(given)
    assert settings.pop("resume") == "run/checkpoints/step-000005"
    assert settings == {name: value for name, value in expected.items() if value is not None}
    TrainConfig.build(settings)
