"""Start a vLLM server that a run can generate with: `python -m fsm_trainer.engines.vllm_serve MODEL [VLLM'S OPTIONS]`.

Sets what `--rollout-base-url` needs, and hands over to vLLM's own server in this process. Such a server lets whoever
reaches it change its weights, so it listens on this machine alone unless told otherwise (`--host`).
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from fsm_trainer.engines.vllm_plugin import MARK, children_bound
from fsm_trainer.engines.vllm_setup import CPU_ENVIRONMENT
from fsm_trainer.engines.vllm_versions import built_for_cpu, check_vllm
from fsm_trainer.engines.vllm_worker import PATH

_DEFAULTS = {
    "--host": "127.0.0.1",
    "--logprobs-mode": "processed_logprobs",
    "--generation-config": "vllm",
    "--worker-extension-cls": PATH,
}
_SWITCHES = ("--enable-scale-out", "--disable-uvicorn-access-log")
"""The first opens the route that takes and gives token ids."""
_ON_CPU = ("--enforce-eager", "--no-enable-chunked-prefill")
"""As `vllm_setup` has them."""
_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}


def arguments(given: Sequence[str], *, on_cpu: bool) -> list[str]:
    """Options of vLLM's server: what a run needs, and what was given, which wins."""
    options = {_plain(part.split("=", 1)[0]) for part in given if part.startswith("--")}
    defaults = [part for name, value in _DEFAULTS.items() if _plain(name) not in options for part in (name, value)]
    defaults += [name for name in (*_SWITCHES, *(_ON_CPU if on_cpu else ())) if _plain(name) not in options]
    if given and not given[0].startswith("-"):
        return ["--model", *given, *defaults]
    return [*given, *defaults]


def _plain(option: str) -> str:
    """An option's name as all its spellings have it: with _ for -, and --no- for what is switched off."""
    return option.removeprefix("--").replace("_", "-").removeprefix("no-")


def main() -> None:
    """Run the server until it is ended."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    try:
        check_vllm()
    except ValueError as error:
        print(f"vllm_serve: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    on_cpu = built_for_cpu()
    for name, value in {**_ENVIRONMENT, **(CPU_ENVIRONMENT if on_cpu else {})}.items():
        os.environ.setdefault(name, value)
    os.environ[MARK] = str(os.getpid())
    sys.argv = ["vllm.entrypoints.openai.api_server", *arguments(sys.argv[1:], on_cpu=on_cpu)]
    with children_bound():  # which takes the place of the main module, so that must stay this one
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
