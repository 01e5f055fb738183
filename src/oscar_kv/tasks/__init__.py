"""Benchmark tasks of lm-eval, with a packed cache beside the 16-bit one."""
