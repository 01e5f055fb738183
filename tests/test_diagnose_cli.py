"""``oscar-kv diagnose`` on a tiny saved model: the tables, the JSON, the page and its pictures."""

import base64
import json
import re
import struct
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from models import byte_tokenizer
from oscar_kv import OscarConfig
from oscar_kv.cli import app
from oscar_kv.diagnose import diagnose
from oscar_kv.diagnose.html import write
from oscar_kv.loading import first_tokens, load, prose

PICTURES = {"layers", "repairs", "norms", "channels", "surface", "bound"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved model with random weights, and its tokenizer."""
    path = tmp_path_factory.mktemp("tiny")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, initializer_range=0.1, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def invoke(*arguments, code=0):
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, ["diagnose", *map(str, arguments)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def test_json_is_the_report_and_nothing_else(folder):
    result = invoke(folder, "--tokens", 300, "--json")
    found = json.loads(result.stdout)
    model, tokenizer = load(str(folder))
    ids = first_tokens(tokenizer, prose(), 300)
    expected = diagnose(model, {"input_ids": ids}, name=folder.name, source="Python's language reference").numbers
    for numbers in (found, expected):
        numbers.pop("provenance")
    assert found == expected
    assert not any("not loaded from a checkpoint" in note for note in found["notes"])


def test_tables_page_and_pictures(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("A <b>text</b>. " * 40, encoding="utf-8")
    out = tmp_path / "deep" / "out"
    output = invoke(folder, "--text-file", text, "--tokens", 400, "--out", out, "--predictions").output
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    recommendation = report["recommendation"]
    assert f"Recommended: {recommendation['preset']}, num_sinks={recommendation['config']['num_sinks']}" in output
    for name, row in report["summary"]["steps"].items():
        assert re.search(rf"{re.escape(name)} .*{re.escape(format(row['output_error'], '.4g'))}", output)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert OscarConfig.from_report(out / "report.json").key_bits == recommendation["config"]["key_bits"]
    embedded = [base64.b64decode(x) for x in re.findall(r'src="data:image/png;base64,([^"]+)"', page)]
    beside = {path.stem: path.read_bytes() for path in out.glob("*.png")}
    assert beside.keys() == PICTURES
    assert sorted(embedded) == sorted(beside.values())
    for png in embedded:
        width, height = struct.unpack(">II", png[16:24])
        assert (width, height) >= (900, 300)
    assert not re.search(r'(src|href)="(?!data:)', page)  # self-contained
    assert "Predictions with a real cache" in page
    assert report["recommendation"]["reasons"][0].split(":")[0] in page


def test_names_are_escaped(folder, tmp_path):
    model, tokenizer = load(str(folder))
    ids = first_tokens(tokenizer, prose(), 256)
    report = diagnose(model, {"input_ids": ids}, name="<script>alert(1)</script>", source="a & b")
    page = write(report, tmp_path).read_text(encoding="utf-8")
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "a &amp; b" in page


def test_missing_extra_is_named_before_anything_is_loaded(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    output = invoke(folder, "--out", tmp_path / "out", code=1).output
    assert "jinja2 is missing: pip install 'oscar-kv[plot]'" in output
    assert not (tmp_path / "out").exists()


def test_the_layer_of_the_pictures(folder, tmp_path):
    for layer in (0, 1):
        invoke(folder, "--tokens", 256, "--layer", layer, "--out", tmp_path / str(layer))
        page = (tmp_path / str(layer) / "report.html").read_text(encoding="utf-8")
        assert f"over the heads of layer {layer}." in page
        assert f"Keys of layer {layer}, head" in page
    assert (tmp_path / "0" / "channels.png").read_bytes() != (tmp_path / "1" / "channels.png").read_bytes()
    assert (tmp_path / "0" / "layers.png").read_bytes() == (tmp_path / "1" / "layers.png").read_bytes()
    output = invoke(folder, "--layer", 2, "--out", tmp_path / "2", code=1).output
    assert "--layer 2: the layers that are packed are 0, 1" in output
    assert not (tmp_path / "2").exists()


def test_too_short_a_text(folder, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("short", encoding="utf-8")
    output = invoke(folder, "--text-file", text, code=1).output
    assert "only 5 of 1024 tokens" in output
