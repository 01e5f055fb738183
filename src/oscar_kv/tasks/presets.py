"""Sets of tasks, by the name of the benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Truncate = Literal["left", "middle"]

_LONGBENCH_E = (
    *("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec", "triviaqa", "samsum"),
    *("passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
)
_NIAH = tuple(
    f"niah_{kind}"
    for kind in (
        *("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "multiquery", "multivalue"),
    )
)
_RULER = (*_NIAH, *(f"ruler_{name}" for name in ("vt", "cwe", "fwe", "qa_squad", "qa_hotpot")))


@dataclass(frozen=True)
class TaskSet:
    """Tasks that are run, and averaged, together.

    Args:
        name: Of the average.
        tasks: lm-eval's names.
        truncate: What a prompt loses that is too long: its beginning ("left", lm-eval's way) or its "middle".
    """

    name: str
    tasks: tuple[str, ...]
    truncate: Truncate = "left"


# LongBench-E by name: lm-eval's group "longbench_e" leaves out summaries and synthetic tasks, 4 of the 13.
TASK_SETS = {
    made.name: made
    for made in (
        TaskSet("longbench-e", tuple(f"longbench_{name}_e" for name in _LONGBENCH_E), "middle"),
        TaskSet("gsm8k", ("gsm8k",)),
        TaskSet("niah", _NIAH),
        TaskSet("ruler", _RULER),
    )
}


# Benchmarks with images or sound, and lmms-eval's tasks; MMAU-Pro is ours.
MEDIA_TASKS = {"ocrbench": "ocrbench", "mmau-pro": "mmau_pro", "mmau": "mmau_test_mini"}


def task_set(name: str, known: Sequence[str]) -> TaskSet:
    """The set of this name; any other name is one of lm-eval's tasks, groups or tags.

    Args:
        name: As the user gave it.
        known: lm-eval's names.

    Raises:
        ValueError: lm-eval does not know it, or not all tasks of the set.
        NotImplementedError: It asks about images or sound.
    """
    if name.lower() in {*MEDIA_TASKS, *MEDIA_TASKS.values()}:
        raise NotImplementedError(f"{name} has images or sound, which lm-eval's tasks have not: oscar-kv eval media")
    found = TASK_SETS.get(name, TaskSet(name, (name,)))
    if unknown := [task for task in found.tasks if task not in known]:
        raise ValueError(
            f"lm-eval has no task {', '.join(unknown)}: choose {', '.join(TASK_SETS)} or a name of its own"
        )
    return found
