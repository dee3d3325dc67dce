"""Captures the zoo at full size, times it, and (with ``--ship``) writes the graphs that are part of the package.

Each model is captured in a process of its own, so that its peak memory is its own. Prints a table and writes a JSON
record; nothing is compared with a peer here, the limits are the project's: 60 s, 8 GiB, 5 MiB a file, 10 MiB in all.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "layoutopt" / "data"


def capture_one(name: str, mode: str, target: Path | None) -> dict[str, object]:
    """One model in this process."""
    started, cpu = time.perf_counter(), time.process_time()
    from layoutopt.blocks import describe_blocks
    from layoutopt.facade import capture_model
    from layoutopt.graphfile import encode, save

    loaded = time.perf_counter()
    graph, report = capture_model(name, mode=mode)
    seconds = time.perf_counter() - loaded
    if target is not None:
        save(graph, target)
    return {
        "model": name,
        "mode": mode,
        **graph.meta["facts"],
        "captured_ops": sum(report.before.values()),
        "views_folded": len(report.folded),
        "views_kept": len(report.kept),
        "operands_along_stored_axes": list(report.operands),
        "capture_s": seconds,
        "passes_s": report.seconds,
        "import_s": loaded - started,
        "cpu_s": time.process_time() - cpu,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "file_bytes": len(encode(graph)),
        "blocks": describe_blocks(graph),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="zoo names, or NAME:MODE; all that are not for tests by default")
    parser.add_argument("--ship", action="store_true", help="write layoutopt/data/NAME.graph")
    parser.add_argument("-o", "--output", type=Path, default=Path("capture_zoo.json"))
    parser.add_argument("--one", action="store_true", help="capture in this process and print one record")
    parser.add_argument("--smoke", action="store_true", help="one small model, in this process, no record")
    args = parser.parse_args()
    if args.smoke:
        record = capture_one("bert-tiny", "full", None)
        print(f"bert-tiny: {record['captured_ops']} ops captured, {record['ops']} after the passes")
        return
    if args.one:
        name, _, mode = args.models[0].partition(":")
        target = DATA / f"{name}{f'-{mode}' if mode else ''}.graph" if args.ship else None
        print(json.dumps(capture_one(name, mode or "full", target)))
        return
    from layoutopt import zoo

    models = args.models or [n for n in zoo.MODELS if not n.endswith("-odd") and n != "bert-tiny"]
    head = ("model", "M params", "captured", "after", "folded", "kept", "capture s", "cpu s", "GiB", "KiB")
    print("{:<24}{:>10}{:>10}{:>8}{:>8}{:>6}{:>11}{:>8}{:>7}{:>7}".format(*head))
    records = []
    for model in models:
        words = [sys.executable, __file__, model, "--one", *(["--ship"] if args.ship else [])]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{model}: {done.stderr.strip().splitlines()[-1]}")
        r = json.loads(done.stdout.strip().splitlines()[-1])
        records.append(r)
        print(
            f"{model:<24}{r['parameters'] / 1e6:>10.1f}{r['captured_ops']:>10}{r['ops']:>8}{r['views_folded']:>8}"
            f"{r['views_kept']:>6}{r['capture_s']:>11.1f}{r['cpu_s']:>8.1f}{r['peak_bytes'] / 2**30:>7.2f}"
            f"{r['file_bytes'] / 1024:>7.0f}",
            flush=True,
        )
    record = {"python": platform.python_version(), "machine": platform.machine(), "models": records}
    args.output.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
