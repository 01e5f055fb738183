"""The examples of the README run as they are, on a tiny model with random weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import oscar_kv

ROOT = Path(__file__).parents[1]
_EXAMPLE = re.compile(r"<!-- example: (\w+) -->\n```python\n(.*?)```", re.DOTALL)
EXAMPLES = {
    name: code
    for path in ("README.md", "docs/cache.md")
    for name, code in _EXAMPLE.findall((ROOT / path).read_text("utf-8"))
}


@pytest.fixture
def model_path(tmp_path: Path) -> str:
    vocabulary = {token: i for i, token in enumerate(["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>").save_pretrained(tmp_path)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return str(tmp_path)


def test_examples(model_path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(model_path)
    names: dict[str, Any] = {"MODEL": model_path, "torch": torch}
    assert list(EXAMPLES) == ["readme", "cache", "allocate", "fork", "store", "offload"]
    exec(EXAMPLES["readme"], names)
    exec(EXAMPLES["cache"], names)
    text, numbers = capsys.readouterr().out.rstrip().rsplit("\n", 1)
    assert text.startswith("The KV cache is")
    assert len(text) > 30
    model = names["model"]
    cache = oscar_kv.OscarCache.load("prompt.safetensors", model.config, oscar_kv.OscarConfig.quality())
    assert numbers == f"{cache.memory_bytes()} {cache.bits_per_element()}"
    assert cache.get_seq_length() == len("The KV cache is") + 39  # the last token is not fed back
    enabled = dict(names)
    exec(EXAMPLES["allocate"], enabled)
    assert "generate" in vars(enabled["model"])
    exec(EXAMPLES["fork"], names)
    answers = capsys.readouterr().out
    for question in ("Why is that?", "When is it not?"):
        inputs = names["tokenizer"](names["document"] + question, return_tensors="pt")
        assert names["tokenizer"].decode(model.generate(**inputs, max_new_tokens=20)[0]) in answers
    exec(EXAMPLES["store"], names)
    assert names["cache"].get_seq_length() == len(names["document"])
    exec(EXAMPLES["offload"], names)
    assert torch.equal(names["output"], model.generate(**names["inputs"], max_new_tokens=200))
    assert names["cache"].packed_layers[0].state.num_blocks == [2]
