"""Write a tiny random Qwen3 that reads letter by letter: `python examples/math/make_model.py FOLDER`.

It solves no problem. It shows in a minute, on one CPU core, that loader, rewards and trainer fit together.
"""

import string
import sys

from fsm_trainer.engines.tiny import build_tiny_checkpoint

CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " "


def main() -> None:
    """Write the checkpoint to the folder given."""
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/math/make_model.py FOLDER")
    build_tiny_checkpoint(sys.argv[1], seed=0, vocab=CHARACTERS, context=512)


if __name__ == "__main__":
    main()
