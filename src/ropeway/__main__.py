"""``python -m ropeway``: the command line."""

from ropeway.cli.main import app

app()
