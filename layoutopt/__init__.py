"""layoutopt: choose the memory layout of every tensor of a training step at once, prove the choice, run it."""

__version__ = "0.1.0"
