"""``python -m layoutopt``."""

from layoutopt.cli import run

run()
