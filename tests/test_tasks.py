"""lm-eval's tasks with a packed cache: real tasks and metrics on small files of our own, on a tiny random model."""

import csv
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from typer.testing import CliRunner

import oscar_kv
from models import byte_tokenizer, make_model
from oscar_kv import OscarCache, OscarConfig
from oscar_kv.cli import app
from oscar_kv.evaluate import REFERENCE, compare
from oscar_kv.loading import DEMO_MODEL, load
from oscar_kv.tasks.compare import compare as compare_caches
from oscar_kv.tasks.compare import estimates
from oscar_kv.tasks.model import OscarLM
from oscar_kv.tasks.presets import TASK_SETS, TaskSet, task_set
from oscar_kv.tasks.records import Records, Run, Setting
from oscar_kv.tasks.runs import load_tasks, run, runner
from oscar_kv.tasks.scores import RESAMPLES, Score, by_length, estimate, score

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
GENERATED, SCORED = ("mini_gsm8k", "mini_longbench"), ("mini_choice", "mini_text")


@pytest.fixture(autouse=True)
def _at_root(monkeypatch):
    monkeypatch.chdir(ROOT)  # the task files name their data from there


@pytest.fixture(scope="module")
def manager():
    return TaskManager(include_path=DATA, include_defaults=False)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return make_model(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=0)


@pytest.fixture(scope="module")
def lm(model, tokenizer):
    """Makes the model with a cache."""

    def make(cache, kind=OscarLM, **options):
        given = {} if kind is HFLM else {"cache": cache}
        return kind(model, tokenizer=tokenizer, **given, **{"batch_size": 3, "max_length": 4096, **options})

    return make


@pytest.fixture(scope="module")
def evaluated(lm, manager):
    """What lm-eval gives for a task, by model and cache; evaluated once."""
    found = {}

    def of(task, cache, kind=OscarLM, **options):
        key = (task, cache, kind, *options.items())
        if key not in found:
            made = lm(cache, kind, **options)
            found[key] = simple_evaluate(made, tasks=[task], task_manager=manager, bootstrap_iters=0)
        return found[key]

    return of


def answers(found, task):
    """What the model answered, by item: texts, or log-likelihoods."""
    return [s["resps"] for s in found["samples"][task]]


@pytest.mark.parametrize("task", GENERATED)
def test_a_16_bit_oscar_cache_generates_what_plain_hflm_does(evaluated, task):
    plain, ours = evaluated(task, REFERENCE, HFLM), evaluated(task, "unquantized")
    prompts = {s["arguments"][0][0] for s in plain["samples"][task]}
    assert min(map(len, prompts)) > 300  # bytes, and so tokens: past two blocks
    assert answers(ours, task) == answers(plain, task)
    assert ours["results"][task] == plain["results"][task]
    if task == "mini_longbench":
        assert plain["results"][task]["score,none"] > 0


@pytest.mark.parametrize("task", GENERATED)
def test_the_packed_cache_is_in_the_generation(evaluated, task):
    assert answers(evaluated(task, "default"), task) != answers(evaluated(task, REFERENCE, HFLM), task)


@pytest.mark.parametrize("task", [*GENERATED, *SCORED])
def test_without_a_packed_cache_it_is_hflm(evaluated, task):
    assert answers(evaluated(task, REFERENCE), task) == answers(evaluated(task, REFERENCE, HFLM), task)


def log_likelihoods(found, task):
    return torch.tensor([[r[0][0] if task == "mini_choice" else r[0] for r in item] for item in answers(found, task)])


@pytest.mark.parametrize("task", SCORED)
@pytest.mark.parametrize("options", [{}, {"attention": "sdpa"}, {"batch_size": 1}])
def test_log_likelihoods_over_a_16_bit_oscar_cache_are_those_of_hflm(evaluated, task, options):
    plain, ours = evaluated(task, REFERENCE, HFLM), evaluated(task, "unquantized", **options)
    torch.testing.assert_close(log_likelihoods(ours, task), log_likelihoods(plain, task), atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("config", [OscarConfig(), OscarConfig.paper()])
def test_log_likelihoods_read_the_packed_history(lm, model, tokenizer, config):
    """evaluate.compare takes the same text, in chunks of 128 too, by code of its own."""
    ids = torch.randint(1, len(tokenizer), (700,), generator=torch.Generator().manual_seed(4)).tolist()
    start = 300
    request = (("", ""), ids[: start + 1], ids[start + 1 :])
    ((found, _),) = lm(config)._loglikelihood_tokens([request], disable_tqdm=True)
    ((exact, _),) = lm(REFERENCE)._loglikelihood_tokens([request], disable_tqdm=True)
    with oscar_kv.enable(model):
        truth = compare(model, torch.tensor([ids]), {"packed": lambda: OscarCache(model.config, config)}, start=start)
    scored = len(ids) - start - 1
    assert found == pytest.approx(-scored * math.log(truth["packed"].perplexity), rel=1e-5)
    assert exact == pytest.approx(-scored * math.log(truth[REFERENCE].perplexity), rel=1e-5)
    assert abs(found - exact) > 1


def test_a_row_of_a_batch_has_the_log_likelihood_that_it_has_alone(lm):
    generator = torch.Generator().manual_seed(5)
    requests = []
    for length in (130, 257, 390, 700):
        ids = torch.randint(1, 250, (length,), generator=generator).tolist()
        requests.append(((f"{length}", ""), ids[: length - 20], ids[length - 20 :]))
    together = lm("default", batch_size=4)._loglikelihood_tokens(requests, disable_tqdm=True)
    alone = [lm("default", batch_size=1)._loglikelihood_tokens([r], disable_tqdm=True)[0] for r in requests]
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone), atol=1e-4, rtol=1e-6)


def test_the_model_is_given_back_as_it_was(lm, model):
    lm("default").tok_batch_encode(["x"])
    assert model.config._attn_implementation == "sdpa"
    assert "generate" not in vars(model)


def test_too_long_prompts_lose_their_middle(lm, tokenizer):
    texts = ["abcdefghij", "xyz", "0123456"]
    ids, mask = lm(REFERENCE, truncate="middle").tok_batch_encode(texts, left_truncate_len=7)
    assert mask.tolist() == [[1] * 7, [0] * 4 + [1] * 3, [1] * 7]
    kept = [tokenizer.decode(row[m.bool()]) for row, m in zip(ids, mask, strict=True)]
    assert kept == ["abcghij", "xyz", "0123456"]
    left, _ = lm(REFERENCE).tok_batch_encode(texts[:1], left_truncate_len=7)
    assert tokenizer.decode(left[0]) == "defghij"


def test_bad_arguments_are_refused(lm):
    with pytest.raises(ValueError, match="no cache best"):
        lm("best")
    with pytest.raises(ValueError, match="truncate"):
        lm("default", truncate="right")


def test_the_sets_are_tasks_of_lm_eval():
    known = TaskManager().all_tasks
    for name in TASK_SETS:
        assert task_set(name, known).name == name
    assert len(TASK_SETS["longbench-e"].tasks) == 13
    assert task_set("hellaswag", known).tasks == ("hellaswag",)
    with pytest.raises(ValueError, match="no task hellaswags"):
        task_set("hellaswags", known)
    with pytest.raises(NotImplementedError, match="oscar-kv eval media"):
        task_set("ocrbench", known)


@pytest.mark.parametrize("task", [*GENERATED, *SCORED])
def test_scores_remake_what_lm_eval_reports(evaluated, task):
    """And from the items of one run, those of the same metric in another."""
    found = evaluated(task, "default")
    for key, value in found["results"][task].items():
        metric, _, chosen = key.partition(",")
        if chosen and not metric.endswith("_stderr"):
            items = [s[metric] for s in found["samples"][task] if s["filter"] == chosen]
            made = score(value, items)
            assert made.n == len(items)
            assert not math.isnan(made.resampled(0).mean())
            assert made.finish == {"word_perplexity": "perplexity", "bits_per_byte": "bits_per_byte"}.get(
                metric, "mean"
            )


def test_score_leaves_out_items_without_a_value():
    made = score(0.5, [1.0, -1.0, 0.0, -1.0])  # RULER's items of another length
    assert (made.values, made.n) == ([1.0, 0.0], 2)
    assert score(-1.0, [-1.0, -1.0]) is None
    odd = score(17.0, [("a", "b"), ("c", "d")])  # BLEU, say
    assert odd.value == 17.0
    assert math.isnan(estimate([odd]).stderr)


def normal(mean, n, seed):
    return (mean + torch.randn(n, generator=torch.Generator().manual_seed(seed)).double()).tolist()


def made_of(values):
    return score(sum(values) / len(values), values)


def test_standard_error_and_interval_are_those_of_the_normal_case():
    n = 400
    reference, noise = normal(1.0, n, 1), normal(0.3, n, 2)
    values = [r + x for r, x in zip(reference, noise, strict=True)]
    found = estimate([made_of(values)], [made_of(reference)])
    assert found.stderr == pytest.approx(torch.tensor(values).std().item() / n**0.5, rel=0.1)
    spread = 1.96 * torch.tensor(noise).std().item() / n**0.5  # of the differences, not of the values
    assert found.diff == pytest.approx(sum(noise) / n)
    assert found.low == pytest.approx(found.diff - spread, abs=0.1 * spread)
    assert found.high == pytest.approx(found.diff + spread, abs=0.1 * spread)
    assert found.n == n


def test_the_average_over_tasks_has_the_error_of_a_sum():
    tasks = [made_of(normal(m, n, m)) for m, n in ((1, 100), (2, 400), (3, 200))]
    found = estimate(tasks)
    variance = sum(torch.tensor(task.values).var().item() / task.n for task in tasks)
    assert found.value == pytest.approx(sum(task.value for task in tasks) / 3)
    assert found.stderr == pytest.approx(variance**0.5 / 3, rel=0.1)
    assert found.n == 700


def test_by_length_is_the_mean_over_three_ranges():
    made = by_length(made_of([1.0, 0.0, 0.5, 0.0, 1.0]), [100, 3999, 4000, 7999, 8000])
    assert made.value == pytest.approx((0.5 + 0.25 + 1.0) / 3)
    assert made.resampled(0).shape == (RESAMPLES,)
    assert made.resampled(0).mean().item() == pytest.approx(made.value, abs=0.02)


def test_runs_over_other_items_are_not_compared():
    setting = Setting("m", "float32")
    ours, theirs = (Run(setting, "t", c, [c], {"acc": Score(1.0, [1.0], [1.0], [0])}) for c in ("default", REFERENCE))
    with pytest.raises(ValueError, match="other items"):
        estimates([ours], [theirs])
    assert estimates([ours], [None])["acc"].diff is None


def test_records_come_back_from_their_file(tmp_path):
    path = tmp_path / "new" / "items.jsonl"
    run = Run(Setting("m", "float32", limit=3), "t", "default", ["h"], {"acc": Score(1.0, [1.0], [1.0], [0])})
    Records(path).add(run)
    assert Records(path).get(run.setting, "t", "default") == run
    assert Records(path).get(Setting("m", "float32"), "t", "default") is None
    path.write_text(path.read_text(encoding="utf-8") + '{"half', encoding="utf-8")
    with pytest.raises(ValueError, match="line 2"):
        Records(path)


def compared(lm, manager, tasks, records, setting, caches=(REFERENCE, "default"), force=False):
    """Results by task and cache, and what was run for them."""
    ran = []
    loaded = load_tasks(manager, TaskSet("pair", tasks))
    found = compare_caches(
        "pair", list(loaded), caches, runner(loaded, lm, setting), setting, records, force,
        lambda *names: ran.append(names),
    )  # fmt: skip
    return {(result.task, result.cache): result for result in found}, ran


def test_a_set_is_averaged_and_paired_with_the_16_bit_cache(lm, tmp_path):
    second = {"include": str(DATA / "mini_choice.yaml"), "task": "mini_second", "doc_to_text": "{{story}} {{question}}"}
    (tmp_path / "second.yaml").write_text(json.dumps(second), encoding="utf-8")  # JSON is YAML
    manager = TaskManager(include_path=[DATA, tmp_path], include_defaults=False)
    names, setting = ("mini_choice", "mini_second"), Setting("m", "float32", limit=3)
    found, ran = compared(lm, manager, names, Records(None), setting)
    assert ran == [(name, cache) for name in names for cache in (REFERENCE, "default")]
    for metric in ("acc", "acc_norm"):
        for cache in (REFERENCE, "default"):
            parts = [found[name, cache].estimates[metric] for name in names]
            average = found["pair", cache].estimates[metric]
            assert average.value == pytest.approx(sum(part.value for part in parts) / 2)
            assert average.n == 6
        exact = found["pair", REFERENCE].estimates[metric]
        assert exact.diff is None
        assert average.diff == pytest.approx(average.value - exact.value)
        assert average.low <= average.diff <= average.high


def test_what_was_run_is_not_run_again(lm, manager, tmp_path):
    path, setting, task = tmp_path / "items.jsonl", Setting("m", "float32", limit=3), ("mini_choice",)
    first, ran = compared(lm, manager, task, Records(path), setting, [REFERENCE])
    assert ran == [("mini_choice", REFERENCE)]
    both, ran = compared(lm, manager, task, Records(path), setting)
    assert ran == [("mini_choice", "default")]
    assert (both["mini_choice", REFERENCE].new, both["mini_choice", "default"].new) == (False, True)
    assert both["mini_choice", REFERENCE].estimates == first["mini_choice", REFERENCE].estimates
    again, ran = compared(lm, manager, task, Records(path), setting)
    assert ran == []
    assert again["mini_choice", "default"].estimates == both["mini_choice", "default"].estimates
    alone, ran = compared(lm, manager, task, Records(path), setting, ["default"], force=True)
    assert ran == [("mini_choice", "default")]
    assert alone["mini_choice", "default"].estimates == both["mini_choice", "default"].estimates
    few, ran = compared(lm, manager, task, Records(path), replace(setting, limit=2), ["default"])
    assert ran == [("mini_choice", "default")]
    assert few["mini_choice", "default"].estimates["acc"].n == 2
    assert few["mini_choice", "default"].estimates["acc"].diff is None  # the 16-bit cache did all items


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def invoke(*arguments, code=0):
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_eval_tasks_appends_rows(folder, tmp_path, evaluated):
    table = tmp_path / "rows.csv"
    options = ("--include-path", DATA, "--batch-size", 3, "--max-length", 4096, "--csv", table)
    output = invoke("eval", "tasks", folder, "--task", "mini_longbench", *options)
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["metric"], row["cache"]) for row in rows] == [
        (metric, cache) for cache in (REFERENCE, "default") for metric in ("score", "score_by_length")
    ]
    truth = {
        cache: evaluated("mini_longbench", cache)["results"]["mini_longbench"]["score,none"]
        for cache in (REFERENCE, "default")
    }
    for row in rows:
        assert f"{float(row['value']):.4f} ± {float(row['stderr']):.4f}" in output
        assert row["n"] == "9"
        assert all(row[name] for name in ("hardware", "torch", "transformers", "lm_eval", "command", "date"))
        if row["metric"] == "score":
            assert float(row["value"]) == pytest.approx(truth[row["cache"]], rel=1e-5)
    assert rows[0]["diff"] == ""
    assert float(rows[2]["diff"]) == pytest.approx(truth["default"] - truth[REFERENCE], abs=1e-4)
    assert float(rows[2]["diff_low"]) < float(rows[2]["diff"]) < float(rows[2]["diff_high"])
    assert len((tmp_path / "rows.csv.items.jsonl").read_text(encoding="utf-8").splitlines()) == 2


def test_lm_eval_finds_the_model_by_its_name(folder, manager, evaluated):
    found = simple_evaluate(
        "oscar", f"pretrained={folder},cache=quality,max_length=4096", tasks=["mini_text"], task_manager=manager,
        batch_size=3, device="cpu", bootstrap_iters=0,
    )  # fmt: skip
    truth = log_likelihoods(evaluated("mini_text", "quality"), "mini_text")
    torch.testing.assert_close(log_likelihoods(found, "mini_text"), truth)
    assert not torch.equal(truth, log_likelihoods(evaluated("mini_text", "default"), "mini_text"))


def test_too_short_a_model_is_refused(lm, manager):
    task = load_tasks(manager, TaskSet("", ("mini_longbench",)))["mini_longbench"]
    with pytest.raises(ValueError, match="generates 32 tokens"):
        run(lm("default", max_length=32), task, Setting("m", "float32"), "default")


def test_eval_tasks_refuses_a_file_with_other_columns(folder, tmp_path):
    table = tmp_path / "rows.csv"
    table.write_text("a,b\n", encoding="utf-8")
    output = invoke("eval", "tasks", folder, "--task", "gsm8k", "--csv", table, code=1)
    assert "has the columns a, b" in output.strip().splitlines()[0]


def test_eval_tasks_says_what_is_wrong_in_one_line(folder, monkeypatch):
    def one_line(*options):
        output = invoke("eval", "tasks", folder, "--task", "gsm8k", *options, code=1)
        assert len(output.strip().splitlines()) == 1
        return output

    assert "no cache best" in one_line("--cache", "best")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "lm_eval.models.huggingface")
    assert "pip install 'oscar-kv[eval]'" in one_line()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_on_a_real_model(manager):
    """SmolLM2-135M-Instruct in float32, downloaded once: 16-bit codes change nothing, 4 bits little, 2 bits more."""
    model, tokenizer = load(DEMO_MODEL, "float32")

    def of(cache, kind=OscarLM):
        given = {} if kind is HFLM else {"cache": cache}
        made = kind(model, tokenizer=tokenizer, batch_size=2, max_length=2048, **given)
        return simple_evaluate(made, tasks=[*GENERATED, *SCORED], task_manager=manager, bootstrap_iters=0)

    plain, unquantized, four, two = of(REFERENCE, HFLM), of("unquantized"), of("four-bit"), of("default")
    for task in GENERATED:
        assert answers(unquantized, task) == answers(plain, task)
        assert unquantized["results"][task] == plain["results"][task]
    for task in SCORED:
        exact = log_likelihoods(plain, task)
        torch.testing.assert_close(log_likelihoods(unquantized, task), exact, atol=1e-3, rtol=1e-5)
        errors = [(log_likelihoods(found, task) - exact).abs().mean().item() for found in (four, two)]
        assert 1e-3 < errors[0] < errors[1] < 20, task
