"""Several caches on the same items of the same tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from oscar_kv.evaluate import REFERENCE
from oscar_kv.tasks.records import Records, Run, Setting
from oscar_kv.tasks.scores import Estimate, estimate


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


def compare(
    name: str,
    tasks: Sequence[str],
    caches: Sequence[str],
    run: Callable[[str, str], Run],
    setting: Setting,
    records: Records,
    force: bool = False,
    announce: Callable[[str, str], None] = lambda task, cache: None,
) -> Iterator[Result]:
    """Run tasks with every cache, and give each result when it is there; averages come last.

    Args:
        name: Of the average, if there are several tasks.
        tasks: Their names.
        caches: Their names, the 16-bit cache first.
        run: Runs a task with a cache.
        setting: What the model is, and how it is asked.
        records: Runs done before, which are not repeated; new ones are added.
        force: Repeat them all the same.
        announce: Called with task and cache before each run.
    """
    runs: dict[str, list[Run]] = {cache: [] for cache in caches}
    new = dict.fromkeys(caches, False)
    for task in tasks:
        for cache in caches:
            known = None if force else records.get(setting, task, cache)
            made = known
            if made is None:
                announce(task, cache)
                made = run(task, cache)
                records.add(made)
            runs[cache].append(made)
            new[cache] |= known is None
            yield Result(task, cache, estimates([made], _references(records, [made])), known is None)
    if len(tasks) > 1:
        for cache in caches:
            yield Result(name, cache, estimates(runs[cache], _references(records, runs[cache])), new[cache])


def _references(records: Records, runs: Sequence[Run]) -> list[Run | None]:
    """The runs with the 16-bit cache that these are to be compared with."""
    return [None if run.cache == REFERENCE else records.get(run.setting, run.task, REFERENCE) for run in runs]


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
