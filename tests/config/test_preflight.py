"""What cannot run ends in exit code 2 and one line that says what to do, before anything starts."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from fsm_trainer.config import hub
from fsm_trainer.config.engine_settings import engine_warnings
from fsm_trainer.config.errors import ConfigError
from fsm_trainer.config.preflight import check_machine
from fsm_trainer.config.resolve import resolve
from fsm_trainer.config.train_config import TrainConfig

Refused = Callable[..., str]


def test_missing_settings(refused: Refused) -> None:
    assert refused(ckpt=None) == (
        "--ckpt is missing; give the model to train, a folder or a hub name, or try --preset quickstart"
    )
    assert refused(dataset_path=None) == (
        "--dataset-path is missing; give the prompts: a data file, a folder, a hub name or reasoning-gym:TASK, or try "
        "--preset quickstart"
    )
    assert refused(reward_fn_path=None) == (
        "--reward-fn-path is missing; give a Python file that defines reward_fn(record), or try --preset quickstart"
    )


def test_impossible_settings(refused: Refused) -> None:
    assert refused("--async-queue-size", "0") == "--async-queue-size is 0, expected at least 1"
    assert refused("--async-max-staleness", "-1") == "--async-max-staleness is -1, expected at least 0"
    assert refused(n_samples="1") == (
        "--n-samples is 1, expected at least 2: --algo async-grpo takes its baseline over the completions of one prompt"
    )
    assert refused("--async-admission", "lockstep", "--async-sync-interval-steps", "3") == (
        "--async-admission lockstep with --async-sync-interval-steps 3 needs --async-max-staleness of at least 2, got 1"
    )
    assert refused("--async-queue-size", "2", algo="grpo") == (
        "--async-queue-size has no meaning with the synchronous --algo grpo; leave it out or give --algo async-grpo"
    )


def test_wrong_paths(refused: Refused) -> None:
    assert refused(ckpt="./no/model") == "--ckpt ./no/model does not exist; give a model folder or a hub name"
    assert refused(dataset_path="no.jsonl") == (
        "--dataset-path no.jsonl does not exist; give a data file, a folder, a hub name or reasoning-gym:TASK"
    )
    assert refused(dataset_path="no data here") == (
        "--dataset-path no data here does not exist; give a data file, a folder, a hub name or reasoning-gym:TASK"
    )
    assert refused(reward_fn_path="no.py") == "reward file no.py does not exist; give the path of a Python file"
    assert refused(dataset_loader_fn="no.py") == (
        "dataset loader file no.py does not exist; give the path of a Python file"
    )


def test_folder_without_a_model(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert refused(ckpt="empty") == "--ckpt empty has no config.json; give a folder that from_pretrained loads"
    (tmp_path / "empty" / "config.json").write_text("{")
    assert refused(ckpt="empty").startswith("--ckpt empty: its config.json cannot be read: ")
    (tmp_path / "empty" / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "model_type": "qwen3"}))
    assert refused(ckpt="empty") == (
        "--ckpt empty has no tokenizer files; save the model's tokenizer into the same folder"
    )
    (tmp_path / "empty" / "tokenizer.json").write_text("{")
    assert refused(ckpt="empty").startswith("--ckpt empty has no tokenizer that loads: ")


def test_missing_functions(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("def score(record):\n    return 1\n")
    assert refused(reward_fn_path="other.py") == "reward file other.py does not define reward_fn; it has score"
    assert refused(reward_fn_path="other.py:rate") == "reward file other.py does not define rate; it has score"
    assert refused(dataset_loader_fn="other.py") == (
        "dataset loader file other.py does not define load_training_dataset; it has score"
    )


def test_user_code_that_does_not_run(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import json\n1 / 0\n")
    assert refused(reward_fn_path="broken.py") == (
        "reward file broken.py does not run: line 2: ZeroDivisionError: division by zero"
    )
    (tmp_path / "syntax.py").write_text("x = 1\ndef f(:\n")
    assert refused(reward_fn_path="syntax.py").startswith("reward file syntax.py does not run: line 2: SyntaxError: ")
    (tmp_path / "loader.py").write_text(
        "def load_training_dataset(path, *, default_loader):\n    raise KeyError('x')\n"
    )
    assert refused(dataset_loader_fn="loader.py") == (
        "dataset loader loader.py:load_training_dataset failed: line 2: KeyError: 'x'"
    )


def test_devices_this_machine_lacks(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsm_trainer.trainers.prepare.count_cuda_devices", lambda config: 0)
    assert refused(train_devices="0") == (
        "--train-devices is 0, but this machine has no CUDA device; give --train-devices cpu"
    )
    monkeypatch.setattr("fsm_trainer.trainers.prepare.count_cuda_devices", lambda config: 2)
    assert refused(rollout_devices="1..3") == (
        "--rollout-devices 1..3 names cuda:2, but this machine has cuda:0 to cuda:1; give one of these"
    )
    assert refused(train_devices="gpu") == (
        "--train-devices is 'gpu', expected cpu, or CUDA numbers such as 0, 0,1 or 0..3"
    )
    assert refused(train_devices="1,1") == "--train-devices is '1,1', which names a device twice; name each once"


def test_seed_command_is_refused_for_its_devices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fsm_trainer.cli.train import main

    monkeypatch.setattr("fsm_trainer.trainers.prepare.count_cuda_devices", lambda config: 0)
    argv = (
        "--algo async-grpo --ckpt Qwen/Qwen3-0.6B --dataset-path gsm8k:main --reward-fn-path r.py --train-devices 0,1"
    )
    assert main(argv.split()) == 2
    assert capsys.readouterr().err == (
        "fsm-train: error: --train-devices is 0,1, but this machine has no CUDA device; give --train-devices cpu\n"
    )


def test_more_than_one_training_device(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsm_trainer.trainers.prepare.count_cuda_devices", lambda config: 4)
    assert refused(tp_size="2") == (
        "--tp-size is 2, but the hf train engine of this version trains on one device; "
        "give --tp-size 1 and one of the --train-devices"
    )
    assert refused(train_devices="0,1") == (
        "--train-devices 0,1 names 2 devices, but the hf train engine of this version trains on one device; give one"
    )
    assert refused(rollout_devices="0,1", rollout_tp_size="2", rollout_engine="hf") == (
        "--rollout-tp-size is 2, but the hf rollout engine generates on one device; give --rollout-tp-size 1"
    )


def test_vllm_that_is_not_there_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(ckpt="m", dataset_path="d", reward_fn_path="r", rollout_engine="vllm")
    installed: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr("fsm_trainer.engines.vllm_versions.version", version)
    with pytest.raises(ConfigError, match=r"^vLLM is not installed, and --rollout-engine vllm needs it; install "):
        check_machine(config, 0)
    installed["vllm"] = "0.8.1"
    with pytest.raises(ConfigError, match=r"^the installed vLLM has version 0\.8\.1, expected "):
        check_machine(config, 0)
    installed["vllm"] = "0.33.0"
    check_machine(config, 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "max-num-seq=8",
            "max_num_seq=8: the installed vLLM has no such argument, expected max_num_seqs; correct the name",
        ),
        (
            "zzz=1",
            "zzz=1: the installed vLLM has no such argument, expected one that its documentation of engine arguments "
            "lists; correct the name",
        ),
        ("max_num_seqs=abc", 'max_num_seqs="abc", expected a whole number or null; correct the value'),
        ("max_num_seqs=8.0", "max_num_seqs=8.0, expected a whole number or null; correct the value"),
        ("max_num_seqs=true", "max_num_seqs=true, expected a whole number or null; correct the value"),
        ("enforce-eager=1", "enforce_eager=1, expected true or false; correct the value"),
        ("cpu_offload_gb=x", 'cpu_offload_gb="x", expected a number; correct the value'),
        (
            "revision=5",
            "revision=5, expected text (in quotes, where it reads as something else) or null; correct the value",
        ),
        ("max_num_seqs=8", None),
        ("max_num_seqs=null", None),
        ("enforce-eager=false", None),
        ("cpu_offload_gb=4", None),
        ("cpu_offload_gb=0.5", None),
        ("revision='5'", None),
        ("compilation_config=7", None),  # of a type that only vLLM knows
    ],
)
def test_arguments_that_the_installed_vllm_does_not_take(
    monkeypatch: pytest.MonkeyPatch, given: str, message: str | None
) -> None:
    fields = {
        "max_num_seqs": frozenset({"int", "None"}),
        "enforce_eager": frozenset({"bool"}),
        "cpu_offload_gb": frozenset({"float"}),
        "revision": frozenset({"str", "None"}),
        "compilation_config": None,
    }
    monkeypatch.setattr("fsm_trainer.config.preflight.check_vllm", lambda: "0.33.0")
    monkeypatch.setattr("fsm_trainer.config.preflight.engine_fields", lambda: fields)
    values = {"ckpt": "m", "dataset_path": "d", "reward_fn_path": "r", "rollout_engine": "vllm", "vllm_arg": [given]}
    config = TrainConfig.build(values)
    if message is None:
        check_machine(config, 0)
    else:
        with pytest.raises(ConfigError) as caught:
            check_machine(config, 0)
        assert str(caught.value) == f"--vllm-arg {message}"
    # Of a vLLM that keeps them elsewhere nothing is said before it is started.
    monkeypatch.setattr("fsm_trainer.config.preflight.engine_fields", lambda: None)
    check_machine(config, 0)


def test_servers_need_no_vllm_here_and_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsm_trainer.config.preflight.check_vllm", lambda: pytest.fail("not needed for a server"))
    config = TrainConfig(
        ckpt="m",
        dataset_path="d",
        reward_fn_path="r",
        train_devices="cpu",
        rollout_devices="7",
        rollout_base_url="http://a:1,http://b:2",
    )
    check_machine(resolve(config, 0), 0)
    assert engine_warnings(config) == [
        "--rollout-devices: left aside, since the servers of --rollout-base-url say where they run"
    ]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"rollout_gpu_memory_utilization": 0.5}, "--rollout-gpu-memory-utilization: left aside, since "),
        ({"rollout_gpu_memory_utilization": 0.5, "rollout_base_url": "http://a"}, "--rollout-gpu-memory-utilization: "),
        ({"rollout_gpu_memory_utilization": 0.5, "rollout_devices": "0"}, None),
        ({"async_span_policy": "mask"}, "--async-span-policy mask: without effect, since "),
        ({"async_span_policy": "mask", "async_sync_mode": "inflight"}, None),
        ({"max_engine_restarts": 5}, "--max-engine-restarts: without effect, since "),
        ({"max_engine_restarts": 5, "on_engine_failure": "restart"}, None),
        ({}, None),
    ],
)
def test_what_is_given_without_effect(values: dict[str, object], told: str | None) -> None:
    found = engine_warnings(TrainConfig(rollout_engine="vllm", train_devices="cpu", **values))  # type: ignore[arg-type]
    assert [each[: len(told or "")] for each in found] == ([] if told is None else [told])


def test_engine_that_auto_turns_out_to_be(refused: Refused) -> None:
    assert refused("--vllm-arg", "enforce-eager=true") == (
        "--vllm-arg is for vllm, but --rollout-engine is hf here; leave it out, or give --rollout-engine vllm"
    )
    assert refused("--async-sync-mode", "inflight") == (
        "--async-sync-mode inflight needs --rollout-engine vllm: the hf engine cannot take weights while it generates; "
        "give --async-sync-mode drain"
    )


def test_transport_that_cannot_be(refused: Refused) -> None:
    assert refused("--policy-sync-transport", "nccl").startswith("--policy-sync-transport nccl needs the vllm engine")


def test_devices_that_do_not_make_an_engine(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsm_trainer.config.preflight.check_vllm", lambda: "0.33.0")
    assert refused(rollout_engine="vllm", rollout_tp_size="2") == (
        "--rollout-devices names 1 devices, which do not divide into engines of --rollout-tp-size 2; give a multiple "
        "of 2"
    )


def test_output_folder_is_never_overwritten(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "events.arrows").write_text("")
    assert refused(output_dir="used") == (
        "--output-dir used exists and is not empty, and a run is never overwritten; give a new folder"
    )
    assert refused(save_path="used").startswith("--save-path used exists and is not empty")
    assert refused(output_dir="data.jsonl") == "--output-dir data.jsonl is a file; give a folder that is new or empty"
    assert [p.name for p in (tmp_path / "used").iterdir()] == ["events.arrows"]


def test_model_too_small_for_the_lengths(refused: Refused) -> None:
    assert refused(max_new_tokens="250") == (
        "--max-prompt-tokens 8 and --max-new-tokens 250 make 258, but the model takes 256 positions; lower one of them"
    )


def test_dataset_too_small_or_broken(refused: Refused, tmp_path: Path) -> None:
    assert refused(batch_size="11") == (
        "--batch-size is 11 but the dataset has 10 rows, so an epoch would have no whole batch; give at most 10, or "
        "--no-drop-last"
    )
    (tmp_path / "none.jsonl").write_text("\n")
    assert refused(dataset_path="none.jsonl") == (
        "dataset none.jsonl has no rows; give one with at least one batch of prompts"
    )
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1="}\n{"prompt": \n')
    assert refused(dataset_path="bad.jsonl") == (
        "dataset bad.jsonl line 2 is not valid JSON: Expecting value (column 12)"
    )
    (tmp_path / "text.jsonl").write_text('{"question": "1="}\n')
    assert refused(dataset_path="text.jsonl") == (
        "dataset text.jsonl row 0 has no `prompt` column, only question; rename the column or give --dataset-loader-fn"
    )


def test_overlong_prompt(refused: Refused) -> None:
    assert refused(max_prompt_tokens="4") == (
        "all 10 prompts of dataset data.jsonl have more than --max-prompt-tokens 4 tokens, so none is left; raise it"
    )
    assert refused(max_prompt_tokens="4", overlong_prompts="error") == (
        "dataset data.jsonl row 0 column prompt has 5 tokens but --max-prompt-tokens is 4; raise it, shorten the "
        "prompt or give --overlong-prompts drop"
    )


def test_hub_name_without_a_hub(refused: Refused) -> None:
    assert refused(ckpt="nobody/no-such-model") == (
        "--ckpt nobody/no-such-model is no folder here, is not in the local hub cache, and the hub is offline or "
        "cannot be reached; give a model folder, or fetch it once where there is a network"
    )
    assert refused(dataset_path="no-such-dataset:main").startswith(
        "dataset 'no-such-dataset:main' is no file here and the hub or its cache gave none: "
    )
    assert refused(dataset_path="a:b:c:d") == (
        "dataset 'a:b:c:d' is no file and no hub name, expected NAME[:CONFIG[:SPLIT]]"
    )


def test_hub_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.delenv("HF_HUB_OFFLINE")
    for imported_before in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(imported_before, "HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert not hub.reachable(0.1)
        hub.settle(0.1)
    assert hub.is_offline()
    assert datasets.config.HF_HUB_OFFLINE
    assert huggingface_hub.constants.HF_HUB_OFFLINE


def test_hub_that_refuses_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import http.server
    import threading

    monkeypatch.delenv("HF_HUB_OFFLINE")
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)  # answers 501 to all
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    with server:
        assert hub.reachable(30.0)
        thread.join()
    assert not hub.is_offline()
