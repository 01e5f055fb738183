"""Tasks with images, videos or sound, run by lmms-eval."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Any

from lmms_eval.evaluator import simple_evaluate
from tenacity import RetryError

from oscar_kv.tasks.media import OscarLMM
from oscar_kv.tasks.media_tasks import MediaTasks
from oscar_kv.tasks.records import Run, Setting
from oscar_kv.tasks.scores import Score

_FIELDS = ("score", "overall", "correct", "accuracy")  # where items of lmms-eval keep their number
_COUNTED = 1000  # items of OCRBench: it reports right answers out of them, however many are asked


def media_runner(tasks: MediaTasks, make: Callable[[str], OscarLMM], setting: Setting) -> Callable[[str, str], Run]:
    """Runs a task with a cache, both by name; ``make`` gives the model with a cache."""
    return lambda task, cache: run_media(make(cache), tasks, task, setting, cache)


def run_media(lm: OscarLMM, tasks: MediaTasks, task: str, setting: Setting, cache: str) -> Run:
    """Run a task by lmms-eval; ``setting`` and ``cache`` say what ``lm`` is.

    The task is loaded anew each time, since OCRBench goes on counting where its last run ended, and postprocessed by
    one thread, since MMAU guesses at random where an answer names no choice.

    Raises:
        OSError: The task's data cannot be loaded.
    """
    with tempfile.TemporaryDirectory() as submissions, redirect_stdout(sys.stderr):
        try:
            found = simple_evaluate(
                lm,
                tasks=[task],
                task_manager=tasks,
                limit=setting.limit,
                bootstrap_iters=0,
                process_docs_parallel=1,
                cli_args=Namespace(output_path=submissions, process_with_media=False),
            )
        except RetryError as error:
            raise OSError(f"{task}: its data cannot be loaded ({error.last_attempt.exception()})") from error
    samples, reported = found["samples"][task], found["results"][task]
    filters = list(dict.fromkeys(key.partition(",")[2] for key in reported if "," in key))
    n = len(samples) // len(filters)  # filter by filter
    scores = {}
    for i, chosen in enumerate(filters):
        own = samples[i * n : (i + 1) * n]
        for metric in (key.partition(",")[0] for key in reported if key.partition(",")[2] == chosen):
            value = reported[f"{metric},{chosen}"]
            if isinstance(value, int | float) and all(metric in sample for sample in own):
                scores[metric if chosen == "none" else f"{metric},{chosen}"] = media_score(
                    float(value), [sample[metric] for sample in own]
                )
    return Run(setting, task, cache, [_item(sample) for sample in samples[:n]], scores)


def _item(sample: dict[str, Any]) -> str:
    """A hash of the question, its place and its answer."""
    text = json.dumps([sample["doc_id"], sample["arguments"][0], sample["target"]], default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def media_score(value: float, items: Sequence[Any]) -> Score:
    """The score that lmms-eval reports as ``value`` over ``items``: numbers, or dicts with a number.

    A mean over items, a percentage of them, and OCRBench's count out of 1000 are told by which comes out; anything else
    has no error.
    """
    numbers = _numbers(items)
    if numbers:
        mean = math.fsum(numbers) / len(numbers)
        scale = min((1.0, 100.0, len(items) / _COUNTED), key=lambda scale: abs(scale * mean - value))
        if math.isclose(scale * mean, value, rel_tol=1e-6, abs_tol=1e-5):  # some round to 5 digits
            return Score(scale * mean, [scale * x for x in numbers], [1.0] * len(numbers), [0] * len(numbers))
    return Score(value, [math.nan] * len(items), [1.0] * len(items), [0] * len(items))


def _numbers(items: Sequence[Any]) -> list[float]:
    """The number of each item; none where they have different fields."""
    if all(isinstance(item, int | float) for item in items):
        return [float(item) for item in items]
    for field in _FIELDS:
        if all(isinstance(item, dict) and isinstance(item.get(field), int | float) for item in items):
            return [float(item[field]) for item in items]
    return []
