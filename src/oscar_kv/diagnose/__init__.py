"""See whether, where and why 2-bit quantization of the KV cache hurts a model: ``diagnose`` and its report."""

from oscar_kv.diagnose.report import Report
from oscar_kv.diagnose.run import diagnose

__all__ = ["Report", "diagnose"]
