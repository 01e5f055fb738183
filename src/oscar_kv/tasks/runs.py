"""Tasks run by lm-eval with several caches, on the same items."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from transformers import set_seed

from oscar_kv.evaluate import REFERENCE
from oscar_kv.tasks.model import OscarLM
from oscar_kv.tasks.presets import TaskSet
from oscar_kv.tasks.records import Records, Run, Setting
from oscar_kv.tasks.scores import Estimate, Score, by_length, estimate, score

_SEED = 1234


@dataclass(frozen=True)
class Result:
    """What a task, or a set of tasks on average, gave with one cache.

    Args:
        task: Its name, or the set's.
        cache: Name of the cache.
        estimates: By metric.
        new: Whether anything was run for it.
    """

    task: str
    cache: str
    estimates: dict[str, Estimate]
    new: bool


def load_tasks(manager: TaskManager, tasks: TaskSet) -> dict[str, Task]:
    """The tasks of a set, groups and tags resolved, by name; each is loaded once, with the same seed in any process."""
    set_seed(_SEED)  # some of RULER's items are drawn when they are loaded
    loaded: dict[str, Task] = manager.load(list(tasks.tasks))["tasks"]
    return loaded


def compare(
    name: str,
    loaded: Mapping[str, Task],
    caches: Sequence[str],
    make: Callable[[str], OscarLM],
    setting: Setting,
    records: Records,
    force: bool = False,
    announce: Callable[[str, str], None] = lambda task, cache: None,
) -> Iterator[Result]:
    """Run tasks with every cache, and give each result when it is there; averages come last.

    Args:
        name: Of the average, if there are several tasks.
        loaded: Tasks by name.
        caches: Their names, the 16-bit cache first.
        make: Gives the model with a cache.
        setting: What the model is, and how it is asked.
        records: Runs done before, which are not repeated; new ones are added.
        force: Repeat them all the same.
        announce: Called with task and cache before each run.
    """
    runs: dict[str, list[Run]] = {cache: [] for cache in caches}
    new = dict.fromkeys(caches, False)
    for task_name, task in loaded.items():
        for cache in caches:
            known = None if force else records.get(setting, task_name, cache)
            made = known
            if made is None:
                announce(task_name, cache)
                made = run(make(cache), task, setting, cache)
                records.add(made)
            runs[cache].append(made)
            new[cache] |= known is None
            yield Result(task_name, cache, estimates([made], _references(records, [made])), known is None)
    if len(loaded) > 1:
        for cache in caches:
            yield Result(name, cache, estimates(runs[cache], _references(records, runs[cache])), new[cache])


def _references(records: Records, runs: Sequence[Run]) -> list[Run | None]:
    """The runs with the 16-bit cache that these are to be compared with."""
    return [None if run.cache == REFERENCE else records.get(run.setting, run.task, REFERENCE) for run in runs]


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


def estimates(runs: Sequence[Run], references: Sequence[Run | None]) -> dict[str, Estimate]:
    """What some tasks gave with one cache, on average, and how it differs from the 16-bit cache.

    Args:
        runs: One of each task.
        references: The same with the 16-bit cache; without all of them there are no differences.

    Returns:
        By metric that all tasks have.

    Raises:
        ValueError: A task was run on other items with the 16-bit cache.
    """
    others = [reference for reference in references if reference is not None]
    complete = len(others) == len(runs)
    if complete and any(run.items != other.items for run, other in zip(runs, others, strict=True)):
        raise ValueError(f"{runs[0].task}: the 16-bit cache was scored on other items; run it again with --force")
    metrics = [name for name in runs[0].scores if all(name in run.scores for run in runs)]
    return {
        name: estimate([run.scores[name] for run in runs], [x.scores[name] for x in others] if complete else None)
        for name in metrics
    }
