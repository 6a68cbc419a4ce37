"""Loading models and tokenizers, and what is said when that cannot work."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from fsm_trainer.engines import hf_model
from fsm_trainer.engines.tiny import DEFAULT_VOCAB, build_tiny_checkpoint


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    return str(build_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=0))


def weights(directory):
    return hf_model.load_model(str(directory)).state_dict()


def test_the_quickstart_model_is_the_recipes(ckpt):
    model = hf_model.load_model(ckpt)
    assert sum(parameter.numel() for parameter in model.parameters()) == 168_384
    assert model.config.vocab_size == 32
    assert model.dtype == torch.float32
    assert not model.training
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()


def test_the_seed_fixes_the_weights_and_leaves_the_global_one_alone(ckpt, tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    same = build_tiny_checkpoint(tmp_path / "same", seed=0)
    other = build_tiny_checkpoint(tmp_path / "other", seed=1)
    first = weights(ckpt)
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(value, first[name]) for name, value in weights(same).items())
    assert not torch.equal(weights(other)["lm_head.weight"], first["lm_head.weight"])


def test_the_tokenizer_has_one_token_a_character(ckpt, tmp_path):
    tokenizer = hf_model.load_tokenizer(ckpt)
    ids = tokenizer(DEFAULT_VOCAB)["input_ids"]
    assert ids == list(range(4, 32))
    assert tokenizer.decode(ids) == DEFAULT_VOCAB
    assert tokenizer.decode([*tokenizer("48=")["input_ids"], tokenizer.eos_token_id], skip_special_tokens=True) == "48="
    assert tokenizer("Z")["input_ids"] == [tokenizer.unk_token_id]
    with pytest.raises(ValueError, match="each character once"):
        build_tiny_checkpoint(tmp_path / "never-written", seed=0, vocab="aa")


def test_special_tokens_come_from_every_place(ckpt):
    model, tokenizer = hf_model.load_model(ckpt), hf_model.load_tokenizer(ckpt)
    assert hf_model.special_tokens(model, tokenizer) == hf_model.SpecialTokens(eos=(2,), pad=0)
    model.generation_config.eos_token_id = [7, 2]
    assert hf_model.special_tokens(model, tokenizer).eos == (2, 7)
    tokenizer.pad_token = model.config.pad_token_id = None
    assert hf_model.special_tokens(model, tokenizer).pad == 2
    tokenizer.eos_token = model.config.eos_token_id = model.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="names no EOS token"):
        hf_model.special_tokens(model, tokenizer)


def test_context_is_checked_to_the_token(ckpt):
    config = AutoConfig.from_pretrained(ckpt)
    assert hf_model.context_length(config) == 256
    hf_model.check_context(config, 200, 56)
    with pytest.raises(ValueError, match="need 257 positions but the model has 256"):
        hf_model.check_context(config, 200, 57)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [([(4,), ()], "prompt 1 is empty"), ([(4, 32)], "prompt 0 .* outside 0 to 31"), ([(-1,)], "outside 0 to 31")],
)
def test_bad_prompts_are_refused(ckpt, prompts, message):
    with pytest.raises(ValueError, match=message):
        hf_model.check_prompts(AutoConfig.from_pretrained(ckpt), prompts, 5)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        hf_model.load_model(str(tmp_path))


def test_a_broken_configuration_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ValueError, match="cannot load the configuration of ckpt"):
        hf_model.load_config(str(tmp_path))


@pytest.mark.parametrize("device", ["cuda:99", "mps", "gpu"])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(ValueError, match=device):
        hf_model.resolve_device(device)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="float32, bfloat16, float16"):
        hf_model.resolve_dtype("int4")


def test_threads_are_set_and_checked():
    before = torch.get_num_threads()
    try:
        hf_model.set_threads(1)
        assert torch.get_num_threads() == 1
        with pytest.raises(ValueError, match="threads is 0"):
            hf_model.set_threads(0)
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def broken(ckpt, tmp_path):
    """A copy to break, and its weights."""
    folder = tmp_path / "broken"
    shutil.copytree(ckpt, folder)
    return folder, load_file(folder / "model.safetensors")


def test_weights_that_are_lacking_are_not_made_up(broken):
    folder, tensors = broken
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lacks 1 of the weights of a Qwen3ForCausalLM, such as model\.layers\.0\.mlp"
    ):
        hf_model.load_model(str(folder))


def test_tied_weights_are_not_lacking(broken):
    folder, tensors = broken
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    model = hf_model.load_model(str(folder))
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("size", [0, 7, 1000, 100_000])
def test_a_file_that_is_cut_off_is_said_to_be_the_checkpoints(broken, size):
    folder, _ = broken
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"^cannot load the model of ckpt .*broken"):
        hf_model.load_model(str(folder))


def test_weights_of_another_size_are_said_to_be_the_checkpoints(broken, capfd):
    folder, _ = broken
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 8}))
    with pytest.raises(
        ValueError, match=r"^cannot load the model of ckpt .*broken': its lm_head.weight has shape .* says \(8, "
    ):
        hf_model.load_model(str(folder))
    assert capfd.readouterr() == ("", ""), "transformers would print a table of them"
