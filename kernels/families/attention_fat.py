"""Attention on CPUs: one fat work item for a block of rows of a head, and for a whole head's gradient.

Everything is packed into private memory first (``cl/attention_fat.cl``), so that any layout is accepted and layouts
differ in how they are packed alone: by vectors along the features, along the rows, or value by value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from kernels.families.attention_form import Form, Reader, programs_c, reader
from kernels.nest import Access, Bound, Clamp, Index, Loop, Nest, Phase, at, var
from kernels.spec import DeviceLimits, Kernel, KernelVariant, Launch, OpSpec, Scratch
from layoutopt.layout import Layout

__all__ = ["build_fat", "fat_variants"]

Define = tuple[str, str | int | float]

# Row tiles by lanes of a vector: (rows, vectors of keys). They leave a few of 32 or 16 registers to what is multiplied.
_TILES = {16: ((8, 2), (4, 4)), 8: ((8, 1), (4, 2)), 4: ((4, 2), (4, 1))}
_ROWS = (128, 64, 32)
_BLOCKS = (64, 32)
"""Keys at once (and rows at once backward): what is packed of them stays near; smaller ones are masked as a whole."""
_GROUPS_PER_UNIT = 4
_SHORT = 2
"""A vector of this many times more lanes than there are keys is too wide."""


def fat_variants(spec: OpSpec, limits: DeviceLimits) -> list[KernelVariant]:
    """Tiles of the device's vectors and blocks; forward a work item takes as many rows as leave enough items."""
    form = Form.of(spec)
    v = next((w for w in (16, 8) if w <= limits.simd_width), 4)
    while v > 4 and v >= _SHORT * form.n:
        v //= 2
    rows = [bm for bm in _ROWS if form.b * -(-form.m // bm) >= _GROUPS_PER_UNIT * limits.compute_units]
    out = []
    for number, (mr, nv) in enumerate(_TILES[v]):
        for block in _BLOCKS[: 1 if number else 2]:
            most = block if spec.kind != "attention" else rows[0] if rows else _ROWS[-1]
            even = -(-form.m // -(-form.m // most))  # rows of blocks that are alike
            bn = max(nv * v, block // (nv * v) * nv * v)
            params = {"bm": -(-even // mr) * mr, "bn": bn, "mr": mr, "nv": nv, "v": v}
            out.append(KernelVariant("attention", "fat", tuple(params.items())))
    return list(dict.fromkeys(out))


def build_fat(variant: KernelVariant, spec: OpSpec, layouts: tuple[Layout, ...]) -> Kernel:
    """The kernel; any buffer layouts are accepted."""
    form, p = Form.of(spec), dict(variant.params)
    own = (0, form.outputs) if spec.kind == "attention" else (0, 3, 6, form.outputs)
    met = (1, 2) if spec.kind == "attention" else (1, 2, form.outputs + 1, form.outputs + 2)
    readers = [(x, reader(layouts[x], p["v"], p["bm"])) for x in own]
    readers += [(x, reader(layouts[x], p["v"], p["bn"])) for x in met]
    launch, scratch = _launch(variant, spec, tuple(readers))
    return Kernel(spec, variant, layouts, (launch,), scratch)


_B = var("b")


def _matrix(
    position: int, how: Reader, loops: Sequence[Loop], rows: tuple[Index, int], features: int, write: bool = False
) -> Phase:
    """Each element of some rows once; the last vector is clipped at the shape: the body does its rest one by one."""
    first, count = rows
    down, along = (how.width, 1) if how.axis == 1 else (1, how.width)
    own = (Loop("i", -(-count // down)), Loop("f", -(-features // along)))
    access = at(position, _B, first + var("i", down), var("f", along), width=how.width, axis=how.axis, write=write)
    return Phase((*loops, *own), (access,))


def _c_names(name: str, how: Reader, widest: int, write: bool = False) -> Iterator[Define]:
    """How the body reads or writes a matrix: ``NAME_GET``, ``_PUT`` (into private memory), ``_SET``, ``_TAKE``."""
    w = how.width
    yield f"{name}_W", w
    yield f"{name}_AXIS", how.axis
    if write:
        yield f"{name}_SET(v,b,r,f)", f"{name}_STORE{w}(v,b,r,f)"
        yield f"{name}_TAKE(p)", f"(*(const float{w if w > 1 else ''} *)(p))"
    else:
        yield f"{name}_GET(b,r,f)", f"{name}_{f'LOAD{w}' if w > 1 else 'AT'}(b,r,f)"
        yield f"{name}_VECTOR(b,r,f)", f"{name}_LOAD{w}(b,r,f)" if w == widest else f"((float{widest})(0.0f))"
        yield f"{name}_PUT(v,p)", f"(*(float{w if w > 1 else ''} *)(p)=(v))"


def _chunk(vectors: int, most: int) -> int:
    """Vectors of features done at once: they divide them all."""
    return next(n for n in range(min(vectors, most), 0, -1) if vectors % n == 0)


@lru_cache(maxsize=1 << 12)
def _launch(
    variant: KernelVariant, spec: OpSpec, readers: tuple[tuple[int, Reader], ...]
) -> tuple[Launch, tuple[Scratch, ...]]:
    """The same over all layouts that are read alike."""
    made = _forward if spec.kind == "attention" else _gradient
    return made(variant, Form.of(spec), dict(readers))


@dataclass(frozen=True)
class _Rows:
    """Rows of blocks, done in tiles of ``mr``: the last tile of the last block does the last row again.

    Attributes:
        blocks, bm: how many, and of how many rows.
        m: rows in all.
        mr: of a tile.
    """

    blocks: int
    bm: int
    m: int
    mr: int

    @property
    def again(self) -> int:
        """Rows of the last tile that do not exist."""
        return -(self.m - (self.blocks - 1) * self.bm) % self.mr

    def read(self, access: Callable[[Index, tuple[Bound, ...]], Access]) -> tuple[Access, tuple[Access, ...]]:
        """Row ``i`` of block ``r``, as ``access`` reads a row under a condition; and the last one for those beyond."""
        row = var("r", self.bm) + var("i")
        last = (Bound(var("i"), 1), Bound(-var("r"), 2 - self.blocks))
        return access(row, (Bound(row, self.m),)), (access(Index(self.m - 1), last),) * self.again


def _extras(
    form: Form,
    names: Sequence[str],
    loops: Sequence[Loop],
    rows: _Rows,
    key: Index,
    width: int,
    in_tiles: Sequence[str],
) -> Phase:
    """Each program's loads of its operands, a vector of keys at a time, as if no block was left out.

    ``in_tiles``: the programs that run on whole tiles of rows.
    """
    accesses: list[Access] = []
    border: list[Access] = []
    for name, position in [(own, p) for own in names for p in form.read([own])]:

        def one(row: Index, when: tuple[Bound, ...], position: int = position) -> Access:
            inside = (Bound(key, form.n - width + 1),)
            clamp = (Clamp(2, form.n - 1),)
            return at(position, _B, row, key, width=width, axis=2, clamps=clamp, when=when, vector_when=inside)

        access, again = rows.read(one)
        accesses.append(access)
        border += again if name in in_tiles else ()
    return Phase(tuple(loops), tuple(accesses), 0, tuple(border))


def _sizes(variant: KernelVariant, form: Form, names: Sequence[str]) -> dict[str, str | int | float]:
    p = dict(variant.params)
    v, bn = p["v"], p["bn"]
    padded_d, padded_e = -(-form.d // v) * v, -(-form.e // v) * v
    more = "".join(f", E{form.extras.index(x)}_ARG" for x in form.read(names))
    return {
        "W": v,
        "NV": p["nv"],
        "MR": p["mr"],
        "BM": p["bm"],
        "BN": bn,
        "MM": form.m,
        "NN": form.n,
        "DN": form.d,
        "EN": form.e,
        "DP": padded_d,
        "EP": padded_e,
        "ND": _chunk(padded_d // v, p["nv"]),
        "NE": _chunk(padded_e // v, p["nv"]),
        "ALPHA": form.alpha,
        "SKIP": int("MASK" in form.programs()),
        "MORE_ARGS": more,
        **({"DROPS": 1} if "DROP" in form.programs() else {}),
    }


def _forward(variant: KernelVariant, form: Form, how: dict[int, Reader]) -> tuple[Launch, tuple[Scratch, ...]]:
    names = ("MASK", "SCORE", "DROP")
    sizes = _sizes(variant, form, names)
    bm, bn, mr, v = (int(sizes[name]) for name in ("BM", "BN", "MR", "W"))
    blocks, steps, o = -(-form.m // bm), -(-form.n // bn), form.outputs
    keys = Loop("n", steps)
    row, rows = var("r", bm), min(bm, form.m)
    flops = mr * bn * (2 * form.d + 2 * int(sizes["EP"]) + form.flops_each(names))
    phases = [
        _matrix(0, how[0], (), (row, rows), form.d),
        _matrix(1, how[1], (keys,), (var("n", bn), min(bn, form.n)), form.d),
        _matrix(2, how[2], (keys,), (var("n", bn), min(bn, form.n)), form.e),
        _extras(
            form,
            names,
            (keys, Loop("i", rows), Loop("w", bn // v)),
            _Rows(blocks, bm, form.m, mr),
            var("n", bn) + var("w", v),
            v,
            names,
        ),
        Phase((keys, Loop("i", -(-rows // mr))), (), flops),
        _matrix(o, how[o], (), (row, rows), form.e, write=True),
        Phase((Loop("i", rows),), tuple(at(o + s, _B, row + var("i"), write=True) for s in (1, 2))),
    ]
    nest = Nest(
        (Loop("b", form.b, "group"), Loop("r", blocks, "group")), tuple(p for p in phases if p.accesses or p.flops)
    )
    extras = [(f"E{form.extras.index(p)}", p) for p in form.read(names)]
    operands = (("Q", 0), ("K", 1), ("U", 2), *extras, ("O", o), ("PEAK", o + 1), ("MASS", o + 2))
    defines = [("FORWARD", 1), *sizes.items()]
    defines += [x for name, p in (("Q", 0), ("K", 1), ("U", 2)) for x in _c_names(name, how[p], v)]
    defines += _c_names("O", how[o], v, write=True)
    launch = Launch(
        "attention_fat.cl",
        "attention_fat",
        operands,
        nest,
        (blocks, form.b),
        (1, 1),
        tuple(defines),
        programs_c(form, names, v),
    )
    return launch, ()


def _gradient(variant: KernelVariant, form: Form, how: dict[int, Reader]) -> tuple[Launch, tuple[Scratch, ...]]:
    names = ("MASK", "SCORE", "DROP", "GRAD")
    sizes = _sizes(variant, form, names)
    bm, bn, mr, v, dp, ep = (int(sizes[name]) for name in ("BM", "BN", "MR", "W", "DP", "EP"))
    sizes |= {"BETA": form.beta, "MP": max(dp, ep)} | ({"GRADED": 1} if "GRAD" in form.programs() else {})
    total, delta, out = form.outputs + 3, form.outputs + 4, form.outputs
    blocks, steps, most, width = -(-form.m // bm), -(-form.n // bn), min(bm, form.m), min(bn, form.n)
    rows, keys, every = Loop("r", blocks), Loop("n", steps), Loop("i", form.m)
    row, key, line = var("r", bm), var("n", bn), var("i")
    tiles = Loop("t", -(-most // mr))
    flops = mr * bn * (2 * (2 * form.d + form.e + dp + ep) + form.flops_each(names))
    lines = _Rows(blocks, bm, form.m, mr)

    def summed(row: Index, when: tuple[Bound, ...]) -> Access:
        return at(total, _B, row, var("f", v), width=v, axis=2, when=(*when, Bound(-var("n"), 0)))

    sums, again = lines.read(summed)
    phases = [
        _matrix(3, how[3], (), (Index(), form.m), form.e),
        _matrix(6, how[6], (), (Index(), form.m), form.e),
        Phase((every,), (at(delta, _B, line, write=True),)),
        *(_matrix(p, how[p], (keys,), (key, width), f) for p, f in ((1, form.d), (2, form.e), (1, form.d))),
        Phase((keys, every), tuple(at(p, _B, line) for p in (4, 5, delta))),
        *(_matrix(p, how[p], (keys, rows), (row, most), f) for p, f in ((0, form.d), (6, form.e))),
        _extras(
            form,
            names,
            (keys, rows, Loop("i", most), Loop("w", bn // v)),
            lines,
            key + var("w", v),
            v,
            ("MASK",),
        ),
        Phase((keys, rows, tiles), (), flops),
        Phase((keys, rows, Loop("i", most), Loop("f", dp // v)), (sums, replace(sums, write=True, when=())), 0, again),
        _matrix(out + 1, how[out + 1], (keys,), (key, width), form.d, write=True),
        _matrix(out + 2, how[out + 2], (keys,), (key, width), form.e, write=True),
        Phase((rows, Loop("i", most), Loop("f", dp // v)), (replace(sums, when=()),)),
        _matrix(out, how[out], (rows,), (row, most), form.d, write=True),
    ]
    nest = Nest((Loop("b", form.b, "group"),), tuple(p for p in phases if p.accesses or p.flops))
    extras = [(f"E{form.extras.index(p)}", p) for p in form.read(names)]
    inputs = (("Q", 0), ("K", 1), ("U", 2), ("O", 3), ("PEAK", 4), ("MASS", 5), ("G", 6))
    outputs = (("DQ", out), ("DK", out + 1), ("DU", out + 2))
    defines = [("GRADIENT", 1), *sizes.items()]
    defines += [x for name, p in inputs if p in how for x in _c_names(name, how[p], v)]
    defines += [x for name, p in outputs for x in _c_names(name, how[p], v, write=True)]
    defines += [("SUM_VECTOR(b,r,f)", f"SUM_LOAD{v}(b,r,f)"), ("SUM_SET(v,b,r,f)", f"SUM_STORE{v}(v,b,r,f)")]
    launch = Launch(
        "attention_fat.cl",
        "attention_fat_grad",
        (*inputs, *extras, *outputs, ("SUM", total), ("DELTA", delta)),
        nest,
        (form.b,),
        (1,),
        tuple(defines),
        programs_c(form, names, v),
    )
    scratch = (
        Scratch("float32", Layout.row_major((form.b, form.m, dp))),
        Scratch("float32", Layout.row_major((form.b, form.m))),
    )
    return launch, scratch
