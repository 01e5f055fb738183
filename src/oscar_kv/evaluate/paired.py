"""A study of several caches on the same items: rows of means with intervals, and of differences from 16 bit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from oscar_kv.evaluate.bootstrap import Estimate, estimate
from oscar_kv.evaluate.compare import REFERENCE
from oscar_kv.evaluate.methods import CacheMaker, family
from oscar_kv.evaluate.study import Row
from oscar_kv.results import read_rows

Found = TypeVar("Found")
Labels = tuple[str, ...]
Progress = Callable[[int], None] | None


@dataclass(frozen=True, kw_only=True)
class PairedStudy(ABC, Generic[Found]):
    """What is measured, on what.

    Args:
        model: Runs attention "oscar", or any other.
        name: The model's name in the rows.
        text: The text's name in the rows.
        calibration: int64 (1, n) tokens of another text, for the methods that learn from one.
        batch_size: Items that are run together, with the 16-bit cache and with every method that can.
    """

    model: PreTrainedModel
    name: str
    text: str
    calibration: Tensor
    batch_size: int = 8
    labels: ClassVar[Labels]  # columns that tell the rows of a preset apart

    @property
    @abstractmethod
    def setting(self) -> Row:
        """Further columns that all rows share."""

    def complete(self, found: set[Labels]) -> bool:
        """Whether rows with these labels are all that this study has of a preset."""
        return bool(found)

    def done(self, path: Path | None) -> set[str]:
        """The presets that a CSV file has the rows of this study for, at whatever commit they were made."""
        found: dict[str, set[Labels]] = {}
        for row in read_rows(path, **self._shared):
            found.setdefault(row["preset"], set()).add(tuple(row[label] for label in self.labels))
        return {preset for preset, labels in found.items() if self.complete(labels)}

    @abstractmethod
    def measure(self, make: CacheMaker, progress: Progress = None) -> Found:
        """Run the items with one kind of cache.

        Args:
            make: Makes the caches.
            progress: Called with the number of tokens that are done since the last call.
        """

    @abstractmethod
    def numbers(self, found: Found, reference: Found) -> Mapping[Labels, Tensor]:
        """By labels, one number per item, (n,), of what was measured; ``reference`` is that of the 16-bit cache."""

    def run(self, presets: Sequence[str], progress: Progress = None) -> Iterator[list[Row]]:
        """The rows of the 16-bit cache, then those of each method.

        Args:
            presets: Names in :data:`~oscar_kv.evaluate.METHODS`.
            progress: As for :meth:`measure`.
        """
        reference: Found | None = None
        for preset in (REFERENCE, *presets):
            found = self.measure(CacheMaker(preset, self.model, self.calibration), progress)
            reference = found if reference is None else reference
            own, exact = self.numbers(found, reference), self.numbers(reference, reference)
            yield [self._row(preset, labels, estimate(own[labels], exact[labels])) for labels in own]

    @property
    def columns(self) -> list[str]:
        """Of the rows."""
        return list(self._row(REFERENCE, self.labels, Estimate(0, 0, 0, 0, 0, 0)))

    @property
    def _shared(self) -> Row:
        return {
            "model": self.name,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "text": self.text,
            "batch_size": str(self.batch_size),
            **self.setting,
        }

    def _row(self, preset: str, labels: Labels, found: Estimate) -> Row:
        return {
            "method": REFERENCE if preset == REFERENCE else family(preset),
            "preset": preset,
            **self._shared,
            **dict(zip(self.labels, labels, strict=True)),
            **{name: f"{x:.6g}" for name, x in asdict(found).items()},
        }
