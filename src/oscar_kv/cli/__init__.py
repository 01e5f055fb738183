"""The command line, one module for each command: ``oscar-kv demo``, ``generate``, ``diagnose``, ``eval``, ..."""

from __future__ import annotations

import typer
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging

from oscar_kv.cli import allocate, bench, demo, diagnose, env, evaluate, generate, media, probes, tasks

app = typer.Typer(
    help="INT2 KV caches for transformers (OScaR, arXiv 2605.19660).", no_args_is_help=True, add_completion=False
)
app.command()(demo.demo)
app.command()(generate.generate)
app.command()(diagnose.diagnose)
app.command()(allocate.allocate)
for command in (probes.generation, probes.recall, tasks.tasks, media.media):
    evaluate.app.command()(command)
app.add_typer(evaluate.app, name="eval")
app.add_typer(bench.app, name="bench")
app.command()(env.env)


@app.callback()
def _quiet() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
