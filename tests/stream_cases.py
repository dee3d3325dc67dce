"""What tests of address streams share: kernels of every family over odd sizes, and the comparison of two streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kernels.spec import DeviceLimits, Kernel, OpSpec
from kernels.testing import Accesses, RecordedKernel
from kernels.variants import kernels_for
from layoutopt.graph import Expr
from layoutopt.layout import Layout
from layoutopt.quantize import Format, quantise
from simulator.trace import Stream, compile_launch, stream
from tests.kernel_cases import make_spec, padded_rows
from tests.test_kernels_attention import ADD, forward_case, gradient_case, heads_apart, padded_panels, tiled, turned
from tests.test_kernels_convolution import LAYOUTS as CONV_LAYOUTS
from tests.test_kernels_convolution import Conv, inputs_of
from tests.test_kernels_epilogue import arrays, case
from tests.test_kernels_image import PHONE, columns
from tests.test_kernels_pointwise import ADAM
from tests.test_kernels_quantize import layouts_of, product
from tests.test_kernels_rows import IGNORED, loss_cases
from tests.test_kernels_rows import case as rows_case

CPU = DeviceLimits(kind="cpu", simd_width=8)
GPU = DeviceLimits(kind="gpu", simd_width=32, compute_units=4, local_mem_bytes=48 << 10)
SIDES = {"cpu": CPU, "gpu": GPU}
IDENTITY = Expr((), (("x", 0),))


@dataclass(frozen=True)
class Case:
    """An op with its operands laid out, and its inputs."""

    name: str
    spec: OpSpec
    layouts: tuple[Layout, ...]
    inputs: Sequence[np.ndarray]


# ---- comparing ------------------------------------------------------------------------------------------------------


def elements(log: Accesses | Stream, owner: Sequence[int]) -> np.ndarray:
    """[elements, 5]: work group, work item, store, operand, element, of each access in turn."""
    width = log.width
    lane = np.arange(width.sum()) - np.repeat(np.cumsum(width) - width, width)
    operand = np.asarray(owner)[log.operand]
    rows = np.stack([log.group, log.item, log.write.astype(np.int64), operand, log.offset_elems], axis=1)
    out = np.repeat(rows, width, axis=0)
    out[:, 4] += lane
    return out


def by_item(rows: np.ndarray) -> np.ndarray:
    """Accesses of a work item together, in their order."""
    return rows[np.lexsort((rows[:, 1], rows[:, 0]))]


def in_order(rows: np.ndarray) -> np.ndarray:
    """The same accesses in an order that does not depend on when they were made."""
    return rows[np.lexsort(rows.T[::-1])]


def pieces(log: Accesses | Stream, owner: Sequence[int]) -> np.ndarray:
    """[accesses, 6]: work group, work item, store, operand, first element, width."""
    operand = np.asarray(owner)[log.operand]
    return np.stack([log.group, log.item, log.write.astype(np.int64), operand, log.offset_elems, log.width], axis=1)


LEVELS = ("nothing", "touched", "group", "item", "pieces", "order")
"""How much of two streams is equal: the elements that a work group touches; how often it does; how often each of its
work items does; in which pieces; in which order."""


def agreement(real: Accesses, claimed: Stream, owner: Sequence[int]) -> str:
    """The last of LEVELS up to which a kernel's accesses are those that the walker makes."""
    a, b = elements(real, owner), elements(claimed, owner)
    no_item = [0, 2, 3, 4]
    if not np.array_equal(np.unique(a[:, no_item], axis=0), np.unique(b[:, no_item], axis=0)):
        return "nothing"
    if not np.array_equal(in_order(a[:, no_item]), in_order(b[:, no_item])):
        return "touched"
    if not np.array_equal(in_order(a), in_order(b)):
        return "group"
    c, d = pieces(real, owner), pieces(claimed, owner)
    if not np.array_equal(in_order(c), in_order(d)):
        return "item"
    return "order" if np.array_equal(by_item(c), by_item(d)) else "pieces"


def owners(kernel: Kernel) -> list[int]:
    """Per operand and workspace the operand whose buffer it has."""
    spec = kernel.spec
    reuse = {spec.inputs + out: inp for out, inp in spec.inplace}
    return [reuse.get(p, p) for p in range(len(spec.shapes) + len(kernel.scratch))]


def claimed_streams(kernel: Kernel, inputs: Sequence[np.ndarray]) -> list[Stream]:
    """What the walker says each launch does."""
    ids = {p: x for p, x in enumerate(inputs) if x.dtype.kind == "i"}
    return [stream(compile_launch(kernel, launch, ids)) for launch in kernel.launches]


def agreements(recorded: RecordedKernel, inputs: Sequence[np.ndarray]) -> list[str]:
    """``agreement`` of each launch of a kernel."""
    kernel = recorded.kernel
    claims = claimed_streams(kernel, inputs)
    return [agreement(a, b, owners(kernel)) for a, b in zip(recorded.accesses, claims, strict=True)]


# ---- the cases ------------------------------------------------------------------------------------------------------

Make = Callable[[tuple[int, ...]], Layout]


MATRICES: dict[str, Make] = {
    "row-major": Layout.row_major,
    "transposed": lambda shape: Layout.row_major(shape, (1, 0)),
    "r-tile 4x4": lambda shape: Layout.r_tile(shape, 4, 4),
    "panels of 16": lambda shape: Layout.tiled(shape, {1: 16}, (1, 0)),
    "pitch": padded_rows,
}
CUBES: dict[str, Make] = {
    "row-major": Layout.row_major,
    "transposed": lambda shape: Layout.row_major(shape, (0, 2, 1)),
    "r-tile 4x4": lambda shape: Layout.r_tile(shape, 4, 4),
    "r-tile 8x16": lambda shape: Layout.r_tile(shape, 8, 16, inner="col"),
    "panels of 16": lambda shape: Layout.tiled(shape, {2: 16}, (0, 2, 1)),
    "padded": lambda shape: Layout.row_major(shape, pad={2: 32}),
}


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def contractions() -> Iterator[Case]:
    """Matrix products."""
    for b, m, k, n in ((1, 37, 53, 41), (2, 12, 16, 16), (2, 13, 24, 36)):
        shapes = (b, m, k), (b, k, n), (b, m, n)
        inputs = [_normal(*shape, seed=i) for i, shape in enumerate(shapes[:2])]
        spec = make_spec("contraction", inputs, shapes[2:], {"alpha": 0.5})
        for name, make in CUBES.items():
            yield Case(f"{m}x{k}x{n} {name}", spec, tuple(make(s) for s in shapes), inputs)
        mixed = CUBES["row-major"](shapes[0]), CUBES["transposed"](shapes[1]), CUBES["r-tile 4x4"](shapes[2])
        yield Case(f"{m}x{k}x{n} mixed", spec, mixed, inputs)


def epilogues() -> Iterator[Case]:
    """Products that run a program on their sums."""
    for name in ("residual", "dropout", "update"):
        for shape in ((1, 37, 53, 41), (2, 12, 16, 16)):
            spec, layouts = case(name, shape)
            yield Case(f"{name} {shape}", spec, layouts, arrays(spec, layouts))
        spec, layouts = case(name, (2, 13, 19, 23), a=CUBES["r-tile 4x4"], b=CUBES["r-tile 4x4"])
        yield Case(f"{name} tiled", spec, layouts, arrays(spec, layouts))


def convolutions() -> Iterator[Case]:
    """Convolutions and their gradients."""
    convs = {
        "3x3": Conv(2, 5, 7, (7, 9), (3, 3), padding=(1, 1)),
        "strided": Conv(1, 8, 12, (9, 8), (3, 2), stride=(2, 2), padding=(1, 0)),
        "depthwise": Conv(1, 6, 6, (7, 5), (3, 3), padding=(1, 1), groups=6),
        "grouped": Conv(1, 8, 12, (6, 5), (2, 2), groups=2),
    }
    for kind in ("conv", "conv_grad_input", "conv_grad_weight"):
        for name, conv in convs.items():
            spec = conv.spec(kind)
            for layout in ("nchw", "nhwc", "nc4hw4") if name == "3x3" else ("nchw", "nhwc"):
                made = tuple(CONV_LAYOUTS[layout](s) for s in spec.shapes)
                yield Case(f"{kind} {name} {layout}", spec, made, inputs_of(spec))


def attentions() -> Iterator[Case]:
    """Attention and its gradient."""
    heads = {"row-major": Layout.row_major, "heads": heads_apart, "turned": turned, "r-tile": tiled}
    heads["panels"] = padded_panels
    for b, m, n, d, e in ((2, 13, 19, 12, 12), (1, 37, 41, 9, 7), (1, 70, 68, 40, 36)):
        mask = _normal(b, m, n, seed=3)
        for attrs, extras in (({}, []), ({"score": ADD}, [mask])):
            forward = forward_case((b, m, n, d, e), extras, attrs)
            for spec, inputs in (forward, gradient_case(forward)):
                first = 3 if spec.kind == "attention" else 7
                own = {0, 1, 2, spec.inputs} | ({3, 6, spec.inputs + 1, spec.inputs + 2} if first == 7 else set())
                for name, make in heads.items():
                    if m == 70 and name != "heads":
                        continue
                    layouts = tuple(make(s) if p in own else Layout.row_major(s) for p, s in enumerate(spec.shapes))
                    yield Case(f"{spec.kind} {m}x{n}x{d} {name}{' mask' * bool(extras)}", spec, layouts, inputs)


def pointwise() -> Iterator[Case]:
    """Pointwise programs, relayouts and updates in place."""
    for shape in ((37, 41), (16, 24)):
        x, y = _normal(*shape), _normal(*shape, seed=1)
        row = np.broadcast_to(_normal(1, shape[1], seed=2), shape)
        add = Expr((("add", ("x", 0), ("x", 1)), ("mul", ("t", 0), ("x", 2))), (("t", 1),))
        for name, make in MATRICES.items():
            one = Layout.row_major((1, shape[1])).expand(shape)
            spec = make_spec("pointwise", [x, y, row], [shape], {"expr": add})
            yield Case(f"add {shape} {name}", spec, (make(shape), make(shape), one, make(shape)), [x, y, row])
            for other in MATRICES:
                if other != name:
                    spec = make_spec("pointwise", [x], [shape], {"expr": IDENTITY})
                    yield Case(f"relayout {shape} {name} to {other}", spec, (make(shape), MATRICES[other](shape)), [x])
    shape = 13, 37
    inputs = [_normal(*shape, seed=i) for i in range(5)]
    inputs[3], inputs[4] = np.abs(inputs[3]), np.full(shape, 1e-2, np.float32)
    spec = make_spec("pointwise", inputs, [shape] * 3, {"expr": ADAM}, inplace=((0, 0), (1, 2), (2, 3)))
    for name in ("row-major", "r-tile 4x4"):
        layout, scalar = MATRICES[name](shape), Layout.row_major(()).expand(shape)
        yield Case(f"update {name}", spec, (*[layout] * 4, scalar, *[layout] * 3), inputs)


def reductions() -> Iterator[Case]:
    """Sums over an axis, and layer norm's affine gradients."""
    for shape in ((37, 71), (70, 37), (3, 200)):
        x, dy = _normal(*shape), _normal(*shape, seed=1)
        rows = [_normal(shape[0], seed=2), _normal(shape[0], seed=3)]
        for name, make in MATRICES.items():
            for fn in ("sum",):
                spec = make_spec("reduce", [x], [shape[:1]], {"fn": fn})
                yield Case(f"{fn} {shape} {name}", spec, (make(shape), Layout.row_major(shape[:1])), [x])
            spec = make_spec("layer_norm_affine", [dy, x, *rows], [shape[1:]] * 2)
            layouts = tuple(make(s) if len(s) == 2 else Layout.row_major(s) for s in spec.shapes)
            yield Case(f"affine {shape} {name}", spec, layouts, [dy, x, *rows])


def rows() -> Iterator[Case]:
    """Softmax, layer norm and their gradients."""
    for kind in ("softmax", "softmax_grad", "log_softmax", "log_softmax_grad", "layer_norm", "layer_norm_grad"):
        for m, k in ((13, 37), (5, 64), (37, 18)):
            spec, inputs = rows_case(kind, m, k)
            for name, make in MATRICES.items():
                layouts = tuple(make(s) if len(s) == 2 else Layout.row_major(s) for s in spec.shapes)
                yield Case(f"{kind} {m}x{k} {name}", spec, layouts, inputs)
    spec, inputs = rows_case("softmax", 3, 5000)
    yield Case("softmax 3x5000", spec, tuple(Layout.row_major(s) for s in spec.shapes), inputs)


def losses() -> Iterator[Case]:
    """Losses over classes and their gradients."""
    for n, c in ((13, 37), (5, 64), (2, 2501)):
        target = np.random.default_rng(0).integers(0, c, n).astype(np.int32)
        target[0], target[1] = c - 1, IGNORED
        for spec, inputs in loss_cases(n, c, target):
            for name in ("row-major", "transposed", "r-tile 4x4") if c < 100 else ("row-major",):
                layouts = tuple(MATRICES[name](s) if len(s) == 2 else Layout.row_major(s) for s in spec.shapes)
                yield Case(f"{spec.kind} {n}x{c} {name}", spec, layouts, inputs)


def gathers() -> Iterator[Case]:
    """Rows of a table by id."""
    for d in (37, 24):
        table, ids = _normal(11, d), np.random.default_rng(1).integers(0, 11, 29).astype(np.int32)
        spec = make_spec("gather", [table, ids], [(29, d)])
        for name, make in MATRICES.items():
            layouts = tuple(make(s) if len(s) == 2 else Layout.row_major(s) for s in spec.shapes)
            yield Case(f"gather {d} {name}", spec, layouts, [table, ids])


def scatters() -> Iterator[Case]:
    """Rows added to a table by id."""
    for d, targets, n in ((37, 11, 29), (24, 3, 29), (16, 150, 29), (9, 5, 1100), (8, 40, 2100)):
        dy, ids = _normal(n, d), np.random.default_rng(1).integers(0, targets, n).astype(np.int32)
        spec = make_spec("scatter_add", [dy, ids], [(targets, d)], {"padding_idx": 1})
        for name, make in MATRICES.items():
            layouts = tuple(make(s) if len(s) == 2 else Layout.row_major(s) for s in spec.shapes)
            if n > 1000 and name not in ("row-major", "r-tile 4x4"):
                continue
            yield Case(f"scatter {n}x{d} to {targets} {name}", spec, layouts, [dy, ids])


def concats() -> Iterator[Case]:
    """Parts with gaps of zeros between them."""
    cubes = {**CUBES}
    for starts, total in (((1, 8), 17), ((0, 4), 12)):
        parts = [_normal(3, 4, 20), _normal(3, 5, 20, seed=1)]
        spec = make_spec("concat", parts, [(3, total, 20)], {"starts": starts})
        for name, make in cubes.items():
            yield Case(f"concat {starts} {name}", spec, tuple(make(s) for s in spec.shapes), parts)
    spec = make_spec("iota", [], [(37,)], {"start": 2, "step": 3}, ["int32"])
    yield Case("iota", spec, (Layout.row_major((37,)),), [])


def images() -> Iterator[Case]:
    """Products that read texels."""
    for b, m, k, n in ((1, 36, 52, 40), (2, 13, 24, 36)):
        shapes = (b, m, k), (b, k, n), (b, m, n)
        inputs = [_normal(*shape, seed=i) for i, shape in enumerate(shapes[:2])]
        spec = make_spec("contraction", inputs, shapes[2:])
        for name, make in (("row-major", Layout.row_major), ("columns", columns), ("r-tile", CUBES["r-tile 4x4"])):
            yield Case(f"{m}x{k}x{n} {name}", spec, tuple(make(s) for s in shapes), inputs)


def quantised_rows() -> Iterator[Case]:
    """Rows quantised and back, and look-ups."""
    for fmt in ("int8", "nf4:16", "int4:24"):
        for shape in ((13, 67), (5, 48)):
            x, ids = _normal(*shape), np.random.default_rng(1).integers(0, shape[0], 19).astype(np.int32)
            words, scales = quantise(x, Format.parse(fmt))
            attrs = {"format": fmt}
            packed = make_spec("quantize", [x], [words.shape, scales.shape], attrs, ["int32", "float32"])
            back = make_spec("dequantize", [words, scales], [shape], attrs)
            rows_ = make_spec("quantized_gather", [words, scales, ids], [(19, shape[1])], attrs)
            for spec, inputs, free in ((packed, [x], 0), (back, [words, scales], 2), (rows_, [words, scales, ids], 3)):
                for name, make in MATRICES.items():
                    layouts = tuple(make(s) if p == free else Layout.row_major(s) for p, s in enumerate(spec.shapes))
                    yield Case(f"{spec.kind} {fmt} {shape} {name}", spec, layouts, inputs)


def quantised_products() -> Iterator[Case]:
    """Products with quantised weights."""
    for fmt, shape, program in (
        ("int8", (37, 53, 41), "plain"),
        ("nf4:64", (12, 136, 24), "residual"),
        ("int4:24", (13, 60, 36), "gelu"),
        ("int8:256", (3, 300, 70), "plain"),
    ):
        spec, inputs = product(shape, fmt, program)
        for name in ("row-major", "transposed", "r-tile 4x4", "column panels", "pitch"):
            yield Case(f"{fmt} {shape} {name}", spec, tuple(layouts_of(spec, name)), inputs)


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "contraction": contractions,
    "epilogue": epilogues,
    "convolution": convolutions,
    "attention": attentions,
    "pointwise": pointwise,
    "reduce": reductions,
    "rows": rows,
    "losses": losses,
    "gather": gathers,
    "scatter": scatters,
    "concat": concats,
    "quantised rows": quantised_rows,
    "quantised product": quantised_products,
}


def kernels_of_case(one: Case, limits: DeviceLimits, per_name: int = 1) -> list[Kernel]:
    """The first variants of each name that accept the case's layouts."""
    found: dict[str, list[Kernel]] = {}
    for kernel in kernels_for(one.spec, one.layouts, limits):
        own = found.setdefault(kernel.variant.name, [])
        if len(own) < per_name:
            own.append(kernel)
    return [kernel for own in found.values() for kernel in own]


def texel_kernels(one: Case) -> list[Kernel]:
    """The variants that read an operand through an image, and really do."""
    return [k for k in kernels_of_case(one, replace(PHONE, compute_units=4)) if k.launches[0].images]
