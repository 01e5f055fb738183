"""``python -m oscar_kv.bench`` is ``oscar-kv bench``, for a source tree that is not installed."""

from oscar_kv.cli.bench import app

app(prog_name="python -m oscar_kv.bench")
