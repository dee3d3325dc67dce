"""Where a sweep's plans are made: processes of this machine, or a Ray cluster.

Workers leave Ctrl-C to the sweep, which ends them, and end themselves when the sweep is killed. A worker that dies (out
of memory, say) takes no other plan along: those that were under way are tried again one at a time, and the one at which
it dies again is a row that says so.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for
from typing import Any

from layoutopt.errors import LayoutOptError
from layoutopt.sweep import Row, Task, refusal, solve

__all__ = ["join_cluster", "local", "on_ray"]

Done = tuple[int, Row, bytes | None]

_DIED = "its worker process died (out of memory?): give it more memory, or fewer --workers"


def _begin() -> None:
    """What a worker does first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)


def local(tasks: Sequence[Task], workers: int) -> Iterator[Done]:
    """Make plans in processes of this machine; yields each as it ends."""
    suspects: list[int] = []
    rest = list(range(len(tasks)))
    while rest or suspects:
        # After a death whoever was under way is suspected and runs alone.
        alone = bool(suspects)
        batch, rest = ([suspects.pop(0)], rest) if alone else (rest, [])
        lost, unstarted = yield from _pool(tasks, batch, 1 if alone else workers)
        if alone:
            for position in lost:
                yield position, refusal(tasks[position].cell, "DIED", _DIED), None
        else:
            suspects, rest = lost, unstarted


def _pool(
    tasks: Sequence[Task], positions: Sequence[int], workers: int
) -> Generator[Done, None, tuple[list[int], list[int]]]:
    """Yields what ends; returns what was under way when a worker died, and what had not begun by then."""
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(positions)), mp_context=context, initializer=_begin)
    todo, running = list(positions), dict[Future[tuple[Row, bytes | None]], int]()
    lost: list[int] = []
    try:
        while (todo or running) and not lost:
            while todo and len(running) < workers:
                running[pool.submit(solve, tasks[todo[0]])] = todo[0]
                todo.pop(0)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                position, error = running.pop(future), future.exception()
                if isinstance(error, BrokenProcessPool):
                    lost.append(position)
                elif error is not None:
                    yield position, refusal(tasks[position].cell, "ERROR", f"{type(error).__name__}: {error}"), None
                else:
                    yield position, *future.result()
    finally:
        if todo or running or lost:  # interrupted, or a worker died: nobody waits for the others
            for process in set(multiprocessing.active_children()) - before:
                process.terminate()
        pool.shutdown(cancel_futures=True)
    return sorted([*lost, *running.values()]), todo


def on_ray(tasks: Sequence[Task], workers: int | None, address: str | None) -> Iterator[Done]:
    """Make plans on a Ray cluster; yields each as it ends.

    Args:
        tasks: what to plan.
        workers: at once; None is as many as the cluster has cores.
        address: of the cluster; None is that of RAY_ADDRESS, or one started here for this sweep.

    Raises:
        LayoutOptError: ray is not installed, or the cluster cannot be reached.
    """
    ray = join_cluster(address, workers)
    try:
        yield from _ray_tasks(ray, tasks, workers or max(int(ray.cluster_resources().get("CPU", 1)), 1))
    finally:
        ray.shutdown()


def join_cluster(address: str | None, slots: int | None) -> Any:
    """Connect to a Ray cluster.

    Args:
        address: of the cluster; None is that of RAY_ADDRESS, or one started here.
        slots: processes that one started here may run at once; None is as many as it has cores.

    Returns:
        The module ``ray``; ``ray.shutdown()`` ends the connection.

    Raises:
        LayoutOptError: ray is not installed, or the cluster cannot be reached.
    """
    try:
        import ray
    except ImportError as error:
        raise LayoutOptError("--engine ray needs ray: pip install 'layoutopt[ray]'") from error
    address = address or os.environ.get("RAY_ADDRESS")
    # On a machine of its own Ray gets as many slots as there are to be workers.
    own: dict[str, Any] = {} if address else {"num_cpus": slots, "include_dashboard": False}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise LayoutOptError(f"no Ray cluster at {address or 'this machine'}: {error}") from error
    return ray


def _ray_tasks(ray: Any, tasks: Sequence[Task], workers: int) -> Iterator[Done]:
    remote = ray.remote(num_cpus=1, max_retries=1)(solve)
    todo, running = list(range(len(tasks))), dict[Any, int]()
    while todo or running:
        while todo and len(running) < workers:
            running[remote.remote(tasks[todo[0]])] = todo[0]
            todo.pop(0)
        for done in ray.wait(list(running), num_returns=1)[0]:
            position = running.pop(done)
            cell = tasks[position].cell
            try:
                row, data = ray.get(done)
            except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError):
                row, data = refusal(cell, "DIED", _DIED), None
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None) or error
                row, data = refusal(cell, "ERROR", f"{type(cause).__name__}: {cause}"), None
            yield position, row, data
