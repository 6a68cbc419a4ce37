"""Both rewards on 60 sums of another seed: `python examples/smollm2/evaluate.py FOLDER`.

There are only two hundred such sums, so some are met in training too.
"""

import sys
from pathlib import Path

OTHER_SEED = "reasoning-gym:chain_sum?size=60&seed=1&min_terms=2&max_terms=2&min_digits=1&max_digits=1"
SAMPLES = 4


def main() -> None:
    """Print the mean of each reward."""
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/smollm2/evaluate.py FOLDER")
    sys.path.insert(0, str(Path(__file__).parent))
    from reward import correct, number_only

    from fsm_trainer.data.datasets import default_loader
    from fsm_trainer.data.rewards import RewardRecord

    rows = default_loader(OTHER_SEED)
    scores = {"correct": 0.0, "number_only": 0.0}
    for texts in sample(sys.argv[1], list(rows["prompt"])):
        pairs = zip(texts, rows["answer"], strict=True)
        scores["correct"] += sum(correct(RewardRecord(prompt="", completion=t, answer=a)) for t, a in pairs)
        scores["number_only"] += sum(number_only(texts))
    for name, total in scores.items():
        print(f"{name} {total / (SAMPLES * len(rows)):.3f}")


def sample(ckpt, prompts):
    """Completions of every prompt, drawn as in training, `SAMPLES` times over."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(ckpt, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(ckpt, dtype=torch.float32)
    asked = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    drawn = {"do_sample": True, "top_k": 0, "max_new_tokens": 12, "pad_token_id": tokenizer.pad_token_id}
    for _ in range(SAMPLES):
        tokens = model.generate(**asked, **drawn)[:, asked["input_ids"].shape[1] :]
        yield tokenizer.batch_decode(tokens, skip_special_tokens=True)


if __name__ == "__main__":
    main()
