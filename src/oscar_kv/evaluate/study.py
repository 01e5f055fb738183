"""A study: several methods on several texts, with confidence intervals, as rows that a CSV file keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from oscar_kv.baselines import make_cache
from oscar_kv.evaluate.attention import attention_errors
from oscar_kv.evaluate.bootstrap import BlockBootstrap
from oscar_kv.evaluate.compare import REFERENCE, Fidelity, compare, pool
from oscar_kv.evaluate.methods import calibrated, family
from oscar_kv.results import read_rows

_AT_A_TIME = 4  # methods that are side by side in memory; rows are complete after so many

Row = dict[str, str]


@dataclass(frozen=True)
class Study:
    """What is measured, on what.

    Args:
        model: Runs attention "oscar", or any other.
        name: The model's name in the rows.
        texts: By name, int64 (1, n) tokens; all of one length.
        calibration: int64 (1, n) tokens of another text, for the methods that learn from one.
        against: The method that the others' KL is divided by, or None.
    """

    model: PreTrainedModel
    name: str
    texts: Mapping[str, Tensor]
    calibration: Tensor
    against: str | None = None

    @property
    def setting(self) -> Row:
        """The columns that all rows share; with the preset, what makes a row the same measurement at any commit."""
        return {
            "model": self.name,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "context": str(next(iter(self.texts.values())).shape[1]),
            "texts": "+".join(self.texts),
        }

    def done(self, path: Path | None) -> set[str]:
        """The presets that a CSV file has rows of this study for."""
        return {row["preset"] for row in read_rows(path, **self.setting)}

    def run(self, presets: Sequence[str], progress: Callable[[int], None] | None = None) -> Iterator[list[Row]]:
        """Measure, a few methods at a time; the first rows are those of the 16-bit cache and of ``against``.

        Args:
            presets: Names in :data:`~oscar_kv.evaluate.METHODS`.
            progress: Called with the number of tokens that have gone through some methods since the last call.
        """
        names = [*([self.against] if self.against else []), *(x for x in presets if x != self.against)]
        rival: Fidelity | None = None
        for start in range(0, max(1, len(names)), _AT_A_TIME):
            found = self._measure(names[start : start + _AT_A_TIME], progress)
            rival = found[self.against] if self.against and rival is None else rival
            lengths = [(len(found[REFERENCE].kl_per_token)) // len(self.texts)] * len(self.texts)
            bootstrap = BlockBootstrap(lengths)
            wanted = [x for x in found if x in presets or (x == REFERENCE and start == 0)]
            yield [self._row(x, found[x], bootstrap, rival) for x in wanted]

    def rounds(self, presets: Sequence[str]) -> int:
        """How often :meth:`run` goes through the texts."""
        names = {*presets, *([self.against] if self.against else [])}
        return max(1, -(-len(names) // _AT_A_TIME))

    def attention_errors(self, preset: str) -> dict[int, float]:
        """The error of each layer's attention output, see :func:`~oscar_kv.evaluate.attention_errors`, on one text."""
        method, ids = calibrated(preset, self.model, self.calibration), next(iter(self.texts.values()))
        return attention_errors(self.model, ids, partial(make_cache, method, self.model.config))

    def _measure(self, names: Sequence[str], progress: Callable[[int], None] | None) -> dict[str, Fidelity]:
        """Each method, and the 16-bit cache, over all texts."""
        methods = {name: calibrated(name, self.model, self.calibration) for name in names}
        results = []
        for ids in self.texts.values():
            # no max_length: it would reserve a tail for our cache, and not for the others
            caches = {name: partial(make_cache, x, self.model.config) for name, x in methods.items()}
            results.append(compare(self.model, ids, caches, progress=progress))
        reference = [result[REFERENCE] for result in results]
        return {name: pool([result[name] for result in results], reference) for name in results[0]}

    def _row(self, preset: str, found: Fidelity, bootstrap: BlockBootstrap, rival: Fidelity | None) -> Row:
        low, high = bootstrap.interval(found.kl_per_token)
        ratio = ["", "", ""]
        if rival is not None:
            kl, other = found.kl_per_token, rival.kl_per_token
            ratio = [f"{x:.3f}" for x in (found.kl / rival.kl, *bootstrap.ratio_interval(kl, other))]
        return {
            "method": REFERENCE if preset == REFERENCE else family(preset),
            "preset": preset,
            **self.setting,
            "packed_bits": f"{found.packed_bits:.3f}",
            "bits": f"{found.bits_per_element:.3f}",
            "kl": f"{found.kl:.5f}",
            "kl_low": f"{low:.5f}",
            "kl_high": f"{high:.5f}",
            "kl_p99": f"{found.kl_p99:.4f}",
            "against": self.against or "",
            **dict(zip(("kl_ratio", "kl_ratio_low", "kl_ratio_high"), ratio, strict=True)),
            "ppl": f"{found.perplexity:.4f}",
            "ppl_change": f"{found.perplexity_change:.2f}",
            "top1": f"{found.top1:.4f}",
        }
