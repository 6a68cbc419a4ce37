"""What the engine asks of a vLLM server, and what it says when that is not started for it, broken, or gone."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from fsm_trainer.engines.base import EngineLost, Rollout, RolloutRequest, SamplingParams, Snapshot
from fsm_trainer.engines.vllm_health import ServerHealth
from fsm_trainer.engines.vllm_rollout import VLLMRolloutEngine
from fsm_trainer.engines.vllm_server import GENERATE, ServerBackend
from fsm_trainer.engines.vllm_versions import OLDEST
from fsm_trainer.engines.vllm_worker import METHOD, PATH
from tests.engines.fake_vllm_server import FakeVLLMServer, server_info

LIMIT_S = 30.0
SAMPLING = SamplingParams(n_samples=2, max_new_tokens=2)
REQUEST = RolloutRequest(3, ((4, 5), (6,)), seed=1)
SNAPSHOT = Snapshot(7, "/proc/1/fd/9", 12)
START = "start it with python -m fsm_trainer.engines.vllm_serve"
SHAPE = {"vocab_size": 20, "hidden_size": 64, "half_loaded": False}


@pytest.fixture
def server() -> Iterator[FakeVLLMServer]:
    server = FakeVLLMServer()
    yield server
    server.close()


def engine_of(
    url: str,
    sampling: SamplingParams = SAMPLING,
    start_timeout_s: float = LIMIT_S,
    warn: Callable[[str, str], None] | None = None,
    *,
    keep_cache: bool = False,
) -> VLLMRolloutEngine:
    backend = ServerBackend(
        url, sampling, dtype="float32", max_model_len=60, start_timeout_s=start_timeout_s, warn=warn
    )
    return VLLMRolloutEngine(backend, sampling, (2,), keep_cache=keep_cache)


@pytest.fixture
def engine(server: FakeVLLMServer) -> Iterator[VLLMRolloutEngine]:
    """Connected, and with weights."""
    engine = engine_of(f"{server.url}/v1/")
    engine.start()
    engine.load_weights(SNAPSHOT)
    yield engine
    engine.close()


def paths(server: FakeVLLMServer) -> list[str]:
    return [path for _, path, _ in server.asked]


def test_start_checks_the_server_and_clears_what_an_earlier_run_left(server: FakeVLLMServer) -> None:
    engine = engine_of(server.url)
    assert set(engine.start()) == {"wait_s", "check_s", "warm_up_s"}
    assert paths(server) == [
        "/health",
        "/version",
        "/server_info?config_format=json",
        "/collective_rpc",
        "/abort_requests",
        "/resume",
        GENERATE,
    ]
    engine.close()


def test_weights_go_through_the_worker_extension_and_carry_the_runs_tag(
    server: FakeVLLMServer, engine: VLLMRolloutEngine
) -> None:
    server.asked.clear()
    loaded = engine.load_weights(SNAPSHOT)
    assert (loaded.version, loaded.nbytes) == (7, 12)
    assert paths(server) == ["/collective_rpc", "/update_weight_version", "/weight_info"]
    call = server.asked[0][2]
    assert call["method"] == METHOD
    assert json.loads(call["args"][0])["location"] == SNAPSHOT.location


def test_a_batch_is_one_request_a_prompt(server: FakeVLLMServer, engine: VLLMRolloutEngine) -> None:
    server.asked.clear()
    rollout = engine.generate(REQUEST)
    # In the order of their numbers, in which the server did not send them.
    assert [[sample.tokens for sample in group] for group in rollout.groups] == [[(7, 8), (7, 9)]] * 2
    assert rollout.groups[0][0].logprobs == (-1.0, -2.0)
    assert (rollout.version_first, rollout.version_last) == (7, 7)
    bodies = [body for _, _, body in server.asked]
    assert sorted(body["token_ids"] for body in bodies) == [[4, 5], [6]]
    assert all(body["sampling_params"]["n"] == 2 for body in bodies)
    assert bodies[0]["sampling_params"]["seed"] != bodies[1]["sampling_params"]["seed"]


def test_a_server_owes_the_tokens_of_a_generation_and_none_else(
    engine: VLLMRolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    owed: list[tuple[str, int]] = []
    watched = ServerHealth.watched

    async def noting(self: ServerHealth, client: Any, what: str, request: Any, tokens: int) -> Any:
        owed.append((what, tokens))
        return await watched(self, client, what, request, tokens)

    monkeypatch.setattr(ServerHealth, "watched", noting)
    engine.generate(REQUEST)
    engine.score([(4, 5, 6)], 1.0)
    engine.load_weights(SNAPSHOT)
    # Prompts of 2 and 1 tokens with 2 samples of up to 2; a sequence of 3 and the token that scoring it draws.
    assert [each for each in owed if each[0] == GENERATE] == [(GENERATE, 6), (GENERATE, 5), (GENERATE, 4)]
    assert {tokens for what, tokens in owed if what != GENERATE} == {0}


def test_the_prefix_cache_is_kept_apart_by_load(server: FakeVLLMServer, engine: VLLMRolloutEngine) -> None:
    server.asked.clear()
    engine.generate(REQUEST)
    first, second = [body["cache_salt"] for _, _, body in server.asked]
    server.asked.clear()
    engine.score([(4, 5, 6)], 1.0)
    engine.load_weights(SNAPSHOT)
    engine.generate(RolloutRequest(4, ((4, 5),), seed=1))
    asked = [body for _, path, body in server.asked if path == GENERATE]
    assert "cache_salt" not in asked[0], "what is scored finds nothing there, and leaves it to nobody"
    assert first == second != asked[1]["cache_salt"]


def test_scores_leave_out_the_first_token(engine: VLLMRolloutEngine) -> None:
    assert engine.score([(4, 5, 6)], 1.0) == [(-0.25, -0.25)]


@pytest.mark.parametrize("keep_cache", [False, True])
def test_a_pause_keeps_what_runs_and_its_cache_if_asked_to(server: FakeVLLMServer, keep_cache: bool) -> None:
    engine = engine_of(server.url, keep_cache=keep_cache)
    engine.start()
    engine.load_weights(SNAPSHOT)
    reached, go = threading.Event(), threading.Event()

    def generate(body: Any) -> tuple[int, Any]:
        reached.set()
        assert go.wait(LIMIT_S)
        return server._generate(body)

    server.answers[GENERATE] = generate
    done: Future[Rollout] = Future()
    threading.Thread(target=lambda: done.set_result(engine.generate(REQUEST)), daemon=True).start()
    assert reached.wait(LIMIT_S)
    engine.load_weights(Snapshot(8, "/proc/1/fd/9", 12))
    go.set()
    assert (done.result(LIMIT_S).version_first, done.result(LIMIT_S).version_last) == (7 if keep_cache else 8, 8)
    asked = [path for path in paths(server) if path.startswith(("/pause", "/resume"))]
    assert asked[1:] == [f"/pause?mode=keep&clear_cache={str(not keep_cache).lower()}", "/resume"]
    engine.close()


UNFIT: list[tuple[str, dict[str, Any], str]] = [
    (
        "without dev mode",
        {"/server_info": (404, {"detail": "Not Found"})},
        f"has no /server_info: it was started without VLLM_SERVER_DEV_MODE=1, or is no vLLM server; {START}",
    ),
    (
        "without scale-out",
        {GENERATE: (403, {"error": {"message": "Scale-out endpoints are disabled."}})},
        f"has no {GENERATE}: it was started without --enable-scale-out, or is no vLLM server; {START}",
    ),
    (
        "no vLLM",
        {"/health": (404, b"nothing here")},
        f"has no /health: it was started without VLLM_SERVER_DEV_MODE=1, or is no vLLM server; {START}",
    ),
    (
        "too old",
        {"/version": (200, {"version": "0.19.1"})},
        f"has version 0.19.1, expected {OLDEST[0]}.{OLDEST[1]} or newer; upgrade it",
    ),
    (
        "other logprobs",
        {"/server_info": (200, server_info(logprobs_mode="raw_logprobs"))},
        f"has logprobs_mode raw_logprobs, expected processed_logprobs; {START} --logprobs-mode processed_logprobs",
    ),
    (
        "other dtype",
        {"/server_info": (200, server_info(dtype="torch.bfloat16"))},
        f"has dtype bfloat16, expected float32; {START} --dtype float32",
    ),
    (
        "no extension",
        {"/server_info": (200, server_info(worker_extension_cls=""))},
        f"has worker_extension_cls none, expected {PATH}; {START} --worker-extension-cls {PATH}",
    ),
    (
        "too short",
        {"/server_info": (200, server_info(max_model_len=59))},
        f"has max_model_len 59, expected at least 60 for a prompt and its completion; {START} --max-model-len 61",
    ),
    (
        "moved",
        {"/resume": (307, b"")},
        "answers /resume with 307: ; look at --rollout-base-url and at the server's own log",
    ),
    (
        "moved, and nothing more is asked",
        {"/health": (301, b"")},
        "answers /health with 301: ; look at --rollout-base-url and at the server's own log",
    ),
    (
        "too few at once",
        {"/server_info": (200, server_info(max_num_seqs=1))},
        f"has max_num_seqs 1, expected at least 2 for a prompt's --n-samples; {START} --max-num-seqs 2",
    ),
    (
        "half loaded",
        {"/collective_rpc": (200, {"results": [SHAPE, {**SHAPE, "half_loaded": True}]})},
        "has no whole model: an earlier load of weights ended part way; start the server anew",
    ),
    (
        "an API key",
        {"/version": (401, {"error": "Unauthorized"})},
        'answers /version with 401: {"error": "Unauthorized"}; look at --rollout-base-url and at the server\'s own log',
    ),
]


@pytest.mark.parametrize(("answers", "said"), [case[1:] for case in UNFIT], ids=[case[0] for case in UNFIT])
def test_a_server_that_was_not_started_for_this_is_refused_with_what_to_do(
    server: FakeVLLMServer, answers: dict[str, Any], said: str
) -> None:
    server.answers.update(answers)
    engine = engine_of(server.url)
    with pytest.raises(ValueError, match=r"^the vLLM server at ") as caught:
        engine.start()
    assert str(caught.value) == f"the vLLM server at {server.url} {said}"
    engine.close()


def test_a_server_that_serves_just_the_longest_sample_is_good(server: FakeVLLMServer) -> None:
    server.answers["/server_info"] = (200, server_info(max_model_len=60))
    engine = engine_of(server.url)
    engine.start()
    engine.load_weights(SNAPSHOT)
    # To score the longest sample would take one position more.
    assert engine.score([(1,) * 59], 1.0) is not None
    assert engine.score([(1,) * 60], 1.0) is None
    engine.close()


def test_a_server_of_just_the_samples_of_a_prompt_is_good(server: FakeVLLMServer) -> None:
    server.answers["/server_info"] = (200, server_info(max_num_seqs=2))
    engine = engine_of(server.url)
    engine.start()
    engine.close()


def test_a_greedy_run_asks_a_server_for_one_sample(server: FakeVLLMServer) -> None:
    server.answers["/server_info"] = (200, server_info(max_num_seqs=1, logprobs_mode="raw_logprobs"))
    engine = engine_of(server.url, SamplingParams(n_samples=2, temperature=0.0))
    engine.start()
    engine.close()


def test_a_server_of_another_model_is_refused_before_its_weights_are_touched(server: FakeVLLMServer) -> None:
    given: dict[str, Any] = {"dtype": "float32", "max_model_len": 60, "start_timeout_s": LIMIT_S}
    backend = ServerBackend(server.url, SAMPLING, **given, shape={"vocab_size": 20, "hidden_size": 32})
    engine = VLLMRolloutEngine(backend, SAMPLING, (2,))
    with pytest.raises(ValueError, match="serves a model of hidden_size 64, expected 32 as in --ckpt; start it with"):
        engine.start()
    engine.close()
    backend = ServerBackend(server.url, SAMPLING, **given, shape={"vocab_size": 20, "hidden_size": 64})
    engine = VLLMRolloutEngine(backend, SAMPLING, (2,))
    engine.start()
    engine.close()


def test_filters_need_a_server_of_raw_logprobs(server: FakeVLLMServer) -> None:
    engine = engine_of(server.url, SamplingParams(top_p=0.9))
    with pytest.raises(ValueError, match="has logprobs_mode processed_logprobs, expected raw_logprobs"):
        engine.start()
    engine.close()


def test_a_server_that_comes_up_late_is_waited_for(server: FakeVLLMServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsm_trainer.engines.vllm_server._POLL_S", 0.0)
    answers = iter([(503, b"loading"), (503, b"loading"), (200, b"")])
    server.answers["/health"] = lambda _: next(answers)
    told: list[tuple[str, str]] = []
    engine = engine_of(server.url, warn=lambda *words: told.append(words))
    engine.start()
    assert paths(server)[:4] == ["/health", "/health", "/health", "/version"]
    said = f"the vLLM server at {server.url} answers /health with 503: loading; waiting for it to come up"
    assert told == [("server_awaited", said)]
    engine.close()


def test_a_server_of_a_version_that_was_never_tried_is_used_with_a_warning(server: FakeVLLMServer) -> None:
    server.answers["/version"] = lambda _: (200, {"version": "0.33.1"})
    told: list[tuple[str, str]] = []
    engine = engine_of(server.url, warn=lambda *words: told.append(words))
    engine.start()
    engine.close()
    ((event, said),) = told
    assert event == "engine_untried"
    assert said.startswith(f"the vLLM server at {server.url}: vLLM 0.33.1: its sources were read, but")


def test_a_server_that_never_comes_up_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsm_trainer.engines.vllm_server._POLL_S", 0.0)
    server = FakeVLLMServer()
    server.close()
    engine = engine_of(server.url, start_timeout_s=0.0)
    with pytest.raises(EngineLost, match=r"does not answer /health: .*it was waited for 0 s"):
        engine.start()
    engine.close()


BROKEN: list[tuple[str, Any, str]] = [
    ("500", (500, {"error": "EngineCore died"}), "with 500: .*EngineCore died"),
    ("503", (503, b"busy"), "with 503: busy"),
    ("garbage", (200, b"<html>proxy</html>"), "with 200: <html>proxy</html>, which is no JSON"),
    ("other JSON", (200, {"hello": 1}), "with something that vLLM does not"),
    ("a list", (200, []), "with something that vLLM does not"),
    ("hangs up", lambda _: None, "does not answer"),
]


@pytest.mark.parametrize(("answer", "said"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
@pytest.mark.parametrize("path", [GENERATE, "/collective_rpc", "/weight_info"])
def test_a_server_that_breaks_is_lost(
    server: FakeVLLMServer, engine: VLLMRolloutEngine, path: str, answer: Any, said: str
) -> None:
    server.answers[path] = answer
    with pytest.raises(EngineLost, match=said) as caught:
        engine.generate(REQUEST) if path == GENERATE else engine.load_weights(SNAPSHOT)
    assert server.url in str(caught.value)
    if path != GENERATE:
        with pytest.raises(RuntimeError, match="no weights loaded"):
            engine.generate(REQUEST)


@pytest.mark.parametrize("results", [[], [None], [{"nbytes": 12}], ["ok"]])
def test_every_worker_says_what_it_read(server: FakeVLLMServer, engine: VLLMRolloutEngine, results: list[Any]) -> None:
    server.answers["/collective_rpc"] = (200, {"results": results})
    with pytest.raises(EngineLost, match="answers /collective_rpc with something that vLLM does not"):
        engine.load_weights(SNAPSHOT)


@pytest.mark.parametrize("floor", [-9999.0, -9999])
def test_a_logprob_at_vllms_floor_is_none(server: FakeVLLMServer, engine: VLLMRolloutEngine, floor: float) -> None:
    _, good = server._generate({"token_ids": [4], "sampling_params": {"n": 2}})
    good["choices"][0]["logprobs"]["content"][1]["logprob"] = floor
    server.answers[GENERATE] = (200, good)
    with pytest.raises(FloatingPointError, match="^weights of version 7 give logprobs that are not finite$"):
        engine.generate(RolloutRequest(3, ((4,),), seed=1))


def test_a_score_at_vllms_floor_is_none(server: FakeVLLMServer, engine: VLLMRolloutEngine) -> None:
    scores = [None, {"5": {"logprob": -9998.5}}, {"6": {"logprob": -9999.0}}]
    server.answers[GENERATE] = (200, {"choices": [], "prompt_logprobs": scores})
    assert engine.score([(4, 5, 6)], 1.0) == [(-9998.5, -math.inf)]


def test_token_ids_are_numbers(server: FakeVLLMServer, engine: VLLMRolloutEngine) -> None:
    _, good = server._generate({"token_ids": [4], "sampling_params": {"n": 2}})
    good["choices"][0]["token_ids"] = ["7", "8"]
    server.answers[GENERATE] = (200, good)
    with pytest.raises(EngineLost, match="with something that vLLM does not: TypeError"):
        engine.generate(REQUEST)


def test_a_server_that_was_restarted_is_lost(server: FakeVLLMServer, engine: VLLMRolloutEngine) -> None:
    server.tag = "default"
    with pytest.raises(EngineLost, match="serves weights 'default', which this run has not loaded into it"):
        engine.generate(REQUEST)


def test_weights_that_a_worker_cannot_read_are_told_in_its_words(
    server: FakeVLLMServer, engine: VLLMRolloutEngine
) -> None:
    good = {"nbytes": 12, "error": None, "half_loaded": False}
    bad = {"nbytes": 0, "error": "weights of version 7 are gone", "half_loaded": False}
    server.answers["/collective_rpc"] = (200, {"results": [good, bad]})
    with pytest.raises(ValueError, match="^weights of version 7 are gone$"):
        engine.load_weights(SNAPSHOT)
    server.answers["/collective_rpc"] = (200, {"results": [good, {**bad, "half_loaded": True}]})
    with pytest.raises(EngineLost, match="are gone; vLLM cannot be mended, and must be started anew"):
        engine.load_weights(SNAPSHOT)


@pytest.mark.parametrize("path", ["/collective_rpc", "/update_weight_version"])
def test_a_server_whose_vllm_dies_during_a_load_is_lost(
    server: FakeVLLMServer, engine: VLLMRolloutEngine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("fsm_trainer.engines.vllm_health._LOOK_S", 0.001)
    answers = iter([(200, b""), (503, b"")])
    server.answers |= {path: server.never, "/health": lambda _: next(answers)}
    with pytest.raises(EngineLost, match=f"answers /health with 503 during {path}"):
        engine.load_weights(SNAPSHOT)


def test_a_server_that_is_gone_during_a_load_is_lost(
    server: FakeVLLMServer, engine: VLLMRolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsm_trainer.engines.vllm_health._LOOK_S", 0.001)
    server.answers |= {"/collective_rpc": server.never, "/health": lambda _: None}
    with pytest.raises(EngineLost, match=r"has not answered /health \d times in a row, .* during /collective_rpc"):
        engine.load_weights(SNAPSHOT)


@pytest.mark.parametrize("path", [GENERATE, "/collective_rpc"])
def test_a_server_that_hangs_is_lost(
    server: FakeVLLMServer, engine: VLLMRolloutEngine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    for name, value in (("LOOK", 0.001), ("ANSWER", 0.01), ("PATIENCE", 0.035), ("PER_TOKEN", 0.0)):
        monkeypatch.setattr(f"fsm_trainer.engines.vllm_health._{name}_S", value)
    server.answers |= {path: server.never, "/health": server.never}
    with pytest.raises(EngineLost) as caught:
        engine.generate(REQUEST) if path == GENERATE else engine.load_weights(SNAPSHOT)
    said = f"has not answered /health 3 times in a row, each within 0.01 s, during {path}"
    assert str(caught.value) == f"the vLLM server at {server.url} {said}"


def test_a_server_that_does_not_answer_can_be_given_up(server: FakeVLLMServer, engine: VLLMRolloutEngine) -> None:
    reached = threading.Event()

    def never(body: Any) -> None:
        reached.set()
        server.never(body)

    server.answers[GENERATE] = never
    raised: Future[BaseException | None] = Future()

    def run() -> None:
        try:
            engine.generate(REQUEST)
        except RuntimeError as error:
            raised.set_result(error)
        else:
            raised.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    assert reached.wait(LIMIT_S)
    engine.abort()
    assert str(raised.result(LIMIT_S)) == "generation aborted"
