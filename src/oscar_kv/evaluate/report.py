"""An HTML page of a study's rows: a picture of KL against bytes, and the table."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from oscar_kv.evaluate.ablations import ABLATIONS
from oscar_kv.evaluate.compare import REFERENCE
from oscar_kv.evaluate.methods import OURS
from oscar_kv.extras import import_extra

_SETTING = ("model", "dtype", "context", "texts")
_PROVENANCE = ("hardware", "oscar_kv", "torch", "transformers", "commit", "command", "date")
_AXES = {"packed_bits": "bits per packed number", "bits": "bits per cached number, tail and sinks included"}
_OURS = {*OURS, *ABLATIONS}
_NOISE = "unquantized"  # drawn as a line
_SMALLEST = 1e-5  # nats; what is drawn of a KL of 0
_WIDTH, _LINE = 0.8, 1.12  # of a label: in bits, and as a factor of KL

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>KV cache fidelity</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .2em .8em; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child, td:nth-child(2), th:nth-child(2) { text-align: left }
tr.ours { background: #eef5fb }
img { max-width: 100% }
small { color: #555 }
</style>
<h1>KV cache fidelity</h1>
<p>Mean KL divergence in nats per token between the predictions with the 16-bit cache and with each method, by teacher
forcing; 95 % intervals by a block bootstrap over the tokens, with the same resamples for all methods.</p>
{% for study in studies %}
<h2>{{ study.title }}</h2>
<img alt="KL against bits" src="data:image/png;base64,{{ study.picture }}">
<table>
<tr><th>preset</th><th>method</th><th>packed bits</th><th>bits</th><th>KL</th><th>95 %</th>
<th>{{ "KL / KL of " + study.against if study.against else "" }}</th><th>perplexity</th><th>top-1</th></tr>
{% for row in study.rows %}
<tr{% if row.preset in ours %} class="ours"{% endif %}><td>{{ row.preset }}</td><td>{{ row.method }}</td>
<td>{{ row.packed_bits }}</td><td>{{ row.bits }}</td><td>{{ row.kl }}</td>
<td>{{ row.kl_low }} &ndash; {{ row.kl_high }}</td>
<td>{% if row.kl_ratio %}{{ row.kl_ratio }} ({{ row.kl_ratio_low }} &ndash; {{ row.kl_ratio_high }}){% endif %}</td>
<td>{{ "%+.1f" | format(row.ppl_change | float) }} %</td><td>{{ row.top1 }}</td></tr>
{% endfor %}
</table>
{% for made in study.made %}<p><small>{{ made }}</small></p>{% endfor %}
{% endfor %}
</html>
"""


def write_report(table: Path, page: Path) -> None:
    """Write a page of its own (the pictures are inside) from the rows that ``oscar-kv eval fidelity --csv`` made.

    Raises:
        ImportError: The extra "plot" is not installed.
        ValueError: The file has no such rows.
    """
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or not rows[0].keys() >= {*_SETTING, "preset", "kl_low"}:
        raise ValueError(f"{table} has no rows of 'oscar-kv eval fidelity'")
    studies = []
    rows.sort(key=lambda row: [row[name] for name in _SETTING])
    for setting, group in groupby(rows, key=lambda row: [row[name] for name in _SETTING]):
        newest = {row["preset"]: row for row in group}  # a preset that was done again
        own = sorted(newest.values(), key=lambda row: float(row["packed_bits"]))
        model, dtype, context, texts = setting
        studies.append(
            {
                "title": f"{model}, {dtype}, {context} tokens of {texts.replace('+', ', ')}",
                "picture": base64.b64encode(pareto_png(own)).decode(),
                "rows": own,
                "against": next((row["against"] for row in own if row["against"]), ""),
                "made": list(dict.fromkeys(", ".join(f"{k} {row[k]}" for k in _PROVENANCE) for row in own)),
            }
        )
    environment = import_extra("jinja2", "plot").Environment(autoescape=True)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(environment.from_string(_PAGE).render(studies=studies, ours=_OURS), encoding="utf-8")


def pareto_png(rows: Sequence[Mapping[str, str]]) -> bytes:
    """KL against bits with its intervals, for packed tokens alone and for everything held, and the front of each."""
    figure = import_extra("matplotlib.figure", "plot").Figure(figsize=(16, 7), layout="constrained")
    shown = [row for row in rows if row["preset"] not in (REFERENCE, _NOISE)]
    noise = [float(row["kl"]) for row in rows if row["preset"] == _NOISE]
    for axes, (column, label) in zip(figure.subplots(1, len(_AXES), sharey=True), _AXES.items(), strict=True):
        axes.set_yscale("log")
        _draw(axes, [(row["preset"], float(row[column]), *_kl(row)) for row in shown])
        for kl in noise:
            axes.axhline(max(_SMALLEST, kl), color="#8c8c8c", linestyle=":", label="our cache with 16-bit numbers")
        axes.set_xlabel(label)
        axes.set_ylabel("KL(16-bit || method), nats")
        axes.margins(x=0.15)
        axes.legend(loc="upper right", fontsize="small")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def _kl(row: Mapping[str, str]) -> tuple[float, float, float]:
    """Mean, low and high, so that they can be drawn on a logarithmic axis."""
    kl, low, high = (max(_SMALLEST, float(row[name])) for name in ("kl", "kl_low", "kl_high"))
    return kl, low, high


def _draw(axes: Any, points: Sequence[tuple[str, float, float, float, float]]) -> None:
    """Points: preset, bits, and KL with its interval."""
    front = pareto_front([(x, kl) for _, x, kl, *_ in points])
    axes.step(
        [x for x, _ in front],
        [kl for _, kl in front],
        where="post",
        color="#d62728",
        linewidth=1,
        label="nothing is better in both",
    )
    labels: list[tuple[float, float]] = []
    for preset, x, kl, low, high in sorted(points, key=lambda point: -point[2]):
        color = "#08519c" if preset in _OURS else "#6e6e6e"
        axes.errorbar(x, kl, yerr=[[max(0.0, kl - low)], [max(0.0, high - kl)]], fmt="o", color=color, markersize=4)
        y = min([kl, *(other / _LINE for at, other in labels if abs(at - x) < _WIDTH)])  # below the other labels
        labels.append((x, y))
        place = {"xytext": (5, y), "textcoords": ("offset points", "data"), "va": "center"}
        axes.annotate(preset, (x, kl), **place, fontsize="x-small", color=color).set_in_layout(False)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (bits, KL) that no other beats in both, by bits."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front
