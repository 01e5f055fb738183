"""The report as one self-contained HTML page, its pictures as PNG files beside it."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from oscar_kv.diagnose.figures import figures
from oscar_kv.diagnose.report import Report
from oscar_kv.loading import import_extra

HTML_NAME = "report.html"
_DPI = 100


def write(report: Report, folder: Path) -> Path:
    """Write ``report.json``, the pictures and ``report.html``, which embeds them.

    Args:
        report: The diagnosis.
        folder: Where; made if need be.

    Returns:
        The path of the page.

    Raises:
        ImportError: The extra "plot" is not installed.
    """
    jinja2 = import_extra("jinja2", "plot")
    report.save(folder)
    pictures = []
    for name, (figure, caption) in figures(report).items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DPI)
        (folder / f"{name}.png").write_bytes(buffer.getvalue())
        pictures.append({"data": base64.b64encode(buffer.getvalue()).decode("ascii"), "caption": caption})
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("report.html.j2").render(report=report.numbers, pictures=pictures)
    path = folder / HTML_NAME
    path.write_text(page, encoding="utf-8")
    return path
