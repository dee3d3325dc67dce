"""Address streams against instrumented runs of the same OpenCL kernels: every access of every work item."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.instrument import instrumented_source
from kernels.reference import evaluate
from kernels.runtime import devices
from kernels.source import program_source
from kernels.spec import Kernel
from kernels.testing import RecordedKernel
from tests.stream_cases import FAMILIES, LEVELS, SIDES, Case, agreements, images, kernels_of_case, texel_kernels

EACH = 2
"""Kernels of a variant that are run, of all the cases that it accepts."""
ONLY_ELEMENTS = {"contraction": ("tile.n", "tile.m")}
"""Variants whose vectors lie across two axes: a nest has them as several."""


def chosen(family: str, side: str, each: int = EACH) -> list[tuple[Case, Kernel]]:
    """Of each variant, some of the cases of a family, evenly spread."""
    found: dict[str, list[tuple[Case, Kernel]]] = {}
    for case in FAMILIES[family]():
        for kernel in kernels_of_case(case, SIDES[side]):
            found.setdefault(f"{kernel.spec.kind} {kernel.variant.name}", []).append((case, kernel))
    places = {key: {round(i * (len(own) - 1) / max(each - 1, 1)) for i in range(each)} for key, own in found.items()}
    return [own[i] for key, own in found.items() for i in sorted(places[key])]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("family", FAMILIES)
def test_streams_are_what_kernels_do(device_index: int, family: str, side: str) -> None:
    picked = chosen(family, side)
    if not picked:
        pytest.skip(f"no kernels of {family} for a {side}")
    for case, kernel in picked:
        recorded = RecordedKernel(devices()[device_index].handle, kernel, case.inputs)
        levels = agreements(recorded, case.inputs)
        what = [(level, launch.entry) for level, launch in zip(levels, kernel.launches, strict=True)]
        least = LEVELS.index("item" if kernel.variant.name in ONLY_ELEMENTS.get(family, ()) else "pieces")
        assert all(LEVELS.index(level) >= least for level in levels), f"{case.name}: {kernel.variant.label}: {what}"
        exact = [x.astype(np.float64) if x.dtype.kind == "f" else x for x in case.inputs]
        expected = evaluate(kernel.spec.kind, dict(kernel.spec.attrs), exact, kernel.spec.shapes[kernel.spec.inputs :])
        for got, wanted in zip(recorded.outputs(), expected, strict=True):
            np.testing.assert_allclose(got, np.reshape(wanted, got.shape), 1e-3, 1e-3, err_msg=kernel.variant.label)


def test_texels_are_what_kernels_read(device_index: int) -> None:
    """Products that read through images, which are enumerated for a GPU that is not here."""
    info = devices()[device_index]
    if not info.image_max_buffer_texels:
        pytest.skip(f"{info.label} has no images over buffers")
    seen = set()
    for case in images():
        for kernel in texel_kernels(case):
            recorded = RecordedKernel(info.handle, kernel, case.inputs)
            assert agreements(recorded, case.inputs)[0] in ("pieces", "order"), f"{case.name}: {kernel.variant.label}"
            (log, *_), launch = recorded.accesses, kernel.launches[0]
            assert set(log.operand[log.image]) == set(launch.images)
            assert not set(log.operand[~log.image]) & set(launch.images)
            seen.add(kernel.variant.name)
    assert seen == {"outer.n.image", "outer.m.image", "staged.image"}


def test_a_wrong_nest_is_found(device_index: int) -> None:
    """The comparison sees a store that a nest leaves out, and one that it adds."""
    case, kernel = chosen("pointwise", "cpu")[0]
    recorded = RecordedKernel(devices()[device_index].handle, kernel, case.inputs)
    (launch,) = kernel.launches
    assert agreements(recorded, case.inputs)[0] in ("pieces", "order")
    phase = launch.nest.phases[0]
    for accesses in (phase.accesses[:-1], (*phase.accesses, phase.accesses[-1])):
        phases = (type(phase)(phase.loops, accesses, phase.flops),)
        wrong = type(kernel)(
            kernel.spec,
            kernel.variant,
            kernel.layouts,
            (type(launch)(**{**launch.__dict__, "nest": type(launch.nest)(launch.nest.grid, phases)}),),
            views=kernel.views,
        )
        recorded.kernel = wrong
        assert agreements(recorded, case.inputs)[0] in ("nothing", "touched")


@pytest.mark.parametrize("family", FAMILIES)
def test_production_sources_know_nothing_of_it(family: str) -> None:
    for side in SIDES:
        for _, kernel in chosen(family, side):
            for launch in kernel.launches:
                before = program_source(kernel, launch)
                after = instrumented_source(kernel, launch, 20, 1000)
                assert program_source(kernel, launch) == before
                assert "log_access" not in before
                assert "log_access" in after


def test_ids_steer_what_they_should(device_index: int) -> None:
    """Other ids, other streams: the walker's are not right by chance."""
    case, kernel = next(pair for pair in chosen("gather", "cpu"))
    recorded = RecordedKernel(devices()[device_index].handle, kernel, case.inputs)
    table, ids = case.inputs
    assert agreements(recorded, [table, (ids + 1) % 11]) == ["nothing"]
    expected = evaluate("gather", dict(case.spec.attrs), [table.astype(np.float64), ids], case.spec.shapes[2:])
    np.testing.assert_allclose(recorded.outputs()[0], expected[0], rtol=1e-6)
