"""Numbers of generations against lists made by hand, generations against plain calls of generate."""

import string

import pytest

import oscar_kv
from models import byte_tokenizer, generate, make_model, tokens
from oscar_kv.baselines import make_cache
from oscar_kv.evaluate import METHODS, REFERENCE, GenerationStudy
from oscar_kv.evaluate.generation import agreement, measures, repetition
from oscar_kv.evaluate.methods import CacheMaker
from oscar_kv.evaluate.windows import windows

PROMPT, NEW = 200, 200  # blocks are packed after the prompt and after 56 and 184 new tokens


@pytest.fixture(scope="module")
def model():
    model = make_model("llama")
    with oscar_kv.enable(model):
        yield model


def study(model, **options):
    prompts, calibration = tokens(PROMPT, PROMPT, PROMPT)[0], tokens(300, seed=9)[0]
    given = {"prompts": prompts, "new_tokens": NEW, "calibration": calibration, **options}
    return GenerationStudy(model=model, name="tiny", text="random", **given)


def measure(one, preset, progress=None):
    return one.measure(CacheMaker(preset, one.model, one.calibration), progress)


@pytest.mark.parametrize(
    ("generated", "share"),
    [
        ([], 0),
        ([1, 2, 3], 0),
        ([1, 2, 3, 4], 0),
        ([1, 2, 3, 4, 1, 2, 3, 4], 1 / 5),
        ([7] * 10, 6 / 7),
        ([1, 2, 1, 2, 1, 2, 1], 2 / 4),
        (list(range(50)), 0),
    ],
)
def test_repetition(generated, share):
    assert repetition(generated) == pytest.approx(share)


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [([], [1], 0), ([1, 2], [2, 2], 0), ([1, 2, 9, 4], [1, 2, 3, 4], 2), ([1, 2], [1, 2, 3], 2), ([5], [5], 1)],
)
def test_agreement(one, other, count):
    assert agreement(one, other) == agreement(other, one) == count


def test_measures_of_one_that_ends_and_one_that_does_not():
    ended = measures([1, 2, 3, 0], [1, 2, 3, 0], eos={0, 5})
    assert ended == {"length": 3, "unfinished": 0, "repetition": 0, "agreement": 4, "identical": 1}
    cut = measures([1, 2, 3, 3, 3, 3, 3, 3], [1, 2, 3, 0], eos={0, 5})
    assert cut == {"length": 8, "unfinished": 1, "repetition": pytest.approx(2 / 5), "agreement": 3, "identical": 0}


def test_with_16_bits_the_tokens_are_those_of_the_16_bit_cache(model):
    one = study(model)
    exact = measure(one, REFERENCE)
    assert [len(row) for row in exact] == [NEW] * 3
    assert measure(one, "unquantized") == exact
    assert measure(one, "paper") != exact  # two bits do show


@pytest.mark.parametrize("preset", ["default", "rtn", "quanto-2", "hqq-2"])
def test_a_prompt_gives_what_it_gives_alone(model, preset):
    one = study(model)
    if preset.startswith(("quanto", "hqq")):
        pytest.importorskip("optimum.quanto" if preset.startswith("quanto") else "hqq")
    found = measure(one, preset)
    for prompt, row in zip(one.prompts, found, strict=True):
        alone = generate(model, prompt.unsqueeze(0), make_cache(METHODS[preset], model.config), NEW)
        assert row == alone[0, PROMPT:].tolist()


def test_generations_end_where_the_model_ends_them(model, monkeypatch):
    whole, counted = measure(study(model), "default"), []
    ends = [whole[0][40], whole[1][3]]
    monkeypatch.setattr(model.generation_config, "eos_token_id", ends)
    found = measure(study(model), "default", counted.append)
    for row, longer in zip(found, whole, strict=True):
        stop = min((longer.index(end) + 1 for end in ends if end in longer), default=NEW)
        assert row == longer[:stop]
    assert len(found[0]) <= 41
    assert len(found[1]) <= 4
    assert sum(counted) == 3 * NEW  # the bar gets to its end


def test_the_models_own_penalties_do_not_apply(model, monkeypatch):
    plain = measure(study(model), REFERENCE)
    monkeypatch.setattr(model.generation_config, "repetition_penalty", 5.0)
    monkeypatch.setattr(model.generation_config, "no_repeat_ngram_size", 1)
    assert measure(study(model), REFERENCE) == plain


def test_rows_are_means_over_the_prompts(model):
    one = study(model)
    generated = {name: measure(one, name) for name in (REFERENCE, "paper")}
    rows = {(row["preset"], row["metric"]): row for rows in one.run(["paper"]) for row in rows}
    assert list(next(iter(rows.values()))) == one.columns
    same, repeated = [], {name: [] for name in generated}
    for ours, exact in zip(generated["paper"], generated[REFERENCE], strict=True):
        same.append(next((i for i in range(NEW) if ours[i] != exact[i]), NEW))
        for name, row in (("paper", ours), (REFERENCE, exact)):
            quads = [str(row[i : i + 4]) for i in range(NEW - 3)]
            repeated[name].append(sum(quad in quads[:i] for i, quad in enumerate(quads)) / (NEW - 3))
    found = rows["paper", "agreement"]
    assert float(found["value"]) == pytest.approx(sum(same) / 3, rel=1e-5)
    assert float(found["diff"]) == pytest.approx(sum(same) / 3 - NEW, rel=1e-5)
    assert float(found["low"]) == min(same)  # of 27 equally likely resamples 1 has only the smallest: 3.7 %
    assert float(found["high"]) == max(same)
    found = rows["paper", "repetition"]
    assert float(found["value"]) == pytest.approx(sum(repeated["paper"]) / 3, rel=1e-5)
    change = (sum(repeated["paper"]) - sum(repeated[REFERENCE])) / 3
    assert float(found["diff"]) == pytest.approx(change, rel=1e-4, abs=1e-9)
    assert float(rows["paper", "length"]["value"]) == NEW
    assert float(rows["paper", "unfinished"]["value"]) == 1
    assert float(rows[REFERENCE, "identical"]["value"]) == 1
    assert {row["preset"] for row in rows.values() if float(row["diff"])} == {"paper"}


def test_windows_are_even_pieces_of_the_text():
    text = string.ascii_letters
    found = windows(byte_tokenizer(), text, 3, 10)
    assert [byte_tokenizer().decode(row) for row in found] == [text[:10], text[21:31], text[42:]]
    with pytest.raises(ValueError, match="no 44 different windows of 10 tokens"):
        windows(byte_tokenizer(), text, 44, 10)
    with pytest.raises(ValueError, match="chat template"):
        windows(byte_tokenizer(), text, 3, 10, "Go on:")


def test_windows_keep_what_a_text_starts_with():
    """As many tokenizers do, add a token before a text; and put the window between the parts of a template."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<end>"
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    found = windows(tokenizer, string.ascii_letters, 2, 11)
    assert [tokenizer.decode(row) for row in found] == ["<end>abcdefghij", "<end>QRSTUVWXYZ"]
    tokenizer.chat_template = "<end>{% for turn in messages %}[{{ turn['content'] }}]{% endfor %}:"
    found = windows(tokenizer, string.ascii_letters, 2, 21, "Go on")
    assert [tokenizer.decode(row) for row in found] == ["<end>[Go on\n\nabcdefghij]:", "<end>[Go on\n\nQRSTUVWXYZ]:"]
