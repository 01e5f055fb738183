"""Tasks run by lm-eval."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from transformers import set_seed

from oscar_kv.tasks.model import OscarLM
from oscar_kv.tasks.presets import TaskSet
from oscar_kv.tasks.records import Run, Setting
from oscar_kv.tasks.scores import Score, by_length, score

_SEED = 1234


def load_tasks(manager: TaskManager, tasks: TaskSet) -> dict[str, Task]:
    """The tasks of a set, groups and tags resolved, by name; each is loaded once, with the same seed in any process."""
    set_seed(_SEED)  # some of RULER's items are drawn when they are loaded
    loaded: dict[str, Task] = manager.load(list(tasks.tasks))["tasks"]
    return loaded


def runner(loaded: Mapping[str, Task], make: Callable[[str], OscarLM], setting: Setting) -> Callable[[str, str], Run]:
    """Runs a task with a cache, both by name; ``make`` gives the model with a cache."""
    return lambda task, cache: run(make(cache), loaded[task], setting, cache)


def run(lm: OscarLM, task: Task, setting: Setting, cache: str) -> Run:
    """Run a task by lm-eval; ``setting`` and ``cache`` say what ``lm`` is.

    Raises:
        ValueError: The task generates more tokens than the model's maximal length.
    """
    new = (task.get_config("generation_kwargs") or {}).get("max_gen_toks", lm.max_gen_toks)
    if task.get_config("output_type") == "generate_until" and new >= lm.max_length:
        raise ValueError(f"{task.task_name} generates {new} tokens: a maximal length of {lm.max_length} is too short")
    found = simple_evaluate(
        lm,
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),  # the task is loaded already
        limit=setting.limit,
        apply_chat_template=setting.chat,
        bootstrap_iters=0,
    )
    name = task.task_name
    samples, reported = found["samples"][name], found["results"][name]
    first = samples[0]["filter"]
    items = [sample["prompt_hash"] for sample in samples if sample["filter"] == first]
    return Run(setting, name, cache, items, _scores(samples, reported))


def _scores(samples: list[dict[str, Any]], reported: dict[str, Any]) -> dict[str, Score]:
    scores = {}
    for label in dict.fromkeys((metric, s["filter"]) for s in samples for metric in s["metrics"]):
        metric, chosen = label
        own = [s for s in samples if s["filter"] == chosen]
        made = score(reported[f"{metric},{chosen}"], [s[metric] for s in own])
        if made is not None:
            name = metric if chosen == "none" else f"{metric},{chosen}"
            scores[name] = made
            if metric == "score" and all("length" in s["doc"] for s in own):  # LongBench
                scores["score_by_length"] = by_length(made, [s["doc"]["length"] for s in own])
    return scores
