"""The garbage collector, out of the way while planning makes millions of values that stay and hardly any cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collections meanwhile: each would walk everything that is alive, again and again. Within itself it does
    nothing; it decorates functions, too.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # both together: what is alive now counts as old, without a look at it
            gc.enable()
