"""``bench kernels`` without a GPU: its arithmetic, rows, pictures and refusals."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from rich.console import Console
from torch.nn.attention import SDPBackend
from typer.testing import CliRunner

from oscar_kv import results
from oscar_kv.bench import candidate, decode, kernels, plot
from oscar_kv.bench.candidate import Candidate
from oscar_kv.bench.measurement import Measurement, Shape, append, read_runs, speedup
from oscar_kv.bench.timing import Spread
from oscar_kv.cli import app
from oscar_kv.cli.bench import _table

SHAPE = Shape(8, 32768, 32, 8)
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")


def measured(impl: str = "oscar", median: float = 125.0, **changes: Any) -> Measurement:
    """426 MB, which a copy at 4260 GB/s moves in 100 microseconds."""
    return replace(
        Measurement(
            op="decode", impl=impl, preset="default" if impl == "oscar" else "", form="", batch=8, context=32768,
            q_heads=32, kv_heads=8, head_dim=128, median_us=median, p10_us=median - 0.5, p90_us=median + 1.25,
            bytes=426_000_000, copy_gbps=4260.0,
        ),
        **changes,
    )  # fmt: skip


def invoke(*arguments: object, code: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, ["bench", *map(str, arguments)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def test_percentiles() -> None:
    order = torch.randperm(101, generator=torch.Generator().manual_seed(0)).tolist()
    assert Spread.of([float(i) for i in order]) == Spread(50.0, 10.0, 90.0)
    assert Spread.of([3.0, 1.0]) == Spread(2.0, pytest.approx(1.2), pytest.approx(2.8))


def test_fraction_of_the_memory_limit() -> None:
    assert measured().of_limit == pytest.approx(0.8)
    assert measured(median=100.0).of_limit == pytest.approx(1.0)


def test_speedup_is_over_the_fastest_bf16_of_the_same_shape() -> None:
    run = [
        measured(),
        measured("sdpa-flash", 300.0),
        measured("sdpa-cudnn", 250.0),
        measured("sdpa-flash", 50.0, context=1024),
        measured("sdpa-flash", 50.0, kv_heads=32),
        measured("copy", 10.0, op="encode"),
    ]
    assert speedup(run[0], run) == pytest.approx(2.0)
    assert speedup(run[1], run) == pytest.approx(250 / 300)
    assert speedup(measured(context=2048), run) is None


def test_encode_is_compared_with_a_copy_of_its_input() -> None:
    packing = measured(op="encode", median=160.0, q_heads=0)
    run = [
        packing,
        measured("copy", 40.0, op="encode", q_heads=0),
        measured("copy-packed", 25.0, op="encode", q_heads=0),
    ]
    assert speedup(packing, run) == pytest.approx(0.25)


def test_the_fastest_form_is_kept() -> None:
    def timed(impl: str, form: str, median: float, preset: str = "") -> tuple[Candidate, Spread]:
        return Candidate(impl, [], 1, preset, form), Spread(median, 0.0, 0.0)

    kept = candidate.fastest_forms(
        [
            timed("sdpa-flash", "gqa", 3.0),
            timed("sdpa-flash", "folded", 2.0),
            timed("sdpa-cudnn", "gqa", 1.0),
            timed("sdpa-cudnn", "folded", 5.0),
            timed("oscar", "", 9.0, "default"),
            timed("oscar", "", 8.0, "quality"),
        ]
    )
    assert [(c.impl, c.form, c.preset, spread.median_us) for c, spread in kept] == [
        ("sdpa-flash", "folded", "", 2.0),
        ("sdpa-cudnn", "gqa", "", 1.0),
        ("oscar", "", "default", 9.0),
        ("oscar", "", "quality", 8.0),
    ]


def test_rows_keep_everything(tmp_path: Path) -> None:
    path = tmp_path / "made" / "rows.csv"
    first = [measured(), measured("sdpa-cudnn", 250.25, form="folded")]
    second = [measured(median=101.5, copy_gbps=4100.0)]
    append(path, first[:1])
    append(path, first[1:])
    append(path, second)
    assert read_runs(path) == [first, second]
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    expected = (
        "gpu, op, impl, preset, batch, context, q_heads, kv_heads, head_dim, median_us, p10_us, p90_us, bytes, "
        "copy_gbps, form, driver, torch, cuda, cuda_core, oscar_kv, commit, command, date"
    )
    assert set(rows[0]) == set(expected.split(", "))
    assert rows[0]["torch"] == torch.__version__
    assert rows[0]["command"]


def test_a_later_run_replaces_an_earlier_one_in_the_picture() -> None:
    earlier = [measured(median=200.0), measured("sdpa-flash", 300.0), measured(preset="quality", median=150.0)]
    later = [measured(), measured("sdpa-flash", 250.0)]
    found = plot.points([earlier, later, [measured(preset="alone")]])
    assert found == {
        ("default", SHAPE): (pytest.approx(2.0), pytest.approx(0.8)),
        ("quality", SHAPE): (pytest.approx(2.0), pytest.approx(100 / 150)),
    }


def picture_of(path: Path, medians: dict[int, float]) -> Any:
    """Pixels that ``bench plot`` draws of a CSV file with these medians by context."""
    for context, median in medians.items():
        append(path, [measured(context=context, median=median), measured("sdpa-flash", 250.0, context=context)])
    out = path.parent / "pictures" / f"{path.stem}.png"
    invoke("plot", path, "--out", out)
    return imread(out)


def test_a_picture_from_rows(tmp_path: Path) -> None:
    pixels = picture_of(tmp_path / "a.csv", {1024: 100.0, 4096: 60.0, 32768: 50.0})
    height, width = pixels.shape[:2]
    assert min(height, width) > 500
    assert 0.01 < (pixels[..., :3] < 0.9).any(-1).mean() < 0.5  # lines and letters on white
    other = picture_of(tmp_path / "b.csv", {1024: 100.0, 4096: 120.0, 32768: 50.0})
    assert other.shape == pixels.shape
    assert (other != pixels).any()


def test_every_point_is_in_the_picture() -> None:
    shapes = [Shape(1, 1024, 32, 8), Shape(1, 65536, 32, 8), Shape(8, 4096, 32, 8), Shape(8, 4096, 8, 8)]
    found = {("default", shape): (1.0 + i, 0.1 * i) for i, shape in enumerate(shapes)}
    found |= {("quality", shape): (9.0 - i, 0.5) for i, shape in enumerate(shapes[2:])}
    figure = plot.draw(found)
    panels = figure.get_axes()
    assert [axes.get_title() for axes in panels] == ["default", "quality", "", ""]
    drawn, colors = set(), {}
    for place, axes in enumerate(panels):
        for line in axes.get_lines():
            if not (label := line.get_label()).startswith("_"):
                assert colors.setdefault(label, line.get_color()) == line.get_color()
                for x, y in zip(*line.get_data(), strict=True):
                    assert axes.get_xlim()[0] <= x <= axes.get_xlim()[1]
                    assert 0 == axes.get_ylim()[0] <= y <= axes.get_ylim()[1]
                    drawn.add((place % 2, place // 2, label, x, y))
    assert len(set(colors.values())) == len(colors) == 3
    assert drawn == {
        (["default", "quality"].index(preset), row, f"batch {s.batch}, heads {s.q_heads}/{s.kv_heads} of 128", *point)
        for (preset, s), pair in found.items()
        for row, point in enumerate((s.context, y) for y in pair)
    }
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == set(colors)


def test_the_table_says_who_wins() -> None:
    run = [measured("sdpa-flash", 300.0, form="gqa"), measured("sdpa-cudnn", 250.0, form="folded"), measured()]
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(_table("decode", run))
    text = console.export_text()
    assert "8 x 32768, heads 32/8 of 128" in text
    line = next(line for line in text.splitlines() if "oscar default" in line)
    for cell in ("125.0", "124.5 to 126.2", "2.00", "80%"):
        assert cell in line
    assert "sdpa-cudnn folded" in text


def test_the_usual_problems() -> None:
    todo = kernels.problems()
    for batch, context, q_heads, kv_heads in (
        (8, 32768, 32, 8), (64, 4096, 32, 8), (128, 4096, 32, 8), (1, 131072, 32, 8), (1, 131072, 32, 32),
        (1, 32768, 32, 8), (1, 1024, 32, 8), (64, 65536, 32, 8),
    ):  # fmt: skip
        assert ("decode", Shape(batch, context, q_heads, kv_heads)) in todo
    assert [shape for op, shape in todo if op == "encode"] == [Shape(1, 32768, 0, 8)]
    assert len(todo) == len(set(todo))


def test_every_combination_that_is_asked_for() -> None:
    todo = kernels.problems(("decode", "encode"), (1, 2), (256,), ((8, 2), (4, 2)), 64)
    assert todo == [
        ("decode", Shape(1, 256, 8, 2, 64)),
        ("decode", Shape(1, 256, 4, 2, 64)),
        ("decode", Shape(2, 256, 8, 2, 64)),
        ("decode", Shape(2, 256, 4, 2, 64)),
        ("encode", Shape(1, 256, 0, 2, 64)),
        ("encode", Shape(2, 256, 0, 2, 64)),
    ]


@pytest.mark.parametrize("form", ["gqa", "folded"])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_both_forms_of_sdpa_are_attention(form: str, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 8, 1, 32, generator=generator)
    keys, values = (torch.randn(3, kv_heads, 300, 32, generator=generator) for _ in range(2))
    got = decode.sdpa(query, keys, values, SDPBackend.MATH, form).reshape(query.shape)
    for head in range(8):
        k, v = (x[:, head * kv_heads // 8].double() for x in (keys, values))
        weights = torch.softmax((k @ query[:, head, 0].double()[..., None])[..., 0] / 32**0.5, -1)
        expected = (weights[:, :, None] * v).sum(1)
        torch.testing.assert_close(got[:, head, 0].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("kernels", "--heads", "32"), "--heads 32: give query heads and KV heads as 32/8"),
        (("kernels", "--heads", "32/5"), "heads 32/5: query heads must be a multiple"),
        (("kernels", "--context", "1000"), "only whole blocks of 128"),
        (("kernels", "--batch", "0"), "only whole blocks"),
        (("kernels", "--head-dim", "100"), "head_dim 100"),
        (("kernels", "--preset", "best"), "no preset best: choose from published"),
        (("kernels", "--impl", "fastest"), "no impl fastest: choose from oscar"),
        (("plot", "{csv}"), "is no table of oscar-kv bench kernels"),
        pytest.param(("kernels",), "bench kernels needs a CUDA GPU", marks=needs_no_gpu),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    table.write_text("a,b\n1,2\n", encoding="utf-8")
    output = invoke(*(option.format(csv=table) for option in options), code=1)
    assert message in output
    assert len(output.strip().splitlines()) == 1


def test_a_picture_needs_matplotlib_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'oscar-kv[plot]'" in invoke("kernels", "--plot", "x.png", code=1)


def test_measuring_needs_no_command_line_package() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('typer', 'rich', 'matplotlib'))); import oscar_kv.bench.kernels"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "oscar_kv.bench", "--help"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "kernels" in output
    assert "plot" in output


def test_a_copy_of_the_sources_takes_its_commit_from_the_environment(tmp_path: Path) -> None:
    source = Path(results.__file__).parent
    shutil.copytree(source, tmp_path / "src" / "oscar_kv", ignore=shutil.ignore_patterns("__pycache__"))
    code = "from oscar_kv import results; print(results.commit())"
    for given, expected in (({"OSCAR_KV_COMMIT": "abc1234"}, "abc1234"), ({}, "")):
        inherited = {name: value for name, value in os.environ.items() if name != "OSCAR_KV_COMMIT"}
        environment = {**inherited, "PYTHONPATH": str(tmp_path / "src"), **given}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.strip() == expected


def test_the_driver_version_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert results.driver() == ""
    tool = tmp_path / "nvidia-smi"
    for script, expected in (("echo 580.1; echo 580.1", "580.1"), ("echo no devices; exit 9", "")):
        tool.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        tool.chmod(0o755)
        assert results.driver() == expected
