"""lmms-eval's tasks with a packed cache: its own loaders, prompts and metrics on small files in the benchmarks' format,
and tiny random models that see or hear."""

import csv
import json
import random
import re
import string
import sys
from importlib.metadata import version
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from oscar_kv.cli import app
from oscar_kv.evaluate import REFERENCE
from oscar_kv.multimodal import load_multimodal
from oscar_kv.tasks.compare import compare
from oscar_kv.tasks.records import Records, Setting
from saved_media import RATE, picture, resampled, save_llava, save_omni, says_only, sharpen, tone

lmms_eval = pytest.importorskip("lmms_eval", reason="lmms-eval (extra media) is not installed")
soundfile = pytest.importorskip("soundfile", reason="soundfile (extra media) is not installed")
import datasets  # noqa: E402

from oscar_kv.tasks.media import OscarLMM  # noqa: E402
from oscar_kv.tasks.media_runs import media_runner, media_score  # noqa: E402
from oscar_kv.tasks.media_tasks import OWN_TASKS, MediaTasks  # noqa: E402

THEIRS = Path(lmms_eval.__file__).parent / "tasks"
SIDE = 224  # pixels: 256 tokens, two blocks of a cache
SHORT = {"max_new_tokens": 40, "do_sample": False}
KINDS = ("Regular Text Recognition", "Doc-oriented VQA", "Handwritten Mathematical Expression Recognition")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    folder = save_llava(tmp_path_factory.mktemp("llava"), SIDE)
    model, processor = load_multimodal(str(folder))
    sharpen(model)
    model.generation_config = says_only(string.ascii_lowercase, processor.tokenizer)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llava(seeing):
    return load_multimodal(str(seeing))


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    model, processor = load_multimodal(str(save_omni(tmp_path_factory.mktemp("omni"))))
    model.generation_config = says_only("ABCD ", processor.tokenizer)
    sharpen(model)
    return model, processor


def plain_answer(model, processor, text, tokens, **media):
    """What transformers' own generation answers to a prompt that is put together here."""
    inputs = processor(text=[text], return_tensors="pt", **media)
    prompt = inputs["input_ids"].shape[1]
    assert (prompt + tokens) // 128 > 2  # blocks
    out = model.generate(**inputs, do_sample=False, max_new_tokens=tokens)
    return processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def ocr(llava, tmp_path_factory):
    """A folder with a task in OCRBench's format, and what the model answers with transformers' own cache.

    Two of the four right answers are letters that the model does write.
    """
    folder = tmp_path_factory.mktemp("ocr")
    rows, answers = [], []
    for i, word in enumerate(("Kiwi", "42", "Rue 7", "plum")):
        question = f"what is written in image number {i}?".ljust(110, "!")
        answers.append(plain_answer(*llava, f"<image>{question}", 40, images=[picture(word)]))
        right = answers[-1][20:24].upper() if i % 2 else word + "!"
        rows.append(
            {
                "dataset": "HME100k" if i == 2 else "IIIT5K", "question": question, "question_type": KINDS[i % 3],
                "answer": [word + "?", right], "image": picture(word),
            }
        )  # fmt: skip
    features = datasets.Features(
        {
            "dataset": datasets.Value("string"), "question": datasets.Value("string"),
            "question_type": datasets.Value("string"), "answer": datasets.List(datasets.Value("string")),
            "image": datasets.Image(),
        }
    )  # fmt: skip
    write_task(folder, "mini_ocrbench", THEIRS / "ocrbench" / "ocrbench.yaml", rows, features, generation_kwargs=SHORT)
    return folder, answers, rows


def write_task(folder, name, include, rows, features, audio=None, **options):
    """A task of lmms-eval with local data in place of its own; ``audio`` names a column of sounds."""
    table = datasets.Dataset.from_list(rows, features=features)
    if audio is not None:
        table = table.cast_column(audio, datasets.Audio())
    table.to_parquet(folder / f"{name}.parquet")
    options.setdefault("dataset_kwargs", {})["data_files"] = {"test": str(folder / f"{name}.parquet")}
    task = {"task": name, "include": str(include), "dataset_path": "parquet", "test_split": "test", **options}
    (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Runs a task with some caches: scores by cache, and the answers that were scored."""

    def run(folder, task, model, caches=(REFERENCE, "unquantized", "default")):
        tasks = MediaTasks(folder, include_defaults=False)
        answers = {}

        class Listening(OscarLMM):
            def generate_until(self, requests):
                answers[self.name] = super().generate_until(requests)
                return answers[self.name]

        def make(cache):
            lm = Listening(*model, cache=cache)
            lm.name = cache
            return lm

        setting = Setting("m", "float32")
        runner = media_runner(tasks, make, setting)
        found = compare(task, [task], caches, runner, setting, Records(None))
        return {result.cache: result.estimates for result in found}, answers

    return run


@pytest.fixture(scope="module")
def ocr_ran(ran, ocr, llava):
    return ran(ocr[0], "mini_ocrbench", llava)


def test_ocrbench_answers_are_those_of_plain_generation(ocr, ocr_ran):
    _, answers = ocr_ran
    assert len(set(ocr[1])) > 1  # the images are looked at
    assert answers[REFERENCE] == ocr[1]
    assert answers["unquantized"] == ocr[1]
    assert answers["default"] != ocr[1]


def test_ocrbench_scores_are_its_metric_on_the_answers(ocr, ocr_ran):
    """OCRBench counts right answers out of 1000, and its own code would add up those of all runs of a process."""
    scores, answers = ocr_ran
    assert scores[REFERENCE]["ocrbench_accuracy"].value == pytest.approx(2 / 1000)
    for cache, found in scores.items():
        right = [
            any(answer.lower() in said.lower() for answer in row["answer"])
            for row, said in zip(ocr[2], answers[cache], strict=True)
        ]
        score = found["ocrbench_accuracy"]
        assert score.value == pytest.approx(sum(right) / 1000)
        assert score.n == 4
        assert score.stderr == pytest.approx(4 / 1000 * np.std(right) / 4**0.5, rel=0.15, abs=1e-9)
        if cache != REFERENCE:
            assert score.diff == pytest.approx((sum(right) - 2) / 1000)
            assert score.low <= score.diff <= score.high
    assert (scores["unquantized"]["ocrbench_accuracy"].low, scores["unquantized"]["ocrbench_accuracy"].high) == (0, 0)


@pytest.fixture(scope="module")
def mmau_pro(tmp_path_factory):
    """A folder with a task in MMAU-Pro's format, its sounds where lmms-eval unpacks them, and items with choices."""
    folder = tmp_path_factory.mktemp("pro")
    (folder / "mmau_pro" / "data").mkdir(parents=True)
    rows = []
    for i in range(7):
        paths = [f"data/{i}-{j}.wav" for j in range(2 if i == 3 else 1)]
        for j, path in enumerate(paths):
            soundfile.write(folder / "mmau_pro" / path, tone(i + j), RATE)
        choices = [] if i == 5 else ["a flute", "a Bell ", "rain", "a dog"][: 3 + i % 2]
        answer = None if i == 6 else "a long text" if i == 5 else choices[i % 3].upper()
        rows.append(
            {
                "id": f"item-{i}", "audio_path": paths, "question": f"What is heard in {i}?", "choices": choices,
                "answer": answer, "category": "music" if i % 2 else "sound",
            }
        )  # fmt: skip
    features = datasets.Features(
        {
            **{name: datasets.Value("string") for name in ("id", "question", "answer", "category")},
            **{name: datasets.List(datasets.Value("string")) for name in ("audio_path", "choices")},
        }
    )
    write_task(
        folder, "mini_mmau_pro", OWN_TASKS / "mmau_pro.yaml", rows, features,
        dataset_kwargs={"video": True, "cache_dir": "mmau_pro"}, generation_kwargs=SHORT,
    )  # fmt: skip
    return folder, rows[:5]


def asked(choices):
    lines = [f"{letter}. {choice}" for letter, choice in zip("ABCD", choices, strict=False)]
    return "\n".join([*lines, "Answer with the option's letter from the given choices directly."])


def letter_of(answer, count, seed=None):
    """The last letter that stands alone; a guess where there is none, after a seed if one is given."""
    alone = [x for x in answer.split() if x in list("ABCD"[:count])]
    if alone:
        return alone[-1]
    if seed is not None:
        random.seed(seed)
    return random.choice("ABCD"[:count])


def test_mmau_pro(mmau_pro, hearing, ran, monkeypatch):
    folder, rows = mmau_pro
    monkeypatch.setenv("HF_HOME", str(folder))
    scores, answers = ran(folder, "mini_mmau_pro", hearing)
    place = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    truth = [
        plain_answer(
            *hearing, place * len(row["audio_path"]) + row["question"] + "\n" + asked(row["choices"]), 40,
            audio=[resampled(folder / "mmau_pro" / path) for path in row["audio_path"]], sampling_rate=16000,
        )
        for row in rows
    ]  # fmt: skip
    assert len(set(truth)) > 1  # the sounds are heard
    assert answers[REFERENCE] == truth
    assert answers["unquantized"] == truth
    assert answers["default"] != truth
    for cache, found in scores.items():
        right = [
            row["choices"]["ABCD".index(letter_of(said, len(row["choices"]), row["id"]))].strip().lower()
            == row["answer"].strip().lower()
            for row, said in zip(rows, answers[cache], strict=True)
        ]
        assert found["accuracy"].value == pytest.approx(100 * sum(right) / 5)
        assert found["accuracy"].n == 5  # neither the open question nor the one without an answer


def test_mmau_pro_reads_letters():
    tasks = MediaTasks(include_defaults=False)
    results = tasks._get_config("mmau_pro")["process_results"]
    item = {"id": "x", "choices": list("uvwxyz"), "answer": " Z", "category": "c"}
    said = {"F": 1, "(F)": 1, "the answer is F.": 1, "A, no: F": 1, "E": 0, "(A)": 0}
    assert {answer: results(item, [answer])["accuracy"]["overall"] for answer in said} == said
    guesses = {results(item | {"id": str(i)}, ["?"])["accuracy"]["overall"] for i in range(30)}
    assert guesses == {0, 1}
    assert results(item, ["?"]) == results(item, ["!"])


def test_mmau_reads_sounds_out_of_the_table(hearing, ran, tmp_path):
    """MMAU's own task, whose sounds are in the parquet file."""
    rows = []
    for i in range(3):
        file = BytesIO()
        soundfile.write(file, tone(i), RATE, format="FLAC")
        rows.append(
            {
                "audio": {"bytes": file.getvalue(), "path": f"{i}.flac"}, "question": "What is it?", "answer": "rain",
                "choices": json.dumps(["rain", "wind", "snow", "sun"]), "task": "sound",
            }
        )  # fmt: skip
    features = datasets.Features(
        {name: datasets.Value("string") for name in ("question", "answer", "choices", "task")}
        | {"audio": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}}
    )
    write_task(
        tmp_path, "mini_mmau", THEIRS / "mmau" / "mmau_test_mini.yaml", rows, features, "audio", generation_kwargs=SHORT
    )
    scores, answers = ran(tmp_path, "mini_mmau", hearing, [REFERENCE, "default"])
    text = "<|audio_bos|><|AUDIO|><|audio_eos|>What is it?\n" + asked(["rain", "wind", "snow", "sun"])
    truth = [
        plain_answer(*hearing, text, 40, audio=[resampled(BytesIO(row["audio"]["bytes"]))], sampling_rate=16000)
        for row in rows
    ]
    assert answers[REFERENCE] == truth
    for cache, found in scores.items():
        random.seed(0)  # lmms-eval's, for the guesses of MMAU
        right = [letter_of(said, 4) == "A" for said in answers[cache]]
        assert found["accuracy"].value == pytest.approx(100 * sum(right) / 3)
        assert found["accuracy"].n == 3


def test_names_of_benchmarks_tasks_and_groups(tmp_path):
    tasks = MediaTasks()
    assert tasks.named("ocrbench") == ["ocrbench"]
    assert tasks.named("mmau-pro") == tasks.named("mmau_pro") == ["mmau_pro"]
    assert tasks.named("mmau") == ["mmau_test_mini"]
    assert len(tasks.named("mmmu_pro")) > 1
    with pytest.raises(ValueError, match="no task ocrbenches"):
        tasks.named("ocrbenches")
    group = {"group": "changed", "task": [{"task": "ocrbench", "test_split": "dev"}]}
    (tmp_path / "group.yaml").write_text(json.dumps(group), encoding="utf-8")
    with pytest.raises(NotImplementedError, match="name them one by one"):
        MediaTasks(tmp_path).named("changed")


def test_scores_are_means_percentages_or_counts():
    items = [{"score": 1, "question": 5}, {"score": 0, "question": 6}, {"score": True, "question": 7}]
    mean, percent, count = (media_score(value, items) for value in (2 / 3, 66.66667, 0.002))
    assert mean.values == [1, 0, 1]
    assert percent.values == [100, 0, 100]
    assert percent.value == pytest.approx(200 / 3)
    assert sum(count.values) / 3 == pytest.approx(count.value) == pytest.approx(0.002)
    assert media_score(0.75, [0.5, 1.0]).values == [0.5, 1.0]
    for odd in (media_score(0.3, items), media_score(0.3, ["a", "b", "c"])):
        assert odd.value == 0.3
        assert np.isnan(odd.values).all()


def invoke(*arguments, code=0):
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, ["eval", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_eval_media_appends_rows_and_goes_on(seeing, ocr, ocr_ran, tmp_path):
    table = tmp_path / "rows.csv"
    options = ("--task", "mini_ocrbench", "--include-path", ocr[0], "--csv", table)
    invoke("media", seeing, *options, "--cache", REFERENCE)
    output = invoke("media", seeing, *options)
    assert f"mini_ocrbench, {REFERENCE}" not in output.splitlines()  # not run again
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["metric"], row["cache"]) for row in rows] == [
        ("ocrbench_accuracy", REFERENCE), ("ocrbench_accuracy", "default")
    ]  # fmt: skip
    for row in rows:
        truth = ocr_ran[0][row["cache"]]["ocrbench_accuracy"]
        assert float(row["value"]) == pytest.approx(truth.value)
        assert f"{truth.value:.4f} ± {truth.stderr:.4f}" in output
        assert (row["n"], row["lmms_eval"]) == ("4", version("lmms_eval"))
    assert float(rows[1]["diff"]) == pytest.approx(ocr_ran[0]["default"]["ocrbench_accuracy"].diff)
    assert not Path("results").exists()  # where OCRBench would leave its own report


def test_eval_media_says_what_is_wrong_in_one_line(seeing, ocr, mmau_pro, tmp_path, monkeypatch):
    def one_line(command, *options):
        output = invoke(command, seeing, *options, code=1)
        assert len(re.findall("^oscar-kv: ", output, flags=re.MULTILINE)) == 1
        assert "Traceback" not in output
        return output

    assert "no task ocrbenches" in one_line("media", "--task", "ocrbenches")
    assert "no cache best" in one_line("media", "--task", "ocrbench", "--cache", "best")
    assert "oscar-kv eval media" in one_line("tasks", "--task", "ocrbench")
    monkeypatch.setenv("HF_HOME", str(mmau_pro[0]))
    hears = one_line("media", "--task", "mini_mmau_pro", "--include-path", mmau_pro[0])
    assert "the task has audio, which LlavaProcessor does not read" in hears
    gone = {"task": "gone", "include": str(ocr[0] / "mini_ocrbench.yaml"), "dataset_path": "json"}
    (tmp_path / "gone.yaml").write_text(json.dumps(gone | {"dataset_kwargs": {"data_files": "no.json"}}))
    assert "gone: its data cannot be loaded" in one_line("media", "--task", "gone", "--include-path", tmp_path)
    monkeypatch.setitem(sys.modules, "lmms_eval", None)
    monkeypatch.delitem(sys.modules, "lmms_eval.evaluator")
    assert "pip install 'oscar-kv[media]'" in one_line("media", "--task", "ocrbench")
