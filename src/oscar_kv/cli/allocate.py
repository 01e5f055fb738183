"""``oscar-kv allocate``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from oscar_kv import results
from oscar_kv.cli.shared import DtypeOption, ModelArgument, Preset, PresetOption, errors_in_one_line, progress_bar
from oscar_kv.config import REPORT_FORMAT, OscarConfig
from oscar_kv.evaluate import PRESETS, Sensitivity, allocate_bits, sensitivity
from oscar_kv.evaluate.allocate import check_start
from oscar_kv.extras import import_extra
from oscar_kv.loading import load


def allocate(
    model: ModelArgument,
    preset: PresetOption = Preset.QUALITY,
    max_bits: Annotated[float, typer.Option(help="Bits per packed number, metadata included.")] = 3.05,
    out: Annotated[Path | None, typer.Option(help="JSON file for OscarConfig.from_report().")] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture of what each layer needs and gets (extra: plot).")] = None,
    dtype: DtypeOption = "auto",
) -> None:
    """Give single layers more bits where the model needs them to remember what it has read. Needs no text."""
    with errors_in_one_line():
        if plot is not None:
            import_extra("matplotlib", "plot")
        console = Console()
        with console.status(f"loading {model}"):
            lm, _ = load(model, dtype)
        check_start(PRESETS[preset], lm.config, max_bits)
        with progress_bar(console) as progress:
            task = progress.add_task("layers", total=None)
            found = sensitivity(lm, progress=lambda done, total: progress.update(task, completed=done, total=total))
        config = allocate_bits(lm, PRESETS[preset], max_bits=max_bits, measured=found)
        console.print(_table(found, config))
        if out is not None:
            kl = {side: {i: x for (one, i), x in found.kl.items() if one == side} for side in ("key", "value")}
            report = {"format": REPORT_FORMAT, "recommendation": {"config": asdict(config)}, "kl_at_2_bits": kl}
            out.write_text(json.dumps(report | {"provenance": results.provenance()}, indent=1), encoding="utf-8")
        if plot is not None:
            from oscar_kv.evaluate.figures import allocation_png

            plot.write_bytes(allocation_png(found, config))


def _table(found: Sensitivity, config: OscarConfig) -> Table:
    table = Table("layer", "KL, keys in 2 bits", "KL, values in 2 bits", "key bits", "value bits")
    for layer in sorted({layer for _, layer in found.kl}):
        own = config.for_layer(layer)
        style = "bold" if layer in config.layers else "dim"
        kl = (f"{found.kl[side, layer]:.4f}" for side in ("key", "value"))
        table.add_row(str(layer), *kl, str(own.key_bits), str(own.value_bits), style=style)
    return table
