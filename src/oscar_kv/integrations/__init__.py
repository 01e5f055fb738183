"""Thin adapters to the libraries that serve models; each imports its library, and nothing else does."""
