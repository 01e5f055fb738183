"""A stored prompt: the same bits in another process, and a refusal of any other file before anything changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from models import CONFIGS, EXACT, forward, make_model, oscar_cache, passes, tokens
from oscar_kv import OscarCache, OscarConfig
from oscar_kv.cache_layer import OscarLayer

MODES = ("oscar", "sdpa")
SIZES = [9, 1, 1, 60]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, mode) for name in ("llama", "gemma3", "lfm2") for mode in MODES),
        ("gemma2", "oscar"),
        ("gpt_oss", "oscar"),
    ],
)
def test_a_stored_prompt_goes_on(name: str, mode: str, tmp_path: Path) -> None:
    """Bit for bit, past two flushes, in a cache of a model that was made anew."""
    model = make_model(name, attention=mode)
    cache = oscar_cache(model, OscarConfig())
    forward(model, tokens(300)[0], cache)
    cache.save(tmp_path / "prompt.safetensors")
    again = make_model(name, attention=mode)
    loaded = OscarCache.load(tmp_path / "prompt.safetensors", again.config)
    assert same(loaded.state_dict(), cache.state_dict())
    rest, _ = tokens(290, seed=5)
    assert torch.equal(passes(again, rest, loaded, SIZES), passes(model, rest, cache, SIZES))
    assert all(layer.state is not None and layer.state.num_blocks == [4] for layer in loaded.packed_layers)
    assert same(loaded.state_dict(), cache.state_dict())


@pytest.mark.parametrize("config", [EXACT, *CONFIGS.values()], ids=["exact", *CONFIGS])
@pytest.mark.parametrize("mode", MODES)
def test_padded_rows_of_every_configuration(config: OscarConfig, mode: str, tmp_path: Path) -> None:
    model = make_model(attention=mode)
    ids, mask = tokens(300, 5, 140)
    cache = oscar_cache(model, config, mask)
    forward(model, ids, cache, mask)
    cache.save(tmp_path / "prompt.safetensors")
    loaded = OscarCache.load(tmp_path / "prompt.safetensors", model.config, config, max_length=700)
    assert same(loaded.state_dict(), cache.state_dict())
    rest, own = tokens(290, 290, 290, seed=5)
    seen = torch.cat((mask, own), dim=1)
    assert torch.equal(passes(model, rest, loaded, SIZES, seen), passes(model, rest, cache, SIZES, seen))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_a_fork_holds_is_stored_whole(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model(attention="oscar", dtype=dtype)
    cache = oscar_cache(model, OscarConfig(), offload=True)
    cache.activate_past_recording()
    forward(model, tokens(400)[0], cache)
    fork = cache.fork()
    forward(model, tokens(200, seed=2)[0], fork)
    fork.save(tmp_path / "fork.safetensors")
    loaded = OscarCache.load(tmp_path / "fork.safetensors", model.config)
    assert same(loaded.state_dict(), fork.state_dict())
    rest, _ = tokens(290, seed=5)
    got, want = [], []
    for other, out in ((loaded, got), (fork, want)):  # both go on recording
        other.crop(-128)
        out.append(passes(model, rest, other, SIZES))
        other.crop(-128)
        out.append(passes(model, rest, other, [290]))
    assert torch.equal(torch.cat(got, dim=1), torch.cat(want, dim=1))
    assert loaded.get_seq_length() == 600 - 128 + 290 - 128 + 290


def test_another_process_goes_on(tmp_path: Path) -> None:
    model = make_model(attention="oscar")
    cache = oscar_cache(model, OscarConfig())
    forward(model, tokens(300)[0], cache)
    cache.save(tmp_path / "prompt.safetensors")
    program = """if True:
        import sys, torch
        from models import make_model, passes, tokens
        from oscar_kv import OscarCache
        model = make_model(attention="oscar")
        cache = OscarCache.load(sys.argv[1] + "/prompt.safetensors", model.config)
        torch.save(passes(model, tokens(290, seed=5)[0], cache, [9, 1, 1, 60]), sys.argv[1] + "/logits.pt")
    """
    places = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, env=places)
    want = passes(model, tokens(290, seed=5)[0], cache, SIZES)
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), want, rtol=1e-5, atol=1e-5)


def test_the_file_has_no_more_than_the_cache(tmp_path: Path) -> None:
    """Without the room that is kept for tokens to come; and it is written whole or not at all."""
    model = make_model(attention="oscar")
    cache = oscar_cache(model, OscarConfig(), max_length=4000)
    forward(model, tokens(1024)[0], cache)
    cache.save(tmp_path / "prompt.safetensors")
    memory = cache.memory_bytes()
    held = memory["total"] - memory["reserved"]
    assert held < (tmp_path / "prompt.safetensors").stat().st_size < held + 4096
    with pytest.raises(OSError, match="nowhere"):
        cache.save(tmp_path / "nowhere" / "prompt.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["prompt.safetensors"]


def test_an_empty_cache_is_stored(tmp_path: Path) -> None:
    model = make_model("gemma3", attention="oscar")
    oscar_cache(model, OscarConfig()).save(tmp_path / "empty.safetensors")
    loaded = OscarCache.load(tmp_path / "empty.safetensors", model.config)
    assert loaded.get_seq_length() == 0
    fresh = oscar_cache(model, OscarConfig())
    ids, _ = tokens(200)
    assert torch.equal(forward(model, ids, loaded), forward(model, ids, fresh))


# --- refusals


@pytest.fixture
def file(tmp_path: Path) -> Path:
    model = make_model(attention="oscar")
    cache = oscar_cache(model, OscarConfig())
    forward(model, tokens(300)[0], cache)
    cache.save(tmp_path / "prompt.safetensors")
    return tmp_path / "prompt.safetensors"


def rewrite(file: Path, text: tuple[str, str] = ("", ""), drop: str = "", **tensors: Tensor) -> None:
    """Change the header's text, or tensors, of a stored cache."""
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    assert text[0] in metadata["state"]
    metadata["state"] = metadata["state"].replace(*text)
    held = {**load_file(file), **{name.replace("__", "."): x for name, x in tensors.items()}}
    save_file({name: x for name, x in held.items() if name != drop}, file, metadata)


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({"num_hidden_layers": 3}, "num_layers 2, this one 3"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 2, this one 4"),
        ({"head_dim": 16}, "head_dim 32, this one 16"),
        ({"hidden_size": 128}, "hidden_size 64, this one 128"),
        ({"num_attention_heads": 8}, "num_attention_heads 4, this one 8"),
        ({"name": "qwen3", "head_dim": 32}, "model_type llama, this one qwen3"),
        (
            {"name": "gemma3", "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
            "layer_kinds",
        ),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_another_model_is_refused(overrides: dict[str, Any], match: str, file: Path) -> None:
    other = make_model(overrides.pop("name", "llama"), attention="oscar", **overrides)
    with pytest.raises(ValueError, match=match):
        OscarCache.load(file, other.config)


def test_another_window_is_refused(tmp_path: Path) -> None:
    model = make_model("gemma3", attention="oscar")
    cache = oscar_cache(model, OscarConfig())
    forward(model, tokens(100)[0], cache)
    cache.save(tmp_path / "prompt.safetensors")
    with pytest.raises(ValueError, match="sliding_window 48, this one 64"):
        OscarCache.load(tmp_path / "prompt.safetensors", make_model("gemma3", sliding_window=64).config)


def test_another_quantization_is_refused(file: Path) -> None:
    with pytest.raises(ValueError, match="config"):
        OscarCache.load(file, make_model().config, OscarConfig.quality())


@pytest.mark.parametrize("left", [0, 5, 200, 0.5, 0.99])
def test_a_truncated_file_is_refused(left: float, file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(left if left >= 1 else left * len(content))])
    with pytest.raises(ValueError, match="damaged"):
        OscarCache.load(file, make_model().config)


def test_other_files_are_refused(tmp_path: Path) -> None:
    config = make_model().config
    save_file({"x": torch.zeros(3)}, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="no stored cache"):
        OscarCache.load(tmp_path / "weights.safetensors", config)
    with pytest.raises(FileNotFoundError):
        OscarCache.load(tmp_path / "nothing.safetensors", config)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (('"format": 4', '"format": 5'), "format 5, this one 4"),
        (('"key_bits": 2', '"key_bytes": 2'), "key_bytes"),
        (('"key_bits": 2', '"key_bits": 7'), "key_bits"),
        (('"num_blocks": [2]', '"num_blocks": [3]'), "num_blocks"),
        (('"tail_lengths": [44]', '"tail_lengths": [440]'), "tail_lengths"),
        (('{"format"', '{"format'), "damaged"),
    ],
    ids=["version", "field", "value", "blocks", "tail", "json"],
)
def test_a_changed_header_is_refused(text: tuple[str, str], match: str, file: Path) -> None:
    rewrite(file, text)
    with pytest.raises(ValueError, match=match):
        OscarCache.load(file, make_model().config)


def test_changed_tensors_are_refused(file: Path) -> None:
    with safe_open(file, framework="pt") as opened:
        records = opened.get_tensor("layers.1.records")
    content = file.read_bytes()
    for changed, match in (
        ({"drop": "layers.1.sink_keys"}, "damaged"),
        ({"layers__1__records": records[..., :-16].contiguous()}, "stored records should be"),
        ({"layers__1__records": records.short()}, "stored records should be"),
        ({"layers__1__equalizer": torch.ones(1, 3, 32)}, "stored equalizer should be"),
    ):
        rewrite(file, **changed)
        with pytest.raises(ValueError, match=match):
            OscarCache.load(file, make_model().config)
        file.write_bytes(content)
    assert OscarCache.load(file, make_model().config).get_seq_length() == 300


def test_more_than_max_length_is_refused(file: Path) -> None:
    with pytest.raises(ValueError, match="300 columns, more than max_length 299"):
        OscarCache.load(file, make_model().config, max_length=299)


def test_a_refusal_leaves_a_cache_as_it_was() -> None:
    """Also one that comes from the last layer of the state."""
    model = make_model("gemma3", attention="oscar")
    cache, other = oscar_cache(model, OscarConfig()), oscar_cache(model, OscarConfig())
    forward(model, tokens(300)[0], cache)
    forward(model, tokens(200, seed=2)[0], other)
    before, state = cache.state_dict(), other.state_dict()
    for wrong in (
        {"layers": {**state["layers"], "2": {**state["layers"]["2"], "norms": None}}},
        {"other_layers": {"0": {**state["other_layers"]["0"], "kind": "StaticLayer"}}},
    ):
        with pytest.raises(ValueError, match=r"norms|StaticLayer"):
            cache.load_state_dict({**state, **wrong})
        assert same(cache.state_dict(), before)
    cache.load_state_dict(state)
    assert same(cache.state_dict(), other.state_dict())


def test_layers_that_cannot_be_stored_are_named() -> None:
    """Rather than to leave out what they hold."""

    class Odd(torch.nn.Identity):
        pass

    model = make_model("gemma3", attention="oscar")
    cache = oscar_cache(model, OscarConfig())
    forward(model, tokens(100)[0], cache)
    assert not isinstance(cache.layers[0], OscarLayer)
    cache.layers[0].extra = Odd()
    with pytest.raises(NotImplementedError, match="DynamicSlidingWindowLayer, which holds a Odd"):
        cache.state_dict()
