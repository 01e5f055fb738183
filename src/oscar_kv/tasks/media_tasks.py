"""The tasks of lmms-eval, and those of our own that it loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Audio, Dataset
from lmms_eval.tasks import TaskManager
from loguru import logger

from oscar_kv.tasks.presets import MEDIA_TASKS

OWN_TASKS = Path(__file__).parent / "mmau_pro"


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
