"""The direction of imports: core → kernels → costmodel → simulator → face, and what loads heavy packages."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("layoutopt", "kernels", "costmodel", "simulator")
BELOW = {
    "layoutopt": {"layoutopt"},
    "kernels": {"layoutopt", "kernels"},
    "costmodel": {"layoutopt", "kernels", "costmodel"},
    "simulator": set(PACKAGES),
}
# The top floor: sees all four packages, and imports the other three inside functions only.
FACE = {
    f"layoutopt.{name}"
    for name in (
        "__main__",
        "advise",
        "api",
        "api_device",
        "arraydata",
        "asked",
        "assembly",
        "budget",
        "bundle",
        "cli",
        "cli_advise",
        "cli_config",
        "cli_device",
        "cli_doctor",
        "cli_evaluate",
        "cli_export",
        "cli_report",
        "cli_side",
        "cli_simulate",
        "cli_sweep",
        "cli_options",
        "cli_pareto",
        "compare",
        "config",
        "compiled",
        "compiled_batch",
        "compiled_torch",
        "demo",
        "digits",
        "doctor",
        "doctor.child",
        "doctor.device",
        "doctor.drivers",
        "doctor.examine",
        "doctor.finding",
        "doctor.install",
        "doctor.trial",
        "energy",
        "example",
        "facade",
        "finetune",
        "intervals",
        "models",
        "options",
        "pareto",
        "peers",
        "phone",
        "planner",
        "pricer",
        "pricing",
        "pricing_apart",
        "pricing_rows",
        "probing",
        "refining",
        "export_graphml",
        "export_explorer",
        "report",
        "report.agreement",
        "report.beside",
        "report.charts",
        "report.gather",
        "report.layouts",
        "report.memory",
        "report.misses",
        "report.page",
        "report.proof",
        "report.shapes",
        "report.steps",
        "report.svg",
        "report.times",
        "side",
        "side.backbone",
        "side.call",
        "side.client",
        "side.device",
        "side.device_head",
        "side.evaluate",
        "side.generate",
        "side.graphs",
        "side.hosts",
        "side.journal",
        "side.keys",
        "side.label_noise",
        "side.link",
        "side.needs",
        "side.network",
        "side.optimizer",
        "side.pretrained",
        "side.records",
        "side.samples",
        "side.sampling",
        "side.service",
        "side.serving",
        "side.session",
        "side.side_graph",
        "side.side_pb2",
        "side.store",
        "side.taps",
        "side.task",
        "side.trainer",
        "side.trainings",
        "side.weights",
        "side.wire",
        "side.workers",
        "standins.run",
        "profiling",
        "stepcost",
        "sweep",
        "sweep_engines",
        "sweep_journal",
        "sweep_table",
        "textclass",
        "textdata",
        "tracefile",
        "train",
        "trainer",
        "trainer_data",
        "trainer_files",
        "trainer_logs",
        "trainer_types",
        "tuning",
    )
}
TORCH = {
    f"layoutopt.{m}"
    for m in (
        "capture",
        "capture_open",
        "capture_trace",
        "compiled_torch",
        "modes",
        "side.network",
        "side.optimizer",
        "side.side_graph",
        "side.taps",
        "side.trainer",
        "zoo",
        "zoo_models",
    )
}
GENERATED = {"layoutopt.side.side_pb2"}  # imports protobuf, and is imported where messages are read
PYOPENCL = {"kernels.discovery", "kernels.runtime", "kernels.testing"}


class Import(NamedTuple):
    module: str
    target: str
    lazy: bool
    typing: bool
    line: int

    @property
    def top(self) -> str:
        return self.target.split(".")[0]

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


FRONT = "layoutopt"
"""The package itself: its names are those of the floors above, and loaded by name; type checkers are told of them."""


def _modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield name.removesuffix(".__init__"), path


def imports_of(module: str, source: str) -> list[Import]:
    """Every import statement: lazy inside a function, typing under ``if TYPE_CHECKING``."""
    out: list[Import] = []

    def walk(node: ast.AST, lazy: bool, typing: bool) -> None:
        if isinstance(node, ast.Import):
            out.extend(Import(module, alias.name, lazy, typing, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            for alias in node.names:
                out.append(Import(module, f"{node.module}.{alias.name}", lazy, typing, node.lineno))
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                walk(child, inside, True)
            for child in node.orelse:
                walk(child, inside, typing)
            return
        for child in ast.iter_child_nodes(node):
            walk(child, inside, typing)

    walk(ast.parse(source), False, False)
    return out


IMPORTS = [
    i
    for name, path in _modules()
    for i in imports_of(name, path.read_text(encoding="utf-8"))
    if not (i.module == FRONT and i.typing)
]


def _no(wrong: list[Import]) -> None:
    assert not wrong, "\n".join(map(str, wrong))


def test_the_reader_of_imports_sees_them_all() -> None:
    source = (
        "import a.b\nfrom c import d\ndef f():\n    import e\nif TYPE_CHECKING:\n    import g\nelse:\n    import h\n"
    )
    got = [(i.target, i.lazy, i.typing) for i in imports_of("m", source)]
    assert got == [
        ("a.b", False, False),
        ("c.d", False, False),
        ("e", True, False),
        ("g", False, True),
        ("h", False, False),
    ]
    assert len(IMPORTS) > 100


def test_packages_import_downwards_only() -> None:
    _no([
        i
        for i in IMPORTS
        if i.module not in FACE and i.top in PACKAGES and i.top not in BELOW[i.module.split(".")[0]]
    ])  # fmt: skip


def test_nothing_below_the_face_imports_it() -> None:
    def is_face(target: str) -> bool:
        return target in FACE or target.rpartition(".")[0] in FACE

    _no([i for i in IMPORTS if i.module not in FACE and is_face(i.target)])


def test_the_face_imports_other_packages_lazily() -> None:
    others = set(PACKAGES) - {"layoutopt"}
    _no([i for i in IMPORTS if i.module in FACE and i.top in others and not (i.lazy or i.typing)])


def test_torch_lives_in_capture_and_zoo() -> None:
    _no([i for i in IMPORTS if i.top == "torch" and i.module not in TORCH and not i.typing])


def test_pyopencl_lives_in_the_runtime() -> None:
    _no([i for i in IMPORTS if i.top == "pyopencl" and i.module not in PYOPENCL])
    _no([i for i in IMPORTS if i.top == "pyopencl" and i.module == "kernels.runtime" and not i.lazy])


def test_kernel_testing_is_for_tests_benchmarks_and_the_self_test() -> None:
    _no([i for i in IMPORTS if i.target.startswith("kernels.testing") and i.module != "kernels.selftest"])
    _no([i for i in IMPORTS if i.target.startswith("kernels.testing") and not i.lazy])


HEAVY = (
    "torch",
    "transformers",
    "pyopencl",
    "sklearn",
    "matplotlib",
    "sentence_transformers",
    "grpc",
    "cryptography",
    "ray",
)


@pytest.mark.parametrize("package", [*PACKAGES, "everything"])
def test_importing_loads_nothing_heavy(package: str) -> None:
    names = [package]
    if package == "everything":
        others = {"kernels.testing", "layoutopt.__main__"}
        names = [n for n, _ in _modules() if n not in TORCH | GENERATED | others]
        assert len(names) > 30
    code = f"import sys\nfor name in {names!r}: __import__(name)\nprint(*sorted({set(HEAVY)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
