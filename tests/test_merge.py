"""Merging kernel sources: which can be sections, and what becomes of their names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernels import merge
from kernels.merge import mergeable, merged

HELPER = """
#define N 4 /* elements */
#define LOOP(body) do { \\
        body; \\
    } while (0)
// a comment with { and ( in it
static inline float first(__global const float *x)
{
    if (x[0] > 0) { return x[0]; }
    return 0;
}
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void run(__global float *x) { LOOP(x[N] = first(x)); }
"""


def test_functions_are_renamed_and_macros_forgotten() -> None:
    text = merged([HELPER, HELPER])
    for position in (0, 1):
        assert f"#define first first__{position}" in text
        assert f"#define run run__{position}" in text
    for name in ("N", "LOOP", "first", "run"):
        assert len(re.findall(rf"^#undef {name}$", text, re.MULTILINE)) == 2
    assert text.count(HELPER) == 2


def test_functions_that_a_macro_defines_are_renamed() -> None:
    source = """
#define MAKE(T, S) \\
    static T twice##S(T x) \\
    { return AS##S(x + x); }
#define AS_f(x) (x)
MAKE(float, _f)
__kernel void run(__global float *x) { x[0] = twice_f(x[0]); }
"""
    assert mergeable(source)
    text = merged([source])
    assert "#define twice_f twice_f__0" in text
    assert text.index("#define twice_f ") < text.index("MAKE(float, _f)") < text.index("#undef twice_f")


@pytest.mark.parametrize(
    "source",
    [
        "typedef struct { float a; } pair;\n__kernel void f(__global float *x) { x[0] = 1; }",
        "__constant float table[2] = { 1, 2 };\n__kernel void f(__global float *x) { x[0] = table[0]; }",
        "#define NAME f\n__kernel void NAME(__global float *x) { x[0] = 1; }",
        "// no function at all",
    ],
    ids=["type", "constant", "name by macro", "empty"],
)
def test_sources_that_stay_alone(source: str) -> None:
    assert not mergeable(source)


def test_ordinary_sources_can_be_sections() -> None:
    assert mergeable(HELPER)
    assert mergeable("__kernel void f(__global float *x, const int n) { for (int i = 0; i < n; ++i) { x[i] = i; } }")


def test_every_kernel_body_can_be_a_section() -> None:
    """A body that cannot would quietly make every start slower."""
    for body in sorted((Path(merge.__file__).parent / "cl").glob("*.cl")):
        text = body.read_text()
        assert mergeable(text) or "__kernel" not in text, body.name
