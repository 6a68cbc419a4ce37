"""An HTTP server that answers as a vLLM server does, or as a test says it answers instead."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fsm_trainer.engines.vllm_worker import PATH, SHAPE_METHOD

Answer = tuple[int, Any] | Callable[[Any], tuple[int, Any] | None]
"""Status and body (bytes as they are, anything else as JSON), or what makes them of a request's body; None: hang up."""


def server_info(**changes: Any) -> dict[str, Any]:
    """What a good server says of itself, with changes."""
    model = {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32", "max_model_len": 64}
    parallel, scheduler = {"worker_extension_cls": PATH}, {"max_num_seqs": 128}
    for name, value in changes.items():
        part: dict[str, Any] = next(each for each in (parallel, scheduler, model) if name in each)
        part[name] = value
    return {"vllm_config": {"model_config": model, "parallel_config": parallel, "scheduler_config": scheduler}}


class FakeVLLMServer:
    """Serves in a thread; `asked` are the requests so far, as method, path and body."""

    def __init__(self) -> None:
        self.tag = "default"
        self.asked: list[tuple[str, str, Any]] = []
        self.silent = threading.Event()
        """Set at the end, so that requests which are never answered end too."""
        self.answers: dict[str, Answer] = {
            "/health": (200, b""),
            "/version": (200, {"version": "0.32.0"}),
            "/server_info": (200, server_info()),
            "/abort_requests": (200, {"status": "aborted"}),
            "/pause": (200, {"status": "paused"}),
            "/resume": (200, {"status": "resumed"}),
            "/collective_rpc": self._call,
            "/update_weight_version": self._tag,
            "/weight_info": lambda _: (200, {"weight_version": self.tag}),
            "/inference/v1/generate": self._generate,
        }
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 16
            """In one packet, or the second waits for the first one's receipt."""

            def do_GET(self) -> None:
                outer._serve(self)

            do_POST = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.silent.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def never(self, _: Any) -> None:
        """An answer that does not come."""
        self.silent.wait()

    def _call(self, body: Any) -> tuple[int, Any]:
        if body["method"] == SHAPE_METHOD:
            return 200, {"results": [{"vocab_size": 20, "hidden_size": 64, "half_loaded": False}]}
        return 200, {"results": [{"nbytes": 12, "error": None, "half_loaded": False}]}

    def _tag(self, body: Any) -> tuple[int, Any]:
        self.tag = body["new_version"]
        return 200, {}

    def _generate(self, body: Any) -> tuple[int, Any]:
        tokens, params = body["token_ids"], body["sampling_params"]
        scores = [None, *({str(token): {"logprob": -0.25}} for token in tokens[1:])]
        choices = [
            {
                "index": index,
                "token_ids": [7, 8 + index],
                "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]},
                "finish_reason": "length",
                "weight_versions": [{"start": 0, "end": 2, "version": self.tag}],
            }
            for index in reversed(range(params.get("n", 1)))
        ]
        return 200, {"choices": choices, "prompt_logprobs": scores if "prompt_logprobs" in params else None}

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        text = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        path, body = request.path.partition("?")[0], json.loads(text) if text else None
        self.asked.append((request.command, request.path, body))
        answer = self.answers.get(path, (404, {"detail": "Not Found"}))
        found = answer(body) if callable(answer) else answer
        if found is None:
            request.close_connection = True
            return
        status, said = found
        data = said if isinstance(said, bytes) else json.dumps(said).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)
