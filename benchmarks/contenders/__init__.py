"""What ``benchmarks/step.py`` sets against each other: each contender is a process of its own that steps on request."""
