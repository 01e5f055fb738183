"""Confidence intervals against closed forms, pooling against the tokens themselves, studies, reports."""

import base64
import csv
import io
import math
import re

import pytest
import torch
from matplotlib.image import imread

import oscar_kv
from baseline_cases import round_to_nearest
from models import make_model, tokens
from oscar_kv import OscarCache, OscarConfig
from oscar_kv.baselines import RTN, BaselineCache
from oscar_kv.baselines.capture import capture
from oscar_kv.evaluate import (
    ABLATIONS,
    METHODS,
    REFERENCE,
    BlockBootstrap,
    Study,
    attention_errors,
    compare,
    estimate,
    pool,
)
from oscar_kv.evaluate.methods import family
from oscar_kv.evaluate.pareto import pareto_front, pareto_png
from oscar_kv.evaluate.report import write_report

N = 600


@pytest.fixture(scope="module")
def model():
    return make_model("llama")


@pytest.mark.parametrize("block", [1, 16])
def test_the_interval_of_independent_blocks_is_the_normal_one(block):
    """Tokens that are all alike in their block: the mean's standard error is sigma / sqrt(blocks)."""
    blocks = 400
    draws = torch.randn(blocks, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (5 + 2 * draws).repeat_interleave(block)
    low, high = BlockBootstrap([len(x)], block=block).interval(x)
    error = 2 * float(draws.std(correction=0)) / blocks**0.5
    assert low == pytest.approx(float(x.mean()) - 1.96 * error, abs=0.1 * error)
    assert high == pytest.approx(float(x.mean()) + 1.96 * error, abs=0.1 * error)


def test_blocks_of_unequal_length_count_by_their_tokens():
    """Two blocks, 3 tokens of 1 and 1 token of 5: the means are 1, 2 and 5, with chances 1/4, 1/2, 1/4."""
    x = torch.tensor([1.0, 1.0, 1.0, 5.0])
    means = BlockBootstrap([4], block=3, resamples=20_000).means(x)
    for value, chance in ((1.0, 0.25), (2.0, 0.5), (5.0, 0.25)):
        assert float((means - value).abs().lt(1e-12).double().mean()) == pytest.approx(chance, abs=0.015)


def test_a_block_does_not_span_two_texts():
    bootstrap = BlockBootstrap([130, 5], block=128)
    assert bootstrap.sizes == [128, 2, 5]


def test_ratios_are_paired():
    x = torch.rand(1000, generator=torch.Generator().manual_seed(1))
    bootstrap = BlockBootstrap([400, 600])
    assert bootstrap.ratio_interval(3 * x, x) == pytest.approx((3, 3), rel=1e-6)
    low, high = bootstrap.interval(x)
    assert high - low > 0.01  # though each mean is uncertain


@pytest.mark.parametrize("lengths", [[], [5, 0]])
def test_nothing_to_resample(lengths):
    with pytest.raises(ValueError, match="resample"):
        BlockBootstrap(lengths)


def test_a_planted_difference_is_found_exactly():
    """Items differ a lot, the difference does not: its interval has no width, that of the mean is the normal one."""
    reference = 10 * torch.randn(400, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = estimate(reference + 0.25, reference)
    assert (found.diff, found.diff_low, found.diff_high) == pytest.approx((0.25, 0.25, 0.25))
    mean, error = float(reference.mean()) + 0.25, float(reference.std(correction=0)) / 20
    assert found.value == pytest.approx(mean)
    assert found.low == pytest.approx(mean - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(mean + 1.96 * error, abs=0.1 * error)


def test_intervals_cover_the_planted_difference_as_often_as_they_say():
    """200 samples of 60 items whose differences have the mean 1; two standard errors of the rate are 3 %."""
    generator, covered = torch.Generator().manual_seed(4), 0
    for _ in range(200):
        reference, noise = torch.randn(2, 60, generator=generator, dtype=torch.float64)
        found = estimate(5 * reference + 1 + noise, 5 * reference)
        covered += found.diff_low <= 1 <= found.diff_high
    assert covered / 200 == pytest.approx(0.95, abs=0.03)


def test_pooling_counts_every_token_the_same(model):
    config = OscarConfig()
    found, exact, nll, kl, agree = [], [], [], [], []
    for seed, length in ((1, 600), (2, 450)):
        ids, _ = tokens(length, seed=seed)
        results = compare(model, ids, {"x": lambda: OscarCache(model.config, config)})
        found.append(results["x"])
        exact.append(results[REFERENCE])
        count = length - 1 - 256
        nll.append((math.log(results["x"].perplexity), math.log(results[REFERENCE].perplexity), count))
        kl.append(results["x"].kl_per_token)
        agree.append(round(results["x"].top1 * count))
    both = pool(found, exact)
    total = sum(n for *_, n in nll)
    assert both.kl == pytest.approx(float(torch.cat(kl).double().mean()))
    assert both.top1 == pytest.approx(sum(agree) / total)
    change = sum((ours - theirs) * n for ours, theirs, n in nll) / total
    assert both.perplexity_change == pytest.approx(100 * (math.exp(change) - 1))


def study(model, against=None):
    texts = {"a": tokens(N, seed=1)[0], "b": tokens(N, seed=2)[0]}
    return Study(model, "tiny", texts, tokens(200, seed=3)[0], against)


def test_rows_of_a_study(model):
    """Six methods are done in two rounds; the second is compared with the first round's rival."""
    names = ["paper", "default", "rtn", "quarot", "rotatekv", "together-oscar"]
    tested, counted = study(model, "kivi"), []
    rows = [row for rows in tested.run(names, counted.append) for row in rows]
    assert [row["preset"] for row in rows] == [REFERENCE, *names]
    assert sum(counted) == 2 * N * tested.rounds(names)
    alone = {name: [] for name in ("kivi", "rtn")}
    for ids in tested.texts.values():
        caches = {
            "kivi": lambda: OscarCache(model.config, METHODS["kivi"]),
            "rtn": lambda: BaselineCache(model.config, METHODS["rtn"]),
        }
        for name, found in compare(model, ids, caches).items():
            alone.setdefault(name, []).append(found.kl_per_token)
    kl = {name: float(torch.cat(x).double().mean()) for name, x in alone.items()}
    row = rows[3]
    assert float(row["kl"]) == pytest.approx(kl["rtn"], abs=1e-5)
    assert float(row["kl_ratio"]) == pytest.approx(kl["rtn"] / kl["kivi"], abs=1e-3)
    for row in rows[1:]:
        assert 0 < float(row["kl_low"]) < float(row["kl"]) < float(row["kl_high"])
        assert float(row["kl_ratio_low"]) < float(row["kl_ratio"]) < float(row["kl_ratio_high"])
    assert {row["texts"] for row in rows} == {"a+b"}


def test_what_a_file_has_is_not_done_again(model, tmp_path):
    path = tmp_path / "rows.csv"
    one = study(model)
    row = {**one.setting, "preset": "rtn"}
    others = [{**row, "preset": "kivi", "texts": "a"}, {**row, "preset": "paper", "context": "300"}]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerows([row, *others])
    assert one.done(path) == {"rtn"}
    assert one.done(tmp_path / "none.csv") == one.done(None) == set()


def test_every_ablation_changes_the_predictions():
    model = make_model("llama", head_dim=64)  # value groups of 32 are smaller than quality()'s
    with oscar_kv.enable(model):  # so that the cache sees queries
        rows = [row for rows in study(model).run(["default", "quality", *ABLATIONS]) for row in rows]
    assert len({row["kl"] for row in rows}) == len(rows) == 3 + len(ABLATIONS)


def test_families():
    names = {name: family(name) for name in METHODS}
    assert names["kivi-g128"] == "KIVI"
    assert names["paper-float-zero"] == names["no-sinks"] == "OScaR"
    assert names["turboquant-plus"] == "TurboQuant"
    assert names["hqq-2"] == "transformers hqq"


def test_attention_errors_against_float64(model):
    """Softmax written out, over keys and values that are rounded before each query's own chunk."""
    ids, _ = tokens(N)
    found = attention_errors(model, ids, lambda: BaselineCache(model.config, RTN(metadata="float32")))
    assert model.config._attn_implementation == "sdpa"
    seen = {}
    capture(model, ids, lambda layer, *qkv: seen.update({layer: [x[0].double() for x in qkv]}))
    for layer, (q, k, v) in seen.items():
        rounded = [round_to_nearest(x, 2, 32).repeat_interleave(2, 0) for x in (k, v)]
        k, v = (x.repeat_interleave(2, 0) for x in (k, v))
        difference = norm = 0.0
        for t in range(256, N):
            own = t // 128 * 128
            keys, values = (torch.cat((y[:, :own], x[:, own : t + 1]), 1) for x, y in zip((k, v), rounded, strict=True))
            query = q[:, t : t + 1] / 32**0.5
            exact = (query @ k[:, : t + 1].mT).softmax(-1) @ v[:, : t + 1]
            packed = (query @ keys.mT).softmax(-1) @ values
            difference += float((packed - exact).square().sum())
            norm += float(exact.square().sum())
        assert found[layer] == pytest.approx(difference / norm, rel=0.02)
        assert found[layer] > 0.01


def test_nothing_is_lost_with_16_bits(model):
    ids, _ = tokens(N)
    exact = OscarConfig(key_bits=16, value_bits=16)
    errors = attention_errors(model, ids, lambda: OscarCache(model.config, exact))
    assert errors.keys() == {0, 1}
    assert max(errors.values()) < 1e-10
    with pytest.raises(ValueError, match="cannot compare"):
        attention_errors(model, ids, lambda: OscarCache(model.config, exact), start=N)


def test_only_packed_layers_have_errors():
    model = make_model("gemma3")
    ids, _ = tokens(300)
    assert attention_errors(model, ids, lambda: OscarCache(model.config)).keys() == {1, 2}


def test_the_front_is_what_nothing_beats():
    points = torch.rand(60, 2, generator=torch.Generator().manual_seed(0)).tolist()
    front = [(x, y) for x, y in points if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)]
    assert pareto_front([(x, y) for x, y in points]) == sorted(front)


def test_a_report_has_every_row_and_a_picture(model, tmp_path):
    table, page = tmp_path / "rows.csv", tmp_path / "page" / "report.html"
    rows = [row for rows in study(model, "kivi").run(["default", "rtn"]) for row in rows]
    made = dict.fromkeys(("hardware", "oscar_kv", "torch", "transformers", "commit", "command", "date"), "<1>")
    outdated = {**rows[1], "kl": "0.98765"}
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *made])
        writer.writeheader()
        writer.writerows([{**row, **made} for row in (outdated, *rows)])
    write_report(table, page)
    html = page.read_text()
    for row in rows:
        assert f"<td>{row['preset']}</td>" in html
        assert f"<td>{row['kl']}</td>" in html
    assert "0.98765" not in html  # the newest row of a preset counts
    assert "&lt;1&gt;" in html
    picture = imread(io.BytesIO(base64.b64decode(re.search(r"base64,([^\"]+)", html)[1])))
    assert picture.std() > 0.05
    assert not re.search(r"(src|href)=.http", html)  # nothing is fetched


def test_studies_of_one_model_do_not_share_a_file(model, tmp_path):
    table, page = tmp_path / "rows.csv", tmp_path / "report.html"
    rows = [row for rows in study(model).run(["default"]) for row in rows]
    made = dict.fromkeys(("hardware", "oscar_kv", "torch", "transformers", "commit", "command", "date"), "")
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *made])
        writer.writeheader()
        for dtype, factor in (("bfloat16", 2), ("float32", 1)):
            writer.writerows([{**row, **made, "dtype": dtype, "kl": factor * float(row["kl"])} for row in rows])
    write_report(table, page, pictures=True)
    inside = [base64.b64decode(found) for found in re.findall(r"base64,([^\"]+)", page.read_text())]
    assert inside[0] != inside[1]
    assert [path.read_bytes() for path in sorted(tmp_path.glob("*.png"), key=lambda path: "-2-" in path.name)] == inside


def test_a_picture_of_the_16_bit_cache_alone(model):
    rows = [row for rows in study(model).run([]) for row in rows]
    assert [row["preset"] for row in rows] == [REFERENCE]
    assert pareto_png(rows).startswith(b"\x89PNG")


def test_a_report_of_something_else_is_refused(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no rows"):
        write_report(tmp_path / "x.csv", tmp_path / "x.html")
