"""The report as one self-contained HTML page, its pictures as PNG files beside it."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from oscar_kv.diagnose.figures import figures
from oscar_kv.diagnose.report import Report
from oscar_kv.extras import import_extra

HTML_NAME = "report.html"
_DPI = 100
_PALETTE = 256  # colors of a picture, for less than half of the bytes


def write(report: Report, folder: Path, layer: int | None = None) -> Path:
    """Write ``report.json``, the pictures and ``report.html``, which embeds them.

    Args:
        report: The diagnosis.
        folder: Where; made if need be.
        layer: The layer whose norms and keys the pictures show; None chooses one.

    Returns:
        The path of the page.

    Raises:
        ImportError: The extra "plot" is not installed.
        ValueError: The layer was not diagnosed.
    """
    jinja2 = import_extra("jinja2", "plot")
    drawn = figures(report, layer)
    report.save(folder)
    pictures = []
    for name, (figure, caption) in drawn.items():
        png = _png(figure)
        (folder / f"{name}.png").write_bytes(png)
        pictures.append({"data": base64.b64encode(png).decode("ascii"), "caption": caption})
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("report.html.j2").render(report=report.numbers, pictures=pictures)
    path = folder / HTML_NAME
    path.write_text(page, encoding="utf-8")
    return path


def _png(figure: Any) -> bytes:
    """A matplotlib figure as PNG with a palette (Pillow comes with matplotlib)."""
    image = import_extra("PIL.Image", "plot")
    full, small = io.BytesIO(), io.BytesIO()
    figure.savefig(full, format="png", dpi=_DPI)
    image.open(full).convert("RGB").quantize(_PALETTE).save(small, "PNG", optimize=True)
    return small.getvalue()
