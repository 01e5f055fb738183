"""The numbers of a report against fp64 computations from transformers' cache and from ours."""

import functools
import json
import math

import pytest
import torch
from torch.nn import functional as F

import oscar_kv
from models import dynamic_cache, forward, make_model, tokens
from oscar_kv import OscarCache, OscarConfig
from oscar_kv.diagnose import diagnose
from oscar_kv.diagnose.capture import capture
from oscar_kv.diagnose.steps import steps
from oscar_kv.diagnose.tokens import attention_share
from oscar_kv.evaluate import compare

LENGTH, COUNTED = 400, 384  # three blocks and a rest
GROUP = 32
QUERIES = [int(x) for x in torch.linspace(128, COUNTED - 1, 128)]


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma2", "gpt_oss"])
def case(request):
    """Model, its exact cache and the queries of its layers, and the report's numbers."""
    model = make_model(request.param, attention="eager", initializer_range=0.1)
    ids, _ = tokens(LENGTH)
    cache = dynamic_cache(model)
    forward(model, ids, cache)
    return model, ids, cache, diagnose(model, {"input_ids": ids})


def counted(cache, index):
    layer = cache.layers[index]
    return layer.keys[0, :, :COUNTED].double(), layer.values[0, :, :COUNTED].double()


def test_norms_imbalance_and_spread(case):
    *_, cache, report = case
    for layer in report.numbers["layers"]:
        keys, values = counted(cache, layer["layer"])
        for h, head in enumerate(layer["heads"]):
            for side, x in (("key", keys[h]), ("value", values[h])):
                norms = x.square().sum(-1).sqrt().sort().values
                assert head["norms"][side]["min"] == pytest.approx(float(norms[0]), rel=1e-3)
                assert head["norms"][side]["max"] == pytest.approx(float(norms[-1]), rel=1e-3)
                middle = float(norms[COUNTED // 2 - 1] + norms[COUNTED // 2]) / 2
                assert head["norms"][side]["max_over_median"] == pytest.approx(float(norms[-1]) / middle, rel=1e-3)
            ratios, gaps, spreads, ranges = [], [], [], []
            for start in range(0, COUNTED, GROUP):
                group = keys[h, start : start + GROUP]
                norms = [math.sqrt(float((k * k).sum())) for k in group]
                ratios.append(max(norms) / min(norms))
                gaps.append((max(norms) - min(norms)) ** 2 / (sum(n * n for n in norms) / GROUP))
                mean = sum(k / n for k, n in zip(group, norms, strict=True)) / GROUP
                spreads.append(1 - float(mean.norm()))
                ranges.append(group.max(0).values - group.min(0).values)
            for name, expected in (("imbalance_ratio", ratios), ("imbalance_gap", gaps), ("spread", spreads)):
                assert head[name]["max"] == pytest.approx(max(expected), rel=1e-3)
                assert head[name]["median"] == pytest.approx(
                    sorted(expected)[5:7][0] / 2 + sorted(expected)[6] / 2, rel=1e-3
                )
            ranges = sum(ranges) / len(ranges)
            assert head["channels"]["max_over_median"] == pytest.approx(float(ranges.max() / ranges.median()), rel=1e-3)


@pytest.mark.parametrize("step", ["none", "rotation+scaling+sinks", "default", "quality", "four-bit"])
def test_errors_are_those_of_a_real_cache(case, step):
    """The same prompt in a real OscarCache, whose keys are then read back and compared in fp64."""
    model, ids, exact, report = case
    model.set_attn_implementation("oscar")  # shows the cache its queries
    value_dim = report.numbers["layers"][0]["value_dim"]
    cache = OscarCache(model.config, steps(value_dim)[step])
    forward(model, ids, cache)
    for layer in report.numbers["layers"]:
        found, index = layer["steps"][step], layer["layer"]
        packed = cache.layers[index].keys, cache.layers[index].values
        for side, x, y in zip(("key", "value"), counted(exact, index), packed, strict=True):
            error = (x - y[0, :, :COUNTED].double()).square().sum((0, 2))
            norm = x.square().sum((0, 2))
            assert found[f"{side}_error"] == pytest.approx(float(error.sum() / norm.sum()), rel=2e-3)
        assert found["group_error"]["max"] >= found["group_error"]["median"] > 0


def attention_by_hand(model, states, keys, values, packed_keys, packed_values, index):
    """KL of the attention weights and relative error of its output, query by query and head by head, in fp64."""
    attention = model.model.layers[index].self_attn
    cap = getattr(attention, "attn_logit_softcapping", None)
    sinks = getattr(attention, "sinks", None)
    query = states.query[0].double()
    groups = query.shape[0] // keys.shape[0]
    kl, wrong, norm = [], 0.0, 0.0
    for position in QUERIES:
        start = position // 128 * 128
        for h in range(query.shape[0]):
            outputs, weights = [], []
            for k, v in ((keys, values), (packed_keys, packed_values)):
                k, v = (
                    torch.cat((x[h // groups, :start], y[h // groups, start : position + 1]))
                    for x, y in ((k, keys), (v, values))
                )
                scores = k @ query[h, position] * attention.scaling
                scores = scores if cap is None else cap * torch.tanh(scores / cap)
                scores = scores if sinks is None else torch.cat((scores, sinks[h].double().view(1)))
                p = torch.exp(scores - scores.max())
                p = p / p.sum()
                weights.append(p)
                outputs.append(p[: position + 1] @ v)
            kl.append(float((weights[0] * (weights[0] / weights[1]).log()).sum()))
            wrong += float((outputs[0] - outputs[1]).square().sum())
            norm += float(outputs[0].square().sum())
    return sum(kl) / len(kl), wrong / norm


def test_attention_errors(case):
    model, ids, exact, report = case
    states = {}
    with torch.no_grad():
        capture(model, {"input_ids": ids}, lambda s: states.update({s.index: s}))
    model.set_attn_implementation("oscar")
    for step in ("none", "default"):
        cache = OscarCache(model.config, steps(report.numbers["layers"][0]["value_dim"])[step])
        forward(model, ids, cache)
        layer = report.numbers["layers"][-1]
        index = layer["layer"]
        packed = [x[0, :, :COUNTED].detach().double() for x in (cache.layers[index].keys, cache.layers[index].values)]
        with torch.no_grad():
            kl, error = attention_by_hand(model, states[index], *counted(exact, index), *packed, index)
        assert layer["steps"][step]["attention_kl"] == pytest.approx(kl, rel=5e-3)
        assert layer["steps"][step]["output_error"] == pytest.approx(error, rel=5e-3)


def test_the_report_is_json_and_says_what_it_is(case, tmp_path):
    *_, report = case
    path = report.save(tmp_path / "new")
    numbers = json.loads(path.read_text())
    assert numbers == report.numbers
    assert numbers["input"] == {"source": "", "tokens": LENGTH, "counted": COUNTED, "modalities": {"text": COUNTED}}
    assert any("not loaded from a checkpoint" in note for note in numbers["notes"])
    assert OscarConfig.from_report(path) == OscarConfig.from_report(numbers)
    assert OscarConfig.from_report(str(path)).num_sinks == numbers["recommendation"]["config"]["num_sinks"]


def test_token_classes_cover_every_token(case):
    *_, report = case
    for layer in report.numbers["layers"]:
        assert sum(layer["tokens"]["count"].values()) == COUNTED


def test_predictions_are_those_of_compare():
    model = make_model("llama", initializer_range=0.1)
    ids, _ = tokens(LENGTH)
    report = diagnose(model, {"input_ids": ids}, predictions=True)
    found = report.numbers["summary"]["predictions"]
    config = steps(32)["quality"]
    with oscar_kv.enable(model):
        expected = compare(model, ids, {"quality": functools.partial(OscarCache, model.config, config)})["quality"]
    assert found["quality"]["kl"] == pytest.approx(expected.kl, rel=1e-2)
    assert report.numbers["recommendation"]["kl_is_measured"]
    assert report.numbers["recommendation"]["expected_kl"]["quality"]["kl"] == found["quality"]["kl"]
    assert model.config._attn_implementation == "sdpa"


def test_keys_that_are_not_finite_are_refused():
    model = make_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = math.inf
    with pytest.raises(ValueError, match="layer 1 has a key that is not finite"):
        diagnose(model, {"input_ids": tokens(LENGTH)[0]})


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({}, "its format is None"),
        ({"format": 99}, "its format is 99"),
        ({"format": 1}, "recommends no configuration"),
        ({"format": 1, "recommendation": {"config": {"key_bits": 2, "colour": 3}}}, "unknown fields: colour"),
        ({"format": 1, "recommendation": {"config": {"key_bits": 5}}}, "key_bits must be one of"),
    ],
)
def test_from_report_refuses_what_is_none(report, message):
    with pytest.raises(ValueError, match=message):
        OscarConfig.from_report(report)


def test_from_report_refuses_other_json(tmp_path):
    path = tmp_path / "list.json"
    path.write_text("[1]")
    with pytest.raises(ValueError, match="not a report"):
        OscarConfig.from_report(path)


def test_shares_of_attention_find_the_sink():
    """Every far query gives token 3 a quarter of its attention, by construction."""
    n, positions = 384, torch.arange(128, 384)
    weights = torch.zeros(2, len(positions), n, dtype=torch.float64)
    weights[:, :, 3] = 0.25
    weights[:, torch.arange(len(positions)), positions] = 0.75
    share = attention_share(weights, positions)
    assert float(share[3]) == pytest.approx(0.25)
    assert float(share.sum()) == pytest.approx(0.25)  # nobody else gets anything from far away
    assert F.relu(share - 0.02).count_nonzero() == 1
