"""Which options vllm_serve adds to those that people give; that vLLM takes them is in tests/vllm."""

import os
import runpy
import sys
from typing import Any

import pytest

from fsm_trainer.engines import vllm_plugin, vllm_serve
from fsm_trainer.engines.vllm_plugin import MARK
from fsm_trainer.engines.vllm_serve import arguments, main


def added(*given: str, on_cpu: bool = False) -> list[str]:
    found = arguments(("MODEL", *given), on_cpu=on_cpu)
    assert found[: 2 + len(given)] == ["--model", "MODEL", *given]
    return found[2 + len(given) :]


def test_what_a_run_needs_is_added():
    assert added("--port", "8001") == [
        "--host",
        "127.0.0.1",
        "--logprobs-mode",
        "processed_logprobs",
        "--generation-config",
        "vllm",
        "--worker-extension-cls",
        "fsm_trainer.engines.vllm_worker.WeightReceiver",
        "--enable-scale-out",
        "--disable-uvicorn-access-log",
    ]
    assert added(on_cpu=True)[-2:] == ["--enforce-eager", "--no-enable-chunked-prefill"]


@pytest.mark.parametrize(
    ("given", "left_out"),
    [
        (["--host", "0.0.0.0"], "--host"),
        (["--logprobs-mode=raw_logprobs"], "--logprobs-mode"),
        (["--logprobs_mode", "raw_logprobs"], "--logprobs-mode"),
        (["--enforce-eager"], "--enforce-eager"),
        (["--no-enforce-eager"], "--enforce-eager"),
        (["--enable-chunked-prefill"], "--no-enable-chunked-prefill"),
        (["--no-enable-chunked-prefill"], "--no-enable-chunked-prefill"),
    ],
)
def test_what_is_given_wins(given: list[str], left_out: str):
    assert left_out in added(on_cpu=True)
    assert left_out not in added(*given, on_cpu=True)


def test_the_model_may_be_an_option():
    assert arguments(["--model", "MODEL"], on_cpu=False)[:2] == ["--model", "MODEL"]


def test_it_hands_over_to_vllm_with_its_environment_set(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    for name in (*vllm_serve._ENVIRONMENT, *vllm_serve.CPU_ENVIRONMENT):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    monkeypatch.setattr(vllm_serve, "check_vllm", lambda: "0.32.0")
    monkeypatch.setattr(vllm_serve, "built_for_cpu", lambda: False)
    monkeypatch.setenv(MARK, "to be restored")

    def run_module(name: str, *, run_name: str) -> None:
        assert run_name == "__main__"
        ran.append((name, sys.argv, dict(os.environ), sys.modules["__main__"].__spec__))

    monkeypatch.setattr(runpy, "run_module", run_module)
    monkeypatch.setattr(sys, "argv", ["vllm_serve", "MODEL"])
    main()
    ((name, argv, environment, spec),) = ran
    assert name == "vllm.entrypoints.openai.api_server"
    assert argv[1:] == arguments(["MODEL"], on_cpu=False)
    assert (environment["VLLM_SERVER_DEV_MODE"], environment[MARK]) == ("1", str(os.getpid()))
    assert spec is vllm_plugin.__spec__


@pytest.mark.parametrize(("argv", "code"), [(["--help"], 0), ([], 2)])
def test_help(argv: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["vllm_serve", *argv])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert "python -m fsm_trainer.engines.vllm_serve MODEL" in capsys.readouterr().out


def test_without_vllm_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def check() -> str:
        raise ValueError("vLLM is not installed; install it")

    monkeypatch.setattr(vllm_serve, "check_vllm", check)
    monkeypatch.setattr(sys, "argv", ["vllm_serve", "MODEL"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "vllm_serve: vLLM is not installed; install it\n"
