"""What a train engine writes into a checkpoint, and how it goes on from one.

Model and tokenizer are in the form that `from_pretrained` loads (of LoRA the adapters alone); beside them are the
optimiser's state, the random numbers and the counters. Everything is safetensors or JSON: nothing is ever unpickled.
Knows nothing of when to save, nor of how a folder is made to be whole or not there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fsm_trainer.engines.hf_model import load_config, load_model

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FORMAT = 1
"""Raised when a state written before could not be read any more."""
TENSORS, NUMBERS = "train_state.safetensors", "train_state.json"
_ADAPTERS = "adapter_model.safetensors"
_OPTIMIZER, _REFERENCE, _RANDOM = "optimizer", "reference", "random"
"""First parts of the names of tensors, with "/" between the parts."""


def save_checkpoint(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, directory: str | Path
) -> None:
    """Write model and tokenizer into a folder, in the form that `from_pretrained` loads."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    Path(directory).mkdir(parents=True, exist_ok=True)
    card = Path(directory) / "README.md"
    had_card = card.exists()
    model.save_pretrained(directory)
    if not had_card:
        # peft's template of a model card, with nothing filled in.
        card.unlink(missing_ok=True)
    tokenizer.save_pretrained(directory)


def save_state(
    directory: str | Path,
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    reference: list[Tensor] | None,
    counters: dict[str, int],
) -> None:
    """Write what training must remember besides the weights.

    `parameters` are the trained tensors by name; `reference` is a copy of them in the same order, if it has changed
    since the start. ValueError for an optimiser that holds anything but tensors and numbers.
    """
    tensors = dict(_random_state())
    numbers: dict[str, float] = {}
    names = {id(parameter): name for name, parameter in parameters.items()}
    seen: set[int] = set()
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            place = f"{_OPTIMIZER}/{names[id(parameter)]}/{key}"
            if isinstance(value, Tensor):
                # 8-bit moments share their table of values, and safetensors holds nothing twice.
                shared = value.data_ptr() in seen
                seen.add(value.data_ptr())
                tensors[place] = value.detach().clone() if shared else value.detach().contiguous()
            elif isinstance(value, int | float):
                numbers[place] = value
            else:
                raise ValueError(f"{type(optimizer).__name__} keeps a {type(value).__name__}, which cannot be saved")
    for name, tensor in zip(parameters, reference or (), strict=bool(reference)):
        tensors[f"{_REFERENCE}/{name}"] = tensor.detach().contiguous()
    folder = Path(directory)
    save_file(tensors, folder / TENSORS)
    text = json.dumps({"format": FORMAT, "counters": counters, "numbers": numbers})
    (folder / NUMBERS).write_text(text + "\n", encoding="utf-8")


def load_weights(directory: str | Path, model: PreTrainedModel | PeftModel, *, adapters: bool) -> None:
    """Put a checkpoint's weights into a model that is there already. ValueError if they are another model's."""
    if adapters:
        from peft import set_peft_model_state_dict

        problems = set_peft_model_state_dict(model, load_file(Path(directory) / _ADAPTERS))
        unknown = list(problems.unexpected_keys)
        if unknown:
            raise ValueError(f"checkpoint {directory} holds adapters that this model has not, such as {unknown[0]}")
        return
    saved = dict(load_model(str(directory)).named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in saved or saved[name].shape != parameter.shape:
                raise ValueError(f"checkpoint {directory} is of another architecture: {name} differs")
            parameter.copy_(saved[name])


def load_state(
    directory: str | Path,
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    reference: list[Tensor] | None,
) -> dict[str, int]:
    """Go on from what `save_state` wrote; returns the counters. ValueError for what does not fit.

    The optimiser's settings (learning rate, decay) stay those of this run; `reference` is overwritten where it was
    saved.
    """
    values = _read_numbers(directory)
    tensors = load_file(Path(directory) / TENSORS)
    found: dict[str, dict[str, Any]] = {name: {} for name in parameters}
    for place, value in (*tensors.items(), *values["numbers"].items()):
        kind, _, rest = place.partition("/")
        name, _, key = rest.rpartition("/")
        if kind == _OPTIMIZER:
            if name not in found:
                raise ValueError(f"checkpoint {directory} has an optimiser state of {name}, which is not trained here")
            found[name][key] = value
    ours = optimizer.state_dict()
    by_id = {id(parameter): name for name, parameter in parameters.items()}
    order = [by_id[id(p)] for group in optimizer.param_groups for p in group["params"]]
    state = {i: found[name] for i, name in enumerate(order) if found[name]}
    optimizer.load_state_dict({"state": state, "param_groups": ours["param_groups"]})
    for name, tensor in zip(parameters, reference or (), strict=bool(reference)):
        if f"{_REFERENCE}/{name}" in tensors:
            tensor.copy_(tensors[f"{_REFERENCE}/{name}"])
    _restore_random(tensors)
    return dict(values["counters"])


def check_fits(directory: str | Path, ckpt: str) -> None:
    """Say whether the model that `ckpt` names could go on from a checkpoint, without loading either.

    Raises ValueError for a checkpoint of another architecture and for an optimiser state that does not fit. Of
    adapters only the base model is held against their configuration, when the engine starts.
    """
    folder = Path(directory)
    _read_numbers(folder)
    if (folder / _ADAPTERS).exists():
        return
    expected, saved = _shapes(ckpt), _shapes(str(folder))
    for name in (*expected, *saved):
        if expected.get(name) != saved.get(name):
            raise ValueError(
                f"it is of another architecture than ckpt {ckpt}: {name} is {_shown(saved.get(name))} there and "
                f"{_shown(expected.get(name))} here"
            )
    for name, key, shape in _optimizer_shapes(folder):
        of_the_weight = key in ("exp_avg", "exp_avg_sq")
        if name not in expected or (of_the_weight and shape != expected[name]):
            raise ValueError(
                f"its optimiser state does not fit ckpt {ckpt}: {name} is {_shown(shape)} there and "
                f"{_shown(expected.get(name))} here"
            )


def _shown(shape: tuple[int, ...] | None) -> str:
    return "not there" if shape is None else "x".join(map(str, shape)) or "a number"


def _shapes(ckpt: str) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of a checkpoint's model, which is built without memory for any."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(ckpt))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _optimizer_shapes(folder: Path) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(parameter, key, shape) of the optimiser's tensors, from the file's head."""
    try:
        with safe_open(folder / TENSORS, framework="pt") as file:
            for place in file.keys():  # noqa: SIM118 - it is no mapping
                kind, _, rest = place.partition("/")
                name, _, key = rest.rpartition("/")
                if kind == _OPTIMIZER:
                    yield name, key, tuple(file.get_slice(place).get_shape())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"its {TENSORS} cannot be read: {error}") from error


def _read_numbers(directory: str | Path) -> dict[str, Any]:
    path = Path(directory) / NUMBERS
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if values.get("format") != FORMAT:
        raise ValueError(f"{path} has format {values.get('format')!r}, this version reads {FORMAT}")
    return values


def _random_state() -> Iterator[tuple[str, Tensor]]:
    """State of torch's global generators; nothing else of a train engine draws."""
    yield f"{_RANDOM}/cpu", torch.get_rng_state()
    if _uses_cuda():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            yield f"{_RANDOM}/cuda-{index}", state


def _restore_random(tensors: Mapping[str, Tensor]) -> None:
    """Devices that are not here any more have nothing to restore."""
    torch.set_rng_state(tensors[f"{_RANDOM}/cpu"])
    for index in range(torch.cuda.device_count() if _uses_cuda() else 0):
        if f"{_RANDOM}/cuda-{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"{_RANDOM}/cuda-{index}"], index)


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
