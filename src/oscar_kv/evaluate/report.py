"""An HTML page of the rows of studies: pictures and tables."""

from __future__ import annotations

import base64
import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from oscar_kv.evaluate.compare import REFERENCE
from oscar_kv.evaluate.figures import OURS, Panel, estimate, forest_png, ratio_png
from oscar_kv.evaluate.pareto import pareto_png
from oscar_kv.evaluate.recall import ALL_DEPTHS
from oscar_kv.evaluate.study import Row
from oscar_kv.extras import import_extra

_PROVENANCE = ("hardware", "oscar_kv", "torch", "transformers", "commit", "command", "date")
_LABELS = ("depth", "kind", "metric")  # that tell the rows of a preset apart, where they are there


@dataclass(frozen=True)
class _Kind:
    """What the rows of one study share, and its title, of which the last is in the names of files."""

    title: str
    setting: tuple[str, ...]
    heading: str


_FIDELITY = _Kind("fidelity", ("model", "dtype", "texts", "context"), "{model}, {dtype}, {context} tokens of {texts}")
_PROBES = {  # by a column that only they have
    "new_tokens": _Kind(
        "long generations",
        ("model", "dtype", "text", "request", "prompts", "prompt_tokens", "new_tokens"),
        "{model}, {dtype}, {text}: {prompts} prompts of {prompt_tokens} tokens, at most {new_tokens} new ones",
    ),
    "probes": _Kind(
        "recall",
        ("model", "dtype", "text", "probes", "seed", "context"),
        "{model}, {dtype}, facts in {probes} texts of {context} tokens of {text}",
    ),
}


@dataclass(frozen=True)
class _Section:
    """One study: its pictures (PNG, by name), and its table."""

    kind: _Kind
    rows: Sequence[Row]
    pictures: Mapping[str, bytes]
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]  # of each row; the first is its preset

    @property
    def title(self) -> str:
        return self.kind.heading.format(**self.rows[0]).replace("+", ", ")

    @property
    def name(self) -> str:
        """For files."""
        return f"{Path(self.rows[0]['model']).name}-{self.rows[0][self.kind.setting[-1]]}"

    @property
    def made(self) -> list[str]:
        return list(dict.fromkeys(", ".join(f"{name} {row[name]}" for name in _PROVENANCE) for row in self.rows))

    @property
    def encoded(self) -> dict[str, str]:
        return {name: base64.b64encode(png).decode() for name, png in self.pictures.items()}


def write_report(table: Path, page: Path, *, pictures: bool = False) -> None:
    """Write a page of its own (the pictures are inside) from the rows that ``oscar-kv eval ... --csv`` made.

    Args:
        table: Rows of fidelity, generation or recall.
        page: Where the page goes.
        pictures: Also save each picture beside the page.

    Raises:
        ImportError: The extra "plot" is not installed.
        ValueError: The file has no such rows.
    """
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = rows[0].keys() if rows else ()
    if {*_FIDELITY.setting, "preset", "kl_low"} <= {*columns}:
        kind, studies = _FIDELITY, [_fidelity(own) for own in _studies(rows, _FIDELITY, ("preset",))]
    elif name := next((name for name in _PROBES if name in columns), None):
        kind, labels = _PROBES[name], tuple(name for name in _LABELS if name in columns)
        studies = [_probe(kind, own, labels) for own in _studies(rows, kind, ("preset", *labels))]
    else:
        raise ValueError(f"{table} has no rows of 'oscar-kv eval fidelity', 'generation' or 'recall'")
    jinja2 = import_extra("jinja2", "plot")
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
    html = environment.get_template("report.html.j2").render(title=kind.title, studies=studies, ours=OURS)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(html, encoding="utf-8")
    seen: Counter[str] = Counter()
    for study in studies if pictures else ():
        seen[study.name] += 1
        again = f"-{seen[study.name]}" if seen[study.name] > 1 else ""  # of another dtype, say
        for name, png in study.pictures.items():
            (page.parent / f"{page.stem}-{study.name}{again}-{name}.png").write_bytes(png)


def _studies(rows: list[Row], kind: _Kind, key: Sequence[str]) -> Iterator[list[Row]]:
    """The rows of each study; of those with the same key the newest, where something was done again."""
    rows = sorted(rows, key=lambda row: [row[name] for name in kind.setting])
    for _, group in groupby(rows, key=lambda row: [row[name] for name in kind.setting]):
        yield list({tuple(row[name] for name in key): row for row in group}.values())


def _fidelity(rows: list[Row]) -> _Section:
    rows = sorted(rows, key=lambda row: float(row["packed_bits"]))
    ratios = ratio_png(rows)
    cells = [
        (
            *(row[name] for name in ("preset", "method", "packed_bits", "bits", "kl")),
            _interval(row["kl_low"], row["kl_high"]),
            f"{row['kl_ratio']} ({_interval(row['kl_ratio_low'], row['kl_ratio_high'])})" if row["kl_ratio"] else "",
            row["against"],
            f"{float(row['ppl_change']):+.1f} %",
            row["top1"],
        )
        for row in rows
    ]
    return _Section(
        kind=_FIDELITY,
        rows=rows,
        pictures={"bits": pareto_png(rows), **({"ratio": ratios} if ratios else {})},
        columns=("preset", "method", "packed bits", "bits", "KL", "95 %", "ratio", "to", "perplexity", "top-1"),
        cells=cells,
    )


def _probe(kind: _Kind, rows: list[Row], labels: Sequence[str]) -> _Section:
    by_labels: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        by_labels.setdefault(tuple(row[name] for name in labels), []).append(row)
    rows = [row for own in by_labels.values() for row in own]
    cells = [
        (
            *(row[name] for name in ("preset", "method", *labels, "value")),
            _interval(row["low"], row["high"]),
            row["diff"],
            _interval(row["diff_low"], row["diff_high"]),
        )
        for row in rows
    ]
    panels = [_panel(key, own) for key, own in by_labels.items() if "depth" not in labels or ALL_DEPTHS in key]
    return _Section(
        kind=kind,
        rows=rows,
        pictures={"means": forest_png(panels)},
        columns=("preset", "method", *labels, "mean", "95 %", f"minus {REFERENCE}", "95 %"),
        cells=cells,
    )


def _panel(labels: Sequence[str], rows: Sequence[Row]) -> Panel:
    points = [estimate(row, "value") for row in rows]
    bands = [(low, high) for preset, _, low, high in points if preset == REFERENCE]
    title = ", ".join(label.replace("_", " ") for label in labels if label != ALL_DEPTHS)
    return Panel(title, points, bands[0] if bands else None)


def _interval(low: str, high: str) -> str:
    return f"{low} \u2013 {high}"
