"""Calibrate the GPU of this phone and write its device model. Start it with ``python3 run.py``; see README.txt."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Read options, calibrate, write the file; returns the exit code."""
    parser = argparse.ArgumentParser(description="Calibrate an OpenCL device and write its device model.")
    parser.add_argument("--device", help="index or part of 'platform version | name'; the first GPU by default")
    parser.add_argument("--list", action="store_true", help="list OpenCL devices and stop")
    parser.add_argument("--budget", type=float, default=180.0, help="seconds (default 180)")
    parser.add_argument("--thorough", action="store_true", help="more rounds, caches in finer steps")
    parser.add_argument("--fresh", action="store_true", help="leave out what an interrupted run has measured")
    parser.add_argument("--probes-only", action="store_true", help="rates and caches, no kernels")
    parser.add_argument("-o", "--output", default="device-model.toml", help="file to write (default device-model.toml)")
    given = parser.parse_args(arguments)
    if sys.version_info < (3, 11):  # noqa: UP036 - no installer has checked a phone's Python
        print(f"run.py needs Python 3.11 or newer; this is {sys.version.split()[0]}", file=sys.stderr)
        return 2
    _find_packages()
    from layoutopt.errors import LayoutOptError
    from layoutopt.files import check_target

    try:
        check_target(given.output)
        return _list() if given.list else _calibrate(given)
    except LayoutOptError as error:
        print(f"run.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("run.py: interrupted; what was measured is kept, the same command goes on from there", file=sys.stderr)
        return 130


def _find_packages() -> None:
    """The bundle's own code first; what stands in for other packages last, where those are installed they are used."""
    sys.path.insert(0, str(HERE))
    sys.path.append(str(HERE / "standins"))


def _list() -> int:
    from kernels.runtime import devices, no_device_reason

    found = devices()
    for device in found:
        print(f"{device.index}: {device.label} ({device.limits.kind}, {device.limits.compute_units} compute units)")
    if not found:
        print(f"no OpenCL device: {no_device_reason()}", file=sys.stderr)
    return 0 if found else 2


def _calibrate(given: argparse.Namespace) -> int:
    from costmodel import device as device_models
    from costmodel.caches import describe_caches
    from costmodel.calibrate import calibrate, describe_held_out, describe_timing, question
    from costmodel.journal import Journal
    from kernels.runtime import Runtime, pick
    from layoutopt.graphfile import load
    from layoutopt.probing import probe_only
    from layoutopt.rewrites import alternatives

    runtime = Runtime(pick(given.device))
    print(f"calibrating {runtime.info.label}; keep the phone cool and awake", file=sys.stderr)

    def tell(what: str, share: float) -> None:
        print(f"{share:4.0%} {what}", file=sys.stderr)

    if given.probes_only:
        model = probe_only(runtime, thorough=given.thorough)
        device_models.save(model, given.output)
    else:
        graphs = [a for file in sorted((HERE / "graphs").glob("*.graph")) for a in alternatives(load(file))]
        asked = question(runtime, graphs, thorough=given.thorough)
        journal = Journal(Path(f"{given.output}.journal"), asked, given.fresh)
        if journal.measured:
            print(f"going on with an interrupted run: {journal.measured} kernels were measured", file=sys.stderr)
        try:
            model = calibrate(runtime, given.budget, graphs, progress=tell, thorough=given.thorough, journal=journal)
            device_models.save(model, given.output)
        finally:
            journal.close()
        journal.remove()
    print(f"{model.name}: {len(model.measurements)} kernels measured in {model.budget_s:.0f} s")
    print(describe_caches(model))
    for line in describe_timing(model):
        print(line)
    if not given.probes_only:
        print(describe_held_out(model.held_out))
    print(f"wrote {given.output}: bring it back and plan with --device-model {Path(given.output).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
