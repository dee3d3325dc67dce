"""What a device says about itself and how it computes, told line by line by a process of its own.

A driver may crash or hang the process that uses it. So whoever wants to know starts ``python -m kernels.selftest`` and
reads: every line is a JSON object whose ``event`` says what it is, and what is about to be done is said before it is.

    python -m kernels.selftest list                       the devices, with limits
    python -m kernels.selftest check INDEX [FAMILY …]     kernels of every family, or some, against float64
    python -m kernels.selftest speed INDEX                seconds of a short matrix product

The check runs a few kernels of each family: for each of its problems the first and the last variant of every name that
would be planned for this device, over poisoned outputs, padding and guards (``kernels/testing.py``).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any, TextIO

import numpy as np

from kernels.devices import DeviceInfo
from kernels.runtime import devices, no_device_reason
from kernels.selftest_cases import CASES, Case, cases
from kernels.spec import Kernel, OpSpec
from kernels.variants import kernels_for
from layoutopt.errors import LayoutOptError
from layoutopt.layout import Layout

__all__ = ["check_device", "check_family", "list_devices", "main", "speed_of"]

Tell = Callable[[dict[str, Any]], None]

_SPEED_SIZE = 256
"""A product of two matrices of so many rows: 34 million operations, milliseconds on a slow CPU."""
_SPEED_ROUNDS = 7


def list_devices(tell: Tell) -> None:
    """Tell of every device."""
    for info in devices():
        facts = {f.name: getattr(info, f.name) for f in fields(info) if f.name not in ("limits", "handle")}
        tell({"event": "device", "label": info.label, **facts, "limits": asdict(info.limits)})
    tell({"event": "devices", "count": len(devices()), "reason": no_device_reason()})


def check_device(info: DeviceInfo, families: Sequence[str], tell: Tell) -> None:
    """Check kernels of some families, and that events carry times."""
    tell({"event": "begin", "what": "profiling"})
    tell({"event": "profiling", "seconds": _profiled_s(info)})
    for family in families:
        begin = time.perf_counter()
        tell({"event": "begin", "what": family})
        count, wrong = check_family(info, family, tell)
        tell({"event": "family", "name": family, "kernels": count, "wrong": wrong, "s": time.perf_counter() - begin})


def check_family(info: DeviceInfo, family: str, tell: Tell) -> tuple[int, list[str]]:
    """Check kernels of a family.

    Returns:
        How many ran, and of those that are wrong or do not build, a sentence each.
    """
    from kernels.testing import check_kernels

    count, wrong = 0, []
    for case in cases(family):
        chosen = _ends(case, info)
        if not chosen:
            wrong.append(f"{case.spec.kind}: no kernel fits the device's limits")
            continue
        tell({"event": "begin", "what": f"{family}: {', '.join(k.variant.label for k in chosen)}"})
        expected = case.expected()
        try:
            check_kernels(info.handle, chosen, case.inputs, expected, case.rtol)
        except (AssertionError, LayoutOptError):
            for kernel in chosen:  # one by one, to name those that are wrong
                try:
                    check_kernels(info.handle, [kernel], case.inputs, expected, case.rtol)
                except (AssertionError, LayoutOptError) as error:
                    wrong.append(str(error) or f"{kernel.variant.label}: {type(error).__name__}")
        count += len(chosen)
    return count, wrong


def _ends(case: Case, info: DeviceInfo) -> list[Kernel]:
    """The first and the last kernel of every name."""
    made = kernels_for(case.spec, case.layouts, info.limits)
    first = {kernel.variant.name: kernel for kernel in reversed(made)}
    last = {kernel.variant.name: kernel for kernel in made}
    return list({kernel.key: kernel for kernel in (*first.values(), *last.values())}.values())


def _product(size: int) -> tuple[OpSpec, tuple[Layout, ...]]:
    shape = (1, size, size)
    spec = OpSpec("contraction", (shape,) * 3, ("float32",) * 3, 2, (("alpha", 1.0),))
    return spec, (Layout.row_major(shape),) * 3


def _profiled_s(info: DeviceInfo) -> float:
    """Device seconds of a kernel by its events."""
    from kernels.testing import PreparedKernel

    spec, layouts = _product(64)
    inputs = [np.ones((1, 64, 64), np.float32)] * 2
    return PreparedKernel(info.handle, kernels_for(spec, layouts, info.limits)[0], inputs).run()


def speed_of(info: DeviceInfo) -> tuple[float, int]:
    """Device seconds of a short matrix product with the variant that is fastest, and how many variants were tried."""
    from kernels.testing import PreparedKernel

    spec, layouts = _product(_SPEED_SIZE)
    inputs = [np.random.default_rng(s).standard_normal(spec.shapes[s]).astype(np.float32) for s in range(2)]
    tried = _ends(Case(spec, layouts, tuple(inputs)), info)
    best = float("inf")
    for kernel in tried:
        prepared = PreparedKernel(info.handle, kernel, inputs)
        prepared.run()
        best = min(best, *(prepared.run() for _ in range(_SPEED_ROUNDS)))
    return best, len(tried)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say; see the module."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    with _own_output() as target:

        def tell(fact: dict[str, Any]) -> None:
            target.write(json.dumps(fact, default=float) + "\n")
            target.flush()

        tell({"event": "begin", "what": "loading the drivers"})
        try:
            if words[:1] == ["list"]:
                list_devices(tell)
            elif len(words) >= 2 and words[1].isdecimal() and int(words[1]) < len(devices()):
                info = devices()[int(words[1])]
                if words[0] == "speed":
                    seconds, count = speed_of(info)
                    tell({"event": "speed", "seconds": seconds, "variants": count, "size": _SPEED_SIZE})
                else:
                    check_device(info, words[2:] or list(CASES), tell)
            else:
                print("usage: python -m kernels.selftest list | check INDEX [FAMILY …] | speed INDEX", file=sys.stderr)
                return 2
        except LayoutOptError as error:
            tell({"event": "error", "message": str(error)})
            return 1
        tell({"event": "end"})
    return 0


def _own_output() -> TextIO:
    """Standard output for our lines alone: what drivers print there goes to standard error."""
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return own


if __name__ == "__main__":
    sys.exit(main())
