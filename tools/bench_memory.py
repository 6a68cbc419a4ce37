"""Peak memory and time of an optimiser step, ours against one that holds all logits, at a large vocabulary.

Each case runs in a fresh process: on the CPU the figure is the process's high-water mark above what it held before the
step, on a GPU what torch allocated at most. Both steps are the train engine's own but for the logprobs: the naive one
takes them, and the entropies, from the logits of every token at once.

    python tools/bench_memory.py                              # docs/training-step.md
    python tools/bench_memory.py --device cuda:0 --tokens 8192,32768 --hidden 1024 --layers 4
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SEQUENCE = 256
PROMPT = 64
KINDS = ("naive", "chunked")


def main() -> None:
    """Run every case in a process of its own and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", default="1024,2048,4096", help="tokens of a micro-batch, prompts included")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        print(json.dumps(measure(args, *args.case.split(","))))
        return
    with tempfile.TemporaryDirectory() as folder:
        build_checkpoint(folder, args)
        rows = [run_case(folder, kind, tokens) for tokens in args.tokens.split(",") for kind in KINDS]
    if args.json:
        print(json.dumps(rows))
        return
    print("| tokens | in the loss | step | peak MiB | MiB of logits | s |\n|---|---|---|---|---|---|")
    for row in rows:
        logits = row["loss_tokens"] * args.vocabulary * 4 / 2**20
        print(
            f"| {row['tokens']:.0f} | {row['loss_tokens']:.0f} | {row['kind']} | {row['peak_mib']:.0f} | {logits:.0f} "
            f"| {row['seconds']:.2f} |"
        )


def build_checkpoint(folder: str, args: argparse.Namespace) -> None:
    """A small Qwen3 with a large vocabulary and the tiny model's tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from fsm_trainer.engines.tiny import char_tokenizer

    config = Qwen3Config(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.hidden // 64),
        num_key_value_heads=max(1, args.hidden // 64),
        head_dim=64,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    char_tokenizer(context=SEQUENCE).save_pretrained(folder)


def run_case(folder: str, kind: str, tokens: str) -> dict[str, float]:
    """Measure one case in a fresh interpreter."""
    command = [sys.executable, __file__, *sys.argv[1:], "--case", f"{folder},{kind},{tokens}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        # A step that does not fit is a finding too, but not a figure.
        sys.exit(f"{kind} at {tokens} tokens ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(args: argparse.Namespace, folder: str, kind: str, tokens: str) -> dict[str, float | str]:
    """One warm step at a hundredth of the size, then the measured one."""
    import torch

    from fsm_trainer.core.batch import TrainSequence
    from fsm_trainer.engines import hf_policy
    from fsm_trainer.engines.hf_train import HFTrainEngine

    if kind == "naive":
        hf_policy.token_logprobs = naive_logprobs
        hf_policy.split_model = lambda model, compile_trunk: model
    engine = HFTrainEngine(
        folder, mini_bs=10**6, device=args.device, dtype=args.dtype, threads=args.threads, sequence_packing="off"
    )
    engine.start()
    rng = random.Random(0)

    def sequence(length: int) -> TrainSequence:
        prompt = length * PROMPT // SEQUENCE
        return TrainSequence(
            tokens=tuple(rng.randrange(args.vocabulary) for _ in range(length)),
            logprobs=(0.0,) * prompt + (-11.9,) * (length - prompt),
            prompt_len=prompt,
            loss_mask=(0,) * prompt + (1,) * (length - prompt),
            advantage=rng.uniform(-1, 1),
            reward=0.0,
        )

    engine.train([sequence(8)])
    on_gpu = args.device != "cpu"
    batch = [sequence(SEQUENCE) for _ in range(int(tokens) // SEQUENCE)]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        before = os.sysconf("SC_PAGE_SIZE") * int(Path("/proc/self/statm").read_text().split()[1])
    started = time.perf_counter()
    result = engine.train(batch)
    seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() if on_gpu else high_water()
    return {
        "kind": kind,
        "tokens": float(tokens),
        "loss_tokens": result.metrics["loss_tokens"],
        "loss": result.metrics["loss"],
        "grad_norm": result.metrics["grad_norm"],
        "peak_mib": (peak - before) / 2**20,
        "seconds": seconds,
    }


def high_water() -> int:
    """Bytes of the process's largest resident size since it was reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def naive_logprobs(model, batch, *, temperature: float = 1.0, entropy_gradient: bool = False):  # noqa: ANN001, ANN201
    """Logprobs and entropies from all logits at once, as a step of the obvious kind takes them."""
    import torch

    logits = model(input_ids=batch.input_ids, use_cache=False).logits.float() / temperature
    distribution = torch.log_softmax(logits, dim=-1).flatten(0, 1)
    taken = distribution[batch.sources].gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient):
        entropy = -(distribution.exp() * distribution).sum(dim=-1)[batch.sources]
    return batch.spread(taken), batch.spread(entropy)


if __name__ == "__main__":
    main()
