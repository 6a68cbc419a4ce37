"""Which options vllm_serve adds to those that people give; that vLLM takes them is in tests/vllm."""

import pytest

from fsm_trainer.engines.vllm_serve import arguments


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
