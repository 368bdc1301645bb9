"""`python -m measureflow` is `measureflow`."""

from measureflow.cli import app

app()
