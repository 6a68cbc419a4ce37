"""Write a tiny Qwen3 with random weights and a character tokenizer: `python examples/copy/make_model.py FOLDER`."""

import sys

from fsm_trainer.engines.tiny import build_tiny_checkpoint


def main() -> None:
    """Write the checkpoint to the folder given."""
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/copy/make_model.py FOLDER")
    build_tiny_checkpoint(sys.argv[1], seed=0)


if __name__ == "__main__":
    main()
