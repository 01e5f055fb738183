"""Runs of tasks, one with one cache each, kept item by item, so that a later run can be compared with them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from oscar_kv.cache_layer import ATTENTION_NAME
from oscar_kv.tasks.presets import Truncate
from oscar_kv.tasks.scores import Score


@dataclass(frozen=True)
class Setting:
    """What scores depend on besides task and cache.

    Args:
        model: As the user named it.
        dtype: Of the model.
        limit: Items of each task; None is all.
        max_length: Tokens of prompt and answer together; None is the model's limit.
        seq_length: Tokens of RULER's prompts, comma-separated; empty is lm-eval's own.
        truncate: What a prompt loses that is too long, "left" or "middle".
        chat: Whether prompts are put into the chat template.
        attention: Of the packed cache.
    """

    model: str
    dtype: str
    limit: int | None = None
    max_length: int | None = None
    seq_length: str = ""
    truncate: Truncate = "left"
    chat: bool = False
    attention: str = ATTENTION_NAME


@dataclass(frozen=True)
class Run:
    """What one task gave with one cache.

    Args:
        setting: With what.
        task: lm-eval's name.
        cache: Name of the cache.
        items: Hashes of the prompts.
        scores: By metric; where lm-eval filters answers, as "exact_match,strict-match".
    """

    setting: Setting
    task: str
    cache: str
    items: list[str]
    scores: dict[str, Score]


class Records:
    """The runs done so far, in memory and, one line of JSON each, in a file.

    Args:
        path: The file; None keeps nothing.

    Raises:
        ValueError: A line of the file is no run.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._runs: dict[tuple[Setting, str, str], Run] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                self._keep(_from_json(line))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number} is no run of oscar-kv eval tasks ({error})") from error

    def add(self, made: Run) -> None:
        """Keep a run; the latest of its kind counts."""
        self._keep(made)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(made)) + "\n")

    def get(self, setting: Setting, task: str, cache: str) -> Run | None:
        return self._runs.get((setting, task, cache))

    def _keep(self, made: Run) -> None:
        self._runs[made.setting, made.task, made.cache] = made


def _from_json(line: str) -> Run:
    read = json.loads(line)
    scores = {name: Score(**fields) for name, fields in read["scores"].items()}
    return Run(Setting(**read["setting"]), read["task"], read["cache"], read["items"], scores)
