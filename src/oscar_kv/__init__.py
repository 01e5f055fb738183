"""INT2 KV caches for any decoder LLM in transformers: OScaR (arXiv 2605.19660) as a library."""

from oscar_kv.cache import OscarCache
from oscar_kv.config import OscarConfig
from oscar_kv.integrations.graph import DecodeGraph
from oscar_kv.integrations.transformers import enable, register

__version__ = "0.1.0"
__all__ = ["DecodeGraph", "OscarCache", "OscarConfig", "__version__", "enable", "register"]
