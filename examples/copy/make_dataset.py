"""Write dataset.jsonl: 320 texts of four random digits. `python examples/copy/make_dataset.py` gives the same file."""

import json
import random
from pathlib import Path


def main() -> None:
    """Write the file beside this one."""
    draw = random.Random(0)
    rows = [{"digits": "".join(draw.choice("0123456789") for _ in range(4))} for _ in range(320)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    Path(__file__).with_name("dataset.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
