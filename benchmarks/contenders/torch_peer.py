"""PyTorch as a contender: eager with sdpa, torch.compile, or torch.compile with CUDA graphs.

float32 with TF32 off. Batches come from (pinned) host memory at each step, as ours do. SGD without momentum as
``torch.optim.SGD`` does it by default; the model is compiled, the optimizer is not.
"""

from __future__ import annotations

import time
from itertools import cycle
from typing import Any

import torch

from benchmarks.contenders.wire import forget_peak, resident_bytes, serve
from benchmarks.works import LR, WORKS, batches, build

MODES = {"eager": None, "compile": "default", "cudagraphs": "reduce-overhead"}


class TorchPeer:
    """See the module."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import transformers  # noqa: F401  # before memory is looked at

        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        self.cuda = spec["torch_device"] == "cuda"
        self._mode = MODES[spec["mode"]]
        self._before = resident_bytes()
        work = WORKS[spec["work"]]
        module = build(work).to(spec["torch_device"])
        self._optimizer = torch.optim.SGD(module.parameters(), lr=LR)
        self._call = module if self._mode is None else torch.compile(module, mode=self._mode)
        self._module = module
        given = [{k: torch.from_numpy(v) for k, v in batch.items()} for batch in batches(work)]
        if self.cuda:
            given = [{k: v.pin_memory() for k, v in batch.items()} for batch in given]
        self._given = cycle(given)

    def _step(self) -> torch.Tensor:
        batch = next(self._given)
        if self.cuda:
            batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
        if self._mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._call(**batch).loss
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def losses(self, count: int) -> list[float]:
        """Step by step."""
        return [float(self._step().item()) for _ in range(count)]

    def burst(self, count: int) -> float:
        """Waits once, at the end."""
        self._wait()
        begin = time.perf_counter()
        for _ in range(count):
            self._step()
        self._wait()
        return time.perf_counter() - begin

    def steady(self) -> None:
        """Peaks count from here."""
        forget_peak()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def report(self) -> dict[str, Any]:
        """Peak memory; on CUDA also the kernels of a step and the time they take."""
        growth = resident_bytes(peak=True) - self._before
        if not self.cuda:
            return {"peak_bytes": growth, "peak_means": "growth of resident memory over the imports"}
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        launches, kernels_s = self._kernels()
        graphs = self._mode == "reduce-overhead"  # what lies in a recorded graph's pool counts as given out to nobody
        return {
            "peak_bytes": reserved if graphs else peak,
            "peak_means": "most that the caching allocator " + ("held, graphs' pools too" if graphs else "gave out"),
            "allocated_bytes": peak,
            "reserved_bytes": reserved,
            "launches": launches,
            "kernels_s": kernels_s,
        }

    def _kernels(self) -> tuple[int, float]:
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            self._step()
            self._wait()
        events = [e for e in seen.events() if e.device_type == DeviceType.CUDA]
        return len(events), sum(e.time_range.elapsed_us() for e in events) * 1e-6


if __name__ == "__main__":
    serve(TorchPeer)
