"""Recall against one full forward pass, against greedy generation, and against what the caches really hold."""

import re
from dataclasses import replace

import pytest
import torch

import oscar_kv
from models import EXACT, byte_tokenizer, make_model, tokens
from oscar_kv import OscarCache, OscarConfig
from oscar_kv.baselines import make_cache
from oscar_kv.evaluate import METHODS, REFERENCE, RecallStudy
from oscar_kv.evaluate.facts import LEAD, TRAIL, Probe, make_probe, random_facts
from oscar_kv.evaluate.methods import CacheMaker
from oscar_kv.evaluate.recall import score
from oscar_kv.evaluate.windows import windows
from oscar_kv.footprint import packed_span
from oscar_kv.integrations.transformers import CACHE_ARGUMENT
from oscar_kv.loading import prose
from oscar_kv.results import append_rows

CONTEXT = 768  # six blocks; with one token per byte the questions take two chunks
KEYS = [(kind, metric) for kind in ("needle", "verbatim") for metric in ("exact_match", "log_likelihood")]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    model = make_model("llama", vocab_size=len(tokenizer))
    with oscar_kv.enable(model):
        yield model


@pytest.fixture(scope="module")
def filler(tokenizer):
    return windows(tokenizer, prose(), 3, CONTEXT)


@pytest.fixture(scope="module")
def probes(tokenizer, filler):
    return [
        make_probe(tokenizer, row, depth, i) for i, (row, depth) in enumerate(zip(filler, (0, 0.4, 1), strict=True))
    ]


def run(model, probes, cache):
    """The texts in chunks of 128 tokens."""
    with torch.inference_mode():
        for chunk in torch.stack([probe.context for probe in probes]).split(128, dim=1):
            model(chunk, **{CACHE_ARGUMENT: cache})
    return cache


def expected(logits, probe, tokenizer):
    """Scores from logits float64 (n, vocabulary) of a text and its questions; answers found by their wording."""
    log_p, asked, scores = logits.log_softmax(-1), tokenizer.decode(probe.questions), {}
    answers = {"needle": r"The code of \w+ is( \d{5}\.)", "verbatim": r"The sentence of the day is:( [a-z ]+\.)"}
    for kind, pattern in answers.items():
        found = [match.span(1) for match in re.finditer(pattern, asked)]
        likelihood, exact = [], []
        for first, stop in found:
            own = log_p[len(probe.context) + first - 1 : len(probe.context) + stop - 1]
            right = probe.questions[first:stop]
            likelihood += [float(row[token]) for row, token in zip(own, right, strict=True)]
            exact.append(own.argmax(-1).tolist() == right.tolist())
        scores[kind, "exact_match"] = sum(exact) / len(exact)
        scores[kind, "log_likelihood"] = sum(likelihood) / len(likelihood)
    return scores


def test_facts_are_random_and_differ():
    assert random_facts(5) == random_facts(5) != random_facts(6)
    *pairs, sentence = random_facts(5)
    assert len({fact.stem for fact in pairs}) == len({fact.answer for fact in pairs}) == 4
    assert all(re.fullmatch(r" \d{5}\.", fact.answer) for fact in pairs)
    assert len(sentence.answer.split()) == 12


@pytest.mark.parametrize("depth", [0, 0.3, 1])
def test_a_probe_is_the_text_with_the_facts_in_it(tokenizer, filler, depth):
    probe = make_probe(tokenizer, filler[0], depth, 7)
    told = "".join(fact.stem + fact.answer for fact in random_facts(7))
    assert tokenizer.decode(probe.context[probe.start : probe.stop]) == told
    assert len(probe.context) == CONTEXT
    assert torch.cat((probe.context[: probe.start], probe.context[probe.stop :])).equal(
        filler[0][: CONTEXT - len(told)]
    )
    assert probe.start == LEAD + round(depth * (CONTEXT - LEAD - TRAIL - len(told)))
    asked = tokenizer.decode(probe.questions)
    assert sorted(asked.split("\n\n")) == sorted(told.split("\n\n"))
    for kind, places in probe.answers.items():
        answers = [asked[first:stop] for first, stop in places]
        assert sorted(answers) == sorted(fact.answer for fact in random_facts(7) if fact.kind == kind)


def test_refused_probes(tokenizer, filler):
    with pytest.raises(ValueError, match="too short"):
        make_probe(tokenizer, filler[0][:512], 0, 0)
    with pytest.raises(ValueError, match="multiple of 128"):
        make_probe(tokenizer, filler[0][:700], 0, 0)
    with pytest.raises(ValueError, match="depth"):
        make_probe(tokenizer, filler[0], 1.5, 0)


def test_the_16_bit_cache_scores_as_one_full_pass(model, tokenizer, probes):
    found = score(model, probes, CacheMaker(REFERENCE, model, filler)(len(probes), CONTEXT))
    for row, probe in enumerate(probes):
        ids = torch.cat((probe.context, probe.questions)).unsqueeze(0)
        with torch.inference_mode():
            logits = model(ids, use_cache=False).logits[0].double()
        for key, value in expected(logits, probe, tokenizer).items():
            assert float(found[key][row]) == pytest.approx(value, abs=1e-4), key


@pytest.mark.parametrize("preset", ["default", "rtn", "kivi"])
def test_a_packed_cache_scores_as_its_own_passes(model, tokenizer, probes, preset):
    """Each text alone, chunk by chunk, against all in a batch with padded questions."""
    found = score(model, probes, CacheMaker(preset, model, filler)(len(probes), CONTEXT))
    exact = score(model, probes, CacheMaker(REFERENCE, model, filler)(len(probes), CONTEXT))
    for row, probe in enumerate(probes):
        cache, parts = make_cache(METHODS[preset], model.config), []
        with torch.inference_mode():
            for chunk in torch.cat((probe.context, probe.questions)).unsqueeze(0).split(128, dim=1):
                parts.append(model(chunk, **{CACHE_ARGUMENT: cache}).logits[0].double())
        for key, value in expected(torch.cat(parts), probe, tokenizer).items():
            assert float(found[key][row]) == pytest.approx(value, abs=1e-4), key
    for kind in ("needle", "verbatim"):
        key = (kind, "log_likelihood")
        assert (found[key] - exact[key]).abs().max() > 0.01  # packing shows


def test_with_16_bits_nothing_changes(model, probes):
    found = score(model, probes, OscarCache(model.config, EXACT))
    exact = score(model, probes, CacheMaker(REFERENCE, model, filler)(len(probes), CONTEXT))
    for key in KEYS:
        torch.testing.assert_close(found[key], exact[key], rtol=0, atol=1e-5)


def test_an_exact_match_is_what_greedy_generation_gives(model):
    """Questions whose right answers are the model's own greedy ones with the packed cache, and one wrong token."""
    config, asked, new = OscarConfig(), 10, 6
    ids = torch.randint(1, 257, (CONTEXT + asked,), generator=torch.Generator().manual_seed(3))
    context, question = ids[:CONTEXT], ids[CONTEXT:]
    cache = OscarCache(model.config, config)
    with torch.inference_mode():
        for chunk in context.unsqueeze(0).split(128, dim=1):
            model(chunk, **{CACHE_ARGUMENT: cache})
    options = {"max_new_tokens": new, "do_sample": False, CACHE_ARGUMENT: cache}
    answer = model.generate(ids.unsqueeze(0), attention_mask=torch.ones_like(ids).unsqueeze(0), **options)[0, -new:]
    shares = {}
    for wrong in (None, 0, new - 1):
        given = answer.clone()
        if wrong is not None:
            given[wrong] = (given[wrong] + 1) % 257
        places = {kind: [(asked, asked + new)] for kind in ("needle", "verbatim")}
        probe = Probe(context, 200, 400, torch.cat((question, given)), places)
        shares[wrong] = float(score(model, [probe], OscarCache(model.config, config))["needle", "exact_match"])
    assert shares == {None: 1, 0: 0, new - 1: 0}


def test_the_facts_are_packed_when_they_are_asked_for(model, probes):
    exact = run(model, probes, OscarCache(model.config, EXACT)).layers[0].keys  # first layer: the same inputs
    cache = run(model, probes, OscarCache(model.config, OscarConfig()))
    assert cache.packed_layers[0].state.num_blocks == [CONTEXT // 128] * 3
    for row, probe in enumerate(probes):
        assert probe.stop + 128 <= CONTEXT  # at least one whole block follows
        errors = (cache.layers[0].keys - exact)[row, :, probe.start : probe.stop].abs().amax((0, 2))
        assert (errors > 1e-3).all()


@pytest.mark.parametrize("config", [OscarConfig(residual_length=512), OscarConfig(num_sinks=100)])
def test_facts_that_are_not_packed_are_refused(model, probes, config):
    """The last facts lie in the 16-bit tail, or the first among the sinks."""
    with pytest.raises(ValueError, match="are not packed when they are asked for"):
        score(model, probes, OscarCache(model.config, config))


def test_a_model_without_packed_layers_is_refused(tokenizer, probes):
    model = make_model("mistral", vocab_size=len(tokenizer))
    with pytest.warns(UserWarning, match="nothing to quantize"):
        cache = OscarCache(model.config, attention_mask=torch.ones(3, CONTEXT))
    with pytest.raises(ValueError, match="no packed layer"):
        score(model, probes, cache)


@pytest.mark.parametrize("name", ["rtn", "rotatekv-published", "ott-published", "together-oscar-published", "quanto-2"])
def test_the_span_is_what_a_rival_does_not_keep_exactly(model, name):
    if name == "quanto-2":
        pytest.importorskip("optimum.quanto")
    ids, calibration = tokens(CONTEXT + 60)[0], tokens(300, seed=4)[0]
    method = CacheMaker(name, model, calibration).method
    cache, exact = make_cache(method, model.config), OscarCache(model.config, EXACT)
    with torch.inference_mode():
        for chunk in ids.split(128, dim=1):
            for made in (cache, exact):
                model(chunk, **{CACHE_ARGUMENT: made})
    first, stop = packed_span(cache)
    layer = cache.layers[0]
    held = layer.keys
    if name == "quanto-2":  # these are its tail alone
        held = torch.cat((layer._dequantize(layer._quantized_keys), held), dim=2)
    errors = (held - exact.layers[0].keys).abs().amax((0, 1, 3))
    assert (errors[first:stop] > 1e-4).all()
    assert (errors[:first] < 1e-5).all()
    assert (errors[stop:] < 1e-5).all()
    assert first <= LEAD
    assert stop >= CONTEXT - TRAIL


def test_rows_of_a_study(model, tokenizer, filler):
    """The mean over the depths is that of each text, and differences are from the 16-bit cache on the same texts."""
    calibration = tokens(300, seed=4)[0]
    study = RecallStudy(
        model=model, name="tiny", text="prose", calibration=calibration, batch_size=2, tokenizer=tokenizer,
        fillers=[filler, filler[:, :640]], depths=[0, 0.5], seed=3,
    )  # fmt: skip
    counted = []
    rows = [row for rows in study.run(["kivi"], counted.append) for row in rows]
    assert sum(counted) == 2 * 2 * 3 * (CONTEXT + 640)
    assert all(list(row) == study.columns for row in rows)
    assert len(rows) == 2 * 2 * 3 * 4
    own = {}
    for depth in (0, 0.5):
        made = [make_probe(tokenizer, row, depth, (3 << 32) + i) for i, row in enumerate(filler)]
        for name in (REFERENCE, "kivi"):
            make = CacheMaker(name, model, calibration)
            own[name, depth] = score(model, made, make(3, CONTEXT))["verbatim", "log_likelihood"]
    found = {
        (row["preset"], row["depth"]): row
        for row in rows
        if (row["context"], row["kind"], row["metric"]) == (str(CONTEXT), "verbatim", "log_likelihood")
    }
    for depth in (0, 0.5):
        difference = own["kivi", depth] - own[REFERENCE, depth]
        assert float(found["kivi", f"{depth:g}"]["diff"]) == pytest.approx(float(difference.mean()), abs=1e-4)
    mean = (own["kivi", 0] + own["kivi", 0.5]) / 2
    assert float(found["kivi", "all"]["value"]) == pytest.approx(float(mean.mean()), abs=1e-4)
    assert float(found["kivi", "all"]["low"]) == pytest.approx(float(mean.min()), abs=1e-4)  # three texts
    assert float(found["kivi", "all"]["high"]) == pytest.approx(float(mean.max()), abs=1e-4)


def test_recall_is_done_when_all_its_depths_are_there(model, tokenizer, filler, tmp_path):
    table = tmp_path / "rows.csv"
    study = RecallStudy(
        model=model, name="tiny", text="prose", calibration=tokens(300, seed=4)[0], tokenizer=tokenizer,
        fillers=[filler, filler[:, :640]], depths=[0, 0.5],
    )  # fmt: skip
    assert study.done(table) == study.done(None) == set()
    for rows in study.run(["kivi"]):
        append_rows(table, rows)
    assert study.done(table) == {REFERENCE, "kivi"}
    assert replace(study, fillers=[filler]).done(table) == {REFERENCE, "kivi"}  # one of the contexts
    for other in ({"depths": [0]}, {"depths": [0, 0.5, 1]}, {"seed": 1}, {"text": "x"}, {"fillers": [filler[:2]]}):
        assert replace(study, **other).done(table) == set()
    with table.open("a", encoding="utf-8") as file:
        file.write(table.read_text(encoding="utf-8").splitlines()[-1].replace("kivi", "rtn") + "\n")
    assert study.done(table) == {REFERENCE, "kivi"}  # a run that was interrupted
