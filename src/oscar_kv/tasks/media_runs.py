"""Tasks with images, videos or sound, run by lmms-eval."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Audio, Dataset
from lmms_eval.evaluator import simple_evaluate
from lmms_eval.tasks import TaskManager
from loguru import logger

from oscar_kv.tasks.media import OscarLMM
from oscar_kv.tasks.presets import MEDIA_TASKS
from oscar_kv.tasks.records import Run, Setting
from oscar_kv.tasks.scores import Score

OWN_TASKS = Path(__file__).parent / "mmau_pro"

_FIELDS = ("score", "overall", "correct", "accuracy")  # where items of lmms-eval keep their number
_COUNTED = 1000  # items of OCRBench: it reports right answers out of them, however many are asked


class MediaTasks(TaskManager):  # type: ignore[misc]
    """lmms-eval's tasks and MMAU-Pro, whose sounds stay files: datasets would need torchcodec and FFmpeg to decode
    them, and the model's processor reads them anyway.

    Args:
        include_path: A folder with more tasks.
        include_defaults: Whether lmms-eval's own are among them.
    """

    def __init__(self, include_path: Path | None = None, include_defaults: bool = True) -> None:
        logger.disable("lmms_eval")
        more = [] if include_path is None else [str(include_path)]
        super().__init__(include_path=[*more, str(OWN_TASKS)], include_defaults=include_defaults)

    def _get_config(self, name: str) -> dict[str, Any]:
        config: dict[str, Any] = super()._get_config(name)
        if "dataset_path" in config:
            config["process_docs"] = _undecoded(config.get("process_docs"))
        return config

    def named(self, name: str) -> list[str]:
        """The tasks that a benchmark, a task, a group or a tag stands for.

        Raises:
            ValueError: lmms-eval does not know it.
        """
        known = MEDIA_TASKS.get(name, name)
        if known not in self.task_index:
            raise ValueError(f"lmms-eval has no task {name}: choose {', '.join(MEDIA_TASKS)} or a name of its own")
        found = self.task_index[known]
        if found["type"] not in ("group", "tag"):
            return [known]
        members = found["task"] if found["task"] != -1 else self._get_config(known)["task"]
        if inline := [member for member in members if not isinstance(member, str)]:
            raise NotImplementedError(f"{name} changes its {len(inline)} tasks: name them one by one")
        return list(dict.fromkeys(task for member in members for task in self.named(member)))


def _undecoded(then: Callable[[Dataset], Dataset] | None) -> Callable[[Dataset], Dataset]:
    """Leaves sounds as files, and goes on with what the task does to its items."""

    def process(items: Dataset) -> Dataset:
        for name, feature in items.features.items():
            if isinstance(feature, Audio):
                items = items.cast_column(name, Audio(decode=False))
        return items if then is None else then(items)

    return process


def media_runner(tasks: MediaTasks, make: Callable[[str], OscarLMM], setting: Setting) -> Callable[[str, str], Run]:
    """Runs a task with a cache, both by name; ``make`` gives the model with a cache."""
    return lambda task, cache: run_media(make(cache), tasks, task, setting, cache)


def run_media(lm: OscarLMM, tasks: MediaTasks, task: str, setting: Setting, cache: str) -> Run:
    """Run a task by lmms-eval; ``setting`` and ``cache`` say what ``lm`` is.

    The task is loaded anew each time, since OCRBench goes on counting where its last run ended, and postprocessed by
    one thread, since MMAU guesses at random where an answer names no choice.
    """
    with tempfile.TemporaryDirectory() as submissions:
        found = simple_evaluate(
            lm,
            tasks=[task],
            task_manager=tasks,
            limit=setting.limit,
            bootstrap_iters=0,
            process_docs_parallel=1,
            cli_args=Namespace(output_path=submissions, process_with_media=False),
        )
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

    It is a mean over items, a percentage of them, or OCRBench's count out of 1000; as what else, it has no error.
    """
    numbers = _numbers(items)
    for scale in (1.0, 100.0, len(items) / _COUNTED) if numbers else ():
        mean = scale * math.fsum(numbers) / len(numbers)
        if math.isclose(mean, value, rel_tol=1e-6, abs_tol=1e-5):  # some round to 5 digits
            return Score(mean, [scale * x for x in numbers], [1.0] * len(numbers), [0] * len(numbers))
    return Score(value, [math.nan] * len(items), [1.0] * len(items), [0] * len(items))


def _numbers(items: Sequence[Any]) -> list[float]:
    """The number of each item; none where they have different fields."""
    if all(isinstance(item, int | float) for item in items):
        return [float(item) for item in items]
    for field in _FIELDS:
        if all(isinstance(item, dict) and isinstance(item.get(field), int | float) for item in items):
            return [float(item[field]) for item in items]
    return []
