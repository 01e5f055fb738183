"""Bits by layer: what the probe sees, and that no better choice fits the budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from typer.testing import CliRunner

import oscar_kv
from models import byte_tokenizer, make_model
from oscar_kv import OscarCache, OscarConfig
from oscar_kv.cli import app
from oscar_kv.evaluate import METHODS, Sensitivity, allocate, allocate_bits, sensitivity
from oscar_kv.evaluate.methods import ByLayer, calibrated, family
from oscar_kv.evaluate.sensitivity import _probe
from oscar_kv.footprint import packed_bits

LAYERS = 3
MEASURED = Sensitivity(
    {("key", 0): 0.01, ("key", 1): 0.2, ("key", 2): 0.02, ("value", 0): 0.5, ("value", 1): 0.08, ("value", 2): 0.001}
)


def llama(**overrides: int) -> PreTrainedModel:
    return make_model("llama", num_hidden_layers=LAYERS, vocab_size=512, **overrides)


def error(config: OscarConfig) -> float:
    """What the method minimises: a bit makes an error a quarter, groups of 64 add two fifths."""
    unseen, total = allocate._UNSEEN * sum(MEASURED.kl.values()) / len(MEASURED.kl), 0.0
    for (side, layer), kl in MEASURED.kl.items():
        own = config.for_layer(layer)
        wide = side == "key" and own.key_group == 64
        total += (kl + unseen) * 4.0 ** (2 - getattr(own, f"{side}_bits")) * (1.4 if wide else 1.0)
    return total


def measured_bits(model: PreTrainedModel, config: OscarConfig) -> float:
    cache = OscarCache(model.config, config)
    with oscar_kv.enable(model), torch.inference_mode():
        model(torch.arange(400).unsqueeze(0), past_key_values=cache)
    return packed_bits(cache)


def every_choice(start: OscarConfig, lowest: dict[str, int]) -> Iterator[OscarConfig]:
    """All levels of all sides, from these on."""
    begin = {"key": start.key_bits - 1, "value": start.value_bits - 2}
    choices = [range(lowest[side], len(allocate._LEVELS[side])) for side, _ in MEASURED.kl]
    for chosen in product(*choices):
        yield allocate._with(start, dict(zip(MEASURED.kl, chosen, strict=True)), begin)


@pytest.mark.parametrize("more", [0.0, 0.1, 0.2, 0.5, 0.75, 3.0])
@pytest.mark.parametrize("start", [OscarConfig(), OscarConfig.quality()])
def test_no_other_choice_of_more_bits_is_better(
    start: OscarConfig, more: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocate, "_WORTH", float("inf"))  # nothing is taken away
    model = llama()
    budget = measured_bits(model, start) + more
    found = allocate_bits(model, start, max_bits=budget, measured=MEASURED)
    bits = allocate._Bits(model.config)
    assert bits(found) == pytest.approx(measured_bits(model, found))
    assert bits(found) <= budget + 1e-9
    lowest = {"key": start.key_bits - 1, "value": start.value_bits - 2}
    fitting = [error(config) for config in every_choice(start, lowest) if bits(config) <= budget + 1e-9]
    assert error(found) == pytest.approx(min(fitting))


@pytest.mark.parametrize("more", [0.0, 0.05, 0.1])  # one bit of one side is 1/6
def test_bits_move_where_they_are_worth_more(more: float) -> None:
    model, start = llama(), OscarConfig.quality()
    bits = measured_bits(model, start)
    found = allocate_bits(model, start, max_bits=bits + more, measured=MEASURED)
    assert measured_bits(model, found) <= bits + more + 1e-9
    assert found.for_layer(0).value_bits > 2
    assert found.for_layer(0).key_bits == 2
    assert found.layers[0]["key_shrink"] == OscarConfig().key_shrink  # as goes with 2-bit keys
    every = [error(config) for config in every_choice(start, {"key": 0, "value": 0})]
    assert min(every) <= error(found) < error(start)
    even = Sensitivity(dict.fromkeys(MEASURED.kl, 0.1))
    assert allocate_bits(model, start, max_bits=bits, measured=even) == start


def test_a_wide_group_pays_for_what_is_missing() -> None:
    model, start = llama(), OscarConfig.quality()
    unequal = Sensitivity({**dict.fromkeys(MEASURED.kl, 0.2), ("key", 2): 0.0, ("value", 0): 3.0})
    bits = measured_bits(model, start)
    found = allocate_bits(model, start, max_bits=bits + 0.14, measured=unequal)  # two bits more take 2/6 - 1/6 - 0.25/6
    own = found.for_layer(2)
    assert (own.key_bits, own.key_group) == (2, 64)
    assert found.for_layer(0).value_bits == 4
    assert bits + 0.1 < measured_bits(model, found) <= bits + 0.14


def test_the_probe_finds_the_layer_that_counts() -> None:
    """Attention whose output is multiplied by 0 cannot be hurt."""
    model = llama()
    with torch.no_grad():
        for i in (0, 2):
            model.model.layers[i].self_attn.o_proj.weight.zero_()
    calls: list[tuple[int, int]] = []
    found = sensitivity(model, progress=lambda done, total: calls.append((done, total)))
    assert set(found.kl) == set(MEASURED.kl)
    for (_, layer), kl in found.kl.items():
        assert (kl > 1e-4) == (layer == 1), found.kl
    assert calls == [(LAYERS, LAYERS)]
    assert model.config._attn_implementation == "sdpa"
    config = allocate_bits(model, OscarConfig(), max_bits=measured_bits(model, OscarConfig()) + 0.2, measured=found)
    assert list(config.layers) == [1]


def test_the_probe_is_random_tokens_twice() -> None:
    config = make_model("llama", bos_token_id=1, vocab_size=512).config
    ids = _probe(config, seed=0)
    assert ids.shape == (1, 513)
    assert ids[0, 0] == 1
    assert torch.equal(ids[:, 1:257], ids[:, 257:])
    assert len(ids.unique()) > 100
    assert not torch.equal(ids, _probe(config, seed=1))


@pytest.mark.parametrize(
    ("config", "max_bits", "match"),
    [
        (OscarConfig.quality(), 2.5, "more than max_bits=2.5"),
        (OscarConfig(key_bits=8), 9.0, "2, 3 or 4"),
        (OscarConfig(layers={0: {"key_bits": 3}}), 9.0, "alike"),
    ],
)
def test_refused(config: OscarConfig, max_bits: float, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        allocate_bits(llama(), config, max_bits=max_bits, measured=MEASURED)


def test_what_was_measured_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="other layers"):
        allocate_bits(make_model("llama", vocab_size=512), max_bits=9.0, measured=MEASURED)


def test_as_a_method() -> None:
    model = llama(head_dim=64)
    method = METHODS["quality-by-layer"]
    assert isinstance(method, ByLayer)
    assert family("quality-by-layer") == "OScaR"
    bits = measured_bits(model, OscarConfig.quality())
    got = calibrated("quality-by-layer", model, torch.zeros(1, 0, dtype=torch.long))
    assert isinstance(got, OscarConfig)
    assert got == allocate_bits(model, max_bits=3.05)
    assert bits <= measured_bits(model, got) <= 3.05


def test_command(tmp_path: Path) -> None:
    model = llama(head_dim=64)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    arguments = [
        "allocate",
        str(tmp_path / "model"),
        "--out",
        str(tmp_path / "x.json"),
        "--plot",
        str(tmp_path / "x.png"),
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    config = OscarConfig.from_report(tmp_path / "x.json")
    assert config == allocate_bits(model, max_bits=3.05)
    assert set(json.loads((tmp_path / "x.json").read_text())["kl_at_2_bits"]) == {"key", "value"}
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    told = ["generate", "--model", str(tmp_path / "model"), "--report", str(tmp_path / "x.json"), "--no-chat"]
    written = CliRunner().invoke(app, [*told, "--prompt", 300 * "x", "--max-new-tokens", "4"])
    assert written.exit_code == 0, written.output
    cache = OscarCache(model.config, config)
    with oscar_kv.enable(model), torch.inference_mode():
        model(torch.zeros(1, 303, dtype=torch.long), past_key_values=cache)
    assert f"303 tokens in {cache.memory_bytes()['total']:,} bytes" in " ".join(written.output.split())
    refused = CliRunner().invoke(app, [*arguments, "--max-bits", "2.5"])
    assert refused.exit_code == 1
    assert "more than max_bits=2.5" in refused.output
    assert f"{LAYERS}/{LAYERS}" not in refused.output  # nothing was measured before
    assert replace(config, layers={}) == OscarConfig.quality()
