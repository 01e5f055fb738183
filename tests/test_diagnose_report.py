"""The numbers of a report against fp64 computations from transformers' cache and from ours."""

import functools
import json
import math

import pytest
import torch
from torch.nn import functional as F

import oscar_kv
from diagnose_cases import COUNTED, GROUP, LENGTH, make_case
from models import make_model, tokens
from oscar_kv import OscarCache, OscarConfig
from oscar_kv.diagnose import diagnose
from oscar_kv.diagnose.capture import capture
from oscar_kv.diagnose.steps import steps
from oscar_kv.diagnose.tokens import attention_share
from oscar_kv.evaluate import compare


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma2", "gpt_oss"])
def case(request):
    return make_case(make_model(request.param, attention="eager", initializer_range=0.1))


def test_norms_imbalance_and_spread(case):
    states = {}
    capture(case.model, {"input_ids": case.ids}, lambda s: states.update({s.index: s}))
    for layer in case.layers:
        keys, values = case.exact(layer["layer"])
        queries = states[layer["layer"]].query[0, :, :COUNTED].double().unflatten(0, (len(keys), -1))
        for h, head in enumerate(layer["heads"]):
            for side, x in (("query", queries[h]), ("key", keys[h]), ("value", values[h])):
                norms = x.square().sum(-1).sqrt().flatten().sort().values
                assert head["norms"][side]["min"] == pytest.approx(float(norms[0]), rel=1e-3)
                assert head["norms"][side]["max"] == pytest.approx(float(norms[-1]), rel=1e-3)
                middle = float(norms[len(norms) // 2 - 1] + norms[len(norms) // 2]) / 2
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


def test_the_report_is_json_and_says_what_it_is(case, tmp_path):
    path = case.report.save(tmp_path / "new")
    numbers = json.loads(path.read_text())
    assert numbers == case.report.numbers
    assert numbers["input"] == {"source": "", "tokens": LENGTH, "counted": COUNTED, "modalities": {"text": COUNTED}}
    assert any("not loaded from a checkpoint" in note for note in numbers["notes"])
    assert OscarConfig.from_report(path) == OscarConfig.from_report(numbers)
    assert OscarConfig.from_report(str(path)).num_sinks == numbers["recommendation"]["config"]["num_sinks"]


def test_means_over_layers(case):
    summary = case.report.numbers["summary"]
    for name, found in summary["steps"].items():
        for error in ("key_error", "value_error", "output_error", "attention_kl"):
            rows = [layer["steps"][name][error] for layer in case.layers]
            assert found[error] == pytest.approx(sum(rows) / len(rows), rel=1e-3)
    for name, found in summary["interventions"].items():
        rows = [layer["interventions"][name]["output_error"] for layer in case.layers]
        assert found["output_error"] == pytest.approx(sum(rows) / len(rows), rel=1e-3)


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


@pytest.mark.parametrize("content", [b"# a page", b"", bytes(range(128, 256))])
def test_from_report_refuses_what_is_no_json(tmp_path, content):
    path = tmp_path / "notes.md"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"notes\.md is not a report of oscar-kv diagnose or allocate"):
        OscarConfig.from_report(path)


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
