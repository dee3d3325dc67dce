"""Attacks of a curious server on what side-tuning sends it, for ``benchmarks/side_privacy.py``."""
