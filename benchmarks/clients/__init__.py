"""Unmodified clients against a running server, each in an environment of its own: ``python -m benchmarks.clients``."""
