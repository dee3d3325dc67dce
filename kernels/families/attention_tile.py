"""Attention on GPUs: a work group owns a block of rows, or of keys, of a head and walks the others.

See ``cl/attention_tile.cl``. The gradient is two launches, without atomics: the owners of rows make dQ (and, on the
way, each row's sum of output times its gradient), the owners of keys dK and dV. Both make the scores again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kernels.families.attention_form import Form, Reader, programs_c
from kernels.nest import NEVER, Bound, Clamp, Index, Loop, Nest, Phase, Term, at, var
from kernels.spec import DeviceLimits, Kernel, KernelVariant, Launch, OpSpec, Scratch
from layoutopt.layout import Layout

__all__ = ["build_tile", "tile_variants"]

Define = tuple[str, str | int | float]

# (bo, bx, to, tx, chunk): the group's own positions and those it meets at once, an item's share of each, features at
# once (0: all). Items: bo/to × bx/tx, of which 8 × 4 neighbours are a wave of 32.
_BLOCKS = (
    (64, 32, 8, 4, 0),
    (64, 32, 4, 4, 0),
    (32, 32, 4, 4, 0),
    (32, 64, 4, 4, 0),
    (128, 32, 8, 4, 0),
    (64, 32, 8, 4, 32),
    (64, 64, 4, 4, 32),
    (32, 32, 2, 2, 32),
)
_SMALLEST = (16, 16, 2, 2, 16)
"""Fits where nothing else does."""


def tile_variants(spec: OpSpec, limits: DeviceLimits) -> list[KernelVariant]:
    """Blocks that fit the shape and the device's local memory."""
    form = Form.of(spec)
    out: list[KernelVariant] = []
    for block in (*_BLOCKS, _SMALLEST):
        cut = _Cut.of(form, block)
        if cut.items > limits.max_work_group_size or cut.local_bytes(spec.kind) > limits.local_mem_bytes:
            continue
        reach, chunk = max(cut.bo, cut.bx), block[-1]
        wasted = reach > 32 and reach >= 2 * max(form.m, form.n)
        if out and (wasted or block == _SMALLEST or (chunk and not cut.chunked)):
            continue
        names = ("bo", "bx", "to", "tx", "chunk")
        out.append(KernelVariant("attention", "tile", tuple(zip(names, block, strict=True))))
    return out


def _odd_quarters(width: int) -> int:
    """The least stride of rows of local memory whose neighbours start in different banks: an odd number of vectors."""
    return width if width // 4 % 2 else width + 4


@dataclass(frozen=True)
class _Cut:
    """Sizes of a variant for a shape; names as in the body."""

    bo: int
    bx: int
    to: int
    tx: int
    cd: int
    ce: int
    chunks_d: int
    chunks_e: int

    @staticmethod
    def of(form: Form, block: Sequence[int]) -> _Cut:
        """From a variant's parameters."""
        bo, bx, to, tx, chunk = block
        d, e = -(-form.d // 4) * 4, -(-form.e // 4) * 4
        cd, ce = (chunk, chunk) if chunk else (d, e)
        return _Cut(bo, bx, to, tx, cd, ce, -(-d // cd), -(-e // ce))

    @property
    def io(self) -> int:
        """Items along the own positions."""
        return self.bo // self.to

    @property
    def ix(self) -> int:
        """Items along the others."""
        return self.bx // self.tx

    @property
    def items(self) -> int:
        """Work items of a group."""
        return self.io * self.ix

    @property
    def chunked(self) -> bool:
        """Whether features come in several chunks."""
        return self.chunks_d > 1 or self.chunks_e > 1

    def local_bytes(self, kind: str) -> int:
        """Local memory of the larger launch."""
        ds, es, ws = _odd_quarters(self.cd), _odd_quarters(self.ce), _odd_quarters(self.bx)
        if kind == "attention":
            floats = self.bo * ds + self.bx * max(ds, es) + self.bo * ws + self.ix * self.bo
        else:
            sides = max(ds, es) if self.chunked else ds + es
            rows = (self.bo + self.bx) * sides + self.bo * ws + self.ix * self.bo
            keys = (self.bo + self.bx) * sides + 2 * self.bo * ws + 3 * self.bx
            floats = max(rows, keys)
        return 4 * (floats + 2)

    def defines(self, form: Form, names: Sequence[str]) -> dict[str, str | int | float]:
        """Constants of the body."""
        programs = form.programs()
        return {
            "BO": self.bo,
            "BX": self.bx,
            "TO": self.to,
            "TX": self.tx,
            "IO": self.io,
            "IX": self.ix,
            "ITEMS": self.items,
            "CD": self.cd,
            "CE": self.ce,
            "CHUNKS_D": self.chunks_d,
            "CHUNKS_E": self.chunks_e,
            "CHUNKED": int(self.chunked),
            "DS": _odd_quarters(self.cd),
            "ES": _odd_quarters(self.ce),
            "WS": _odd_quarters(self.bx),
            "FD": self.per_item(self.cd),
            "FE": self.per_item(self.ce),
            "MM": form.m,
            "NN": form.n,
            "DN": form.d,
            "EN": form.e,
            "ALPHA": form.alpha,
            "BETA": form.beta,
            "SKIP": int("MASK" in programs),
            "MORE_ARGS": "".join(f", E{form.extras.index(p)}_ARG" for p in form.read(names)),
            **({"DROPS": 1} if "DROP" in programs else {}),
            **({"GRADED": 1} if "GRAD" in programs and "GRAD" in names else {}),
        }

    def per_item(self, features: int) -> int:
        """Vectors of features of an item."""
        return -(-features // (4 * self.ix))

    # ---- indices of an item -----------------------------------------------------------------------------------------

    @property
    def own(self) -> Index:
        """An item's first own position in the block."""
        return Index(0, (Term("l", 1, 1, 8), Term("l", 8, 32, self.io // 8))) if self.io >= 8 else Index()

    @property
    def other(self) -> Index:
        """Its first other position, and its first vector of features."""
        return Index(0, (Term("l", 1, 8, 4), Term("l", 4, 32 * (self.io // 8))))


def build_tile(variant: KernelVariant, spec: OpSpec, layouts: tuple[Layout, ...]) -> Kernel:
    """The kernel; any buffer layouts are accepted."""
    form = Form.of(spec)
    forward = spec.kind == "attention"
    read = (0, 1, 2) if forward else (0, 1, 2, 6)
    written = range(form.outputs, form.outputs + (1 if forward else 3))
    how = tuple((p, _loader(layouts[p])) for p in read) + tuple((p, _storer(layouts[p])) for p in written)
    launches, scratch = _launches(variant, spec, how)
    return Kernel(spec, variant, layouts, launches, scratch)


@lru_cache(maxsize=1 << 14)
def _loader(layout: Layout) -> Reader:
    if layout.shape[2] % 4 == 0 and layout.vectorizes(2, 4):
        return Reader(4, 2)
    strides = {axis: modes[-1].stride if (modes := layout.axis_modes(axis)) else 0 for axis in (1, 2)}
    return Reader(1, 1 if 0 < strides[1] < strides[2] else 2)


@lru_cache(maxsize=1 << 14)
def _storer(layout: Layout) -> Reader:
    return Reader(4 if layout.shape[2] % 4 == 0 and layout.vectorizes(2, 4) else 1, 2)


_B = var("b")


def _power(n: int) -> int:
    """The least power of two that is not below."""
    return 1 << max(n - 1, 0).bit_length()


class _Builder:
    """The launches of a variant: defines for the body, the same accesses for the nest."""

    def __init__(self, variant: KernelVariant, form: Form, how: dict[int, Reader]) -> None:
        self.form, self.how = form, how
        self.cut = _Cut.of(form, [value for _, value in variant.params])

    # ---- loads into local memory ------------------------------------------------------------------------------------

    def _lanes(self, how: Reader, rows: int, features: int) -> int:
        if how.axis == 1:
            return min(self.cut.items, _power(rows))
        return min(self.cut.items, max(_power(-(-features // how.width)), self.cut.items // rows))

    def _stage(
        self, position: int, rows: int, first: Index, features: int, chunks: int, loops: Sequence[Loop]
    ) -> Phase:
        """A block of ``rows`` from ``first`` on, all its features."""
        how, items = self.how[position], self.cut.items
        lanes = self._lanes(how, rows, features)
        step = items // lanes
        chunk = var("c", features) if chunks > 1 else Index()
        if how.axis == 1:
            row = first + var("l", 1, 1, lanes) + var("j", lanes)
            feature = chunk + var("l", 1, lanes) + var("i", step)
            counts = -(-features // step), -(-rows // lanes)
        else:
            row = first + var("l", 1, lanes) + var("i", step)
            feature = chunk + var("l", how.width, 1, lanes) + var("j", lanes * how.width)
            counts = -(-rows // step), -(-features // (lanes * how.width))
        access = at(position, _B, row, feature, width=how.width, axis=2)
        own = (Loop("c", chunks),) if chunks > 1 else ()
        return Phase((*loops, *own, Loop("i", counts[0]), Loop("j", counts[1])), (access,))

    def _load_names(self, name: str, position: int, rows: int, features: int) -> Iterator[Define]:
        how = self.how[position]
        yield f"{name}_W", how.width
        yield f"{name}_AXIS", how.axis
        yield f"{name}_LANES", self._lanes(how, rows, features)
        yield f"{name}_T", "float4" if how.width == 4 else "float"
        yield f"{name}_GET(b,r,f)", f"{name}_LOAD4(b,r,f)" if how.width == 4 else f"{name}_AT(b,r,f)"

    # ---- stores, programs' operands, arithmetic ---------------------------------------------------------------------

    def _store(self, position: int, features: int, chunks: int) -> Phase:
        """What an item has of the own positions' results."""
        cut, how = self.cut, self.how[position]
        chunk = var("c", features) if chunks > 1 else Index()
        accesses = tuple(
            at(
                position,
                _B,
                self._own(i),
                chunk + _scaled(cut.other, 4) + (4 * j * cut.ix + u),
                width=how.width,
                axis=2,
                write=True,
            )
            for i in range(cut.to)
            for j in range(cut.per_item(features))
            for u in range(0, 4, how.width)
        )
        return Phase((Loop("c", chunks),) if chunks > 1 else (), accesses)

    def _store_names(self, name: str, position: int) -> Define:
        if self.how[position].width == 4:
            return f"{name}_PUT(v,b,r,f,n)", f"{name}_STORE4(v,b,r,f)"
        return f"{name}_PUT(v,b,r,f,n)", f"PUT_EACH({name},v,b,r,f,n)"

    def _own(self, i: int = 0) -> Index:
        return var("o", self.cut.bo) + self.cut.own + i * self.cut.io

    def _other(self, j: int = 0) -> Index:
        return var("x", self.cut.bx) + self.cut.other + j * self.cut.ix

    @property
    def _last_row(self) -> tuple[Clamp]:
        """The last row stands for those beyond."""
        return (Clamp(1, self.form.m - 1),)

    def _extras(self, names: Sequence[str], walk: Loop, own_rows: bool) -> Phase:
        cut, accesses = self.cut, []
        for position in (p for name in names for p in self.form.read([name])):
            for i in range(cut.to):
                for j in range(cut.tx):
                    row, key = (self._own(i), self._other(j)) if own_rows else (self._other(j), self._own(i))
                    accesses.append(at(position, _B, row, key, clamps=(*self._last_row, Clamp(2, self.form.n - 1))))
        return Phase((walk,), tuple(accesses))

    def _arithmetic(self, walk: Loop, names: Sequence[str], products: int, sums: int) -> Phase:
        """Per block: ``products`` and ``sums`` are features in products of scores and in sums over the others."""
        cut = self.cut
        tile = cut.to * cut.tx
        return Phase((walk,), (), 2 * tile * (products + sums) + tile * self.form.flops_each(names))

    def _launch(
        self,
        entry: str,
        defines: dict[str, str | int | float],
        operands: Sequence[tuple[str, int]],
        more: Sequence[Define],
        phases: Sequence[Phase],
        own: int,
        names: Sequence[str],
    ) -> Launch:
        cut = self.cut
        blocks = -(-own // cut.bo)
        grid = Loop("b", self.form.b, "group"), Loop("o", blocks, "group"), Loop("l", cut.items, "item")
        nest = Nest(grid, tuple(p for p in phases if p.accesses or p.flops))
        return Launch(
            "attention_tile.cl",
            entry,
            tuple(operands),
            nest,
            (blocks * cut.items, self.form.b),
            (cut.items, 1),
            (*defines.items(), *more),
            programs_c(self.form, names, 1),
        )

    def _extra_operands(self, names: Sequence[str]) -> list[tuple[str, int]]:
        return [(f"E{self.form.extras.index(p)}", p) for p in self.form.read(names)]

    # ---- the launches -----------------------------------------------------------------------------------------------

    def forward(self) -> Launch:
        """Rows' owners: output, maxima and sums."""
        form, cut, names = self.form, self.cut, ("MASK", "SCORE", "DROP")
        walk, o = Loop("x", -(-form.n // cut.bx)), form.outputs
        again = [walk] if cut.chunks_d > 1 else []
        leader = _scaled(cut.other, form.m)  # one item a row: the others are beyond the last
        phases = [
            self._stage(0, cut.bo, var("o", cut.bo), cut.cd, cut.chunks_d, again),
            self._stage(1, cut.bx, var("x", cut.bx), cut.cd, cut.chunks_d, (walk,)),
            self._extras(names, walk, True),
            self._arithmetic(walk, names, cut.cd * cut.chunks_d, cut.ce * cut.chunks_e),
            self._stage(2, cut.bx, var("x", cut.bx), cut.ce, cut.chunks_e, (walk,)),
            self._store(o, cut.ce, cut.chunks_e),
            Phase(
                (), tuple(at(p, _B, self._own(i) + leader, write=True) for p in (o + 1, o + 2) for i in range(cut.to))
            ),
        ]
        more = [
            ("FORWARD", 1),
            *self._load_names("A", 0, cut.bo, cut.cd),
            *self._load_names("X", 1, cut.bx, cut.cd),
            *self._load_names("Y", 2, cut.bx, cut.ce),
            self._store_names("O", o),
        ]
        extras = self._extra_operands(names)
        operands = [("A", 0), ("X", 1), ("Y", 2), *extras, ("O", o), ("PEAK", o + 1), ("MASS", o + 2)]
        return self._launch("attention_tile", cut.defines(form, names), operands, more, phases, form.m, names)

    def rows(self) -> Launch:
        """Rows' owners: dQ, and each row's sum of output times its gradient."""
        form, cut, names = self.form, self.cut, ("MASK", "SCORE", "DROP", "GRAD")
        walk, out, delta = Loop("x", -(-form.n // cut.bx)), form.outputs, form.outputs + 3
        again = [walk] if cut.chunked else []
        rows = [self._own(i) for i in range(cut.to)]
        leader = _scaled(cut.other, form.m)
        last = self._last_row
        dots = [at(p, _B, row, cut.other + var("f", cut.ix), clamps=last) for p in (6, 3) for row in rows]
        phases = [
            Phase((), tuple(at(p, _B, row, clamps=last) for p in (4, 5) for row in rows)),
            Phase((Loop("f", -(-form.e // cut.ix)),), tuple(dots), 2 * cut.to),
            Phase((), tuple(at(delta, _B, row + leader, write=True) for row in rows)),
            self._stage(0, cut.bo, var("o", cut.bo), cut.cd, cut.chunks_d, again),
            self._stage(6, cut.bo, var("o", cut.bo), cut.ce, cut.chunks_e, again),
            self._stage(1, cut.bx, var("x", cut.bx), cut.cd, cut.chunks_d, (walk,)),
            self._stage(2, cut.bx, var("x", cut.bx), cut.ce, cut.chunks_e, (walk,)),
            self._extras(names, walk, True),
            self._arithmetic(walk, names, cut.cd * cut.chunks_d * 2, cut.ce * cut.chunks_e),
            *([self._stage(1, cut.bx, var("x", cut.bx), cut.cd, cut.chunks_d, (walk,))] if cut.chunked else []),
            self._store(out, cut.cd, cut.chunks_d),
        ]
        more = [
            ("GRAD_ROWS", 1),
            *self._load_names("A", 0, cut.bo, cut.cd),
            *self._load_names("B", 6, cut.bo, cut.ce),
            *self._load_names("X", 1, cut.bx, cut.cd),
            *self._load_names("Y", 2, cut.bx, cut.ce),
            self._store_names("ZD", out),
        ]
        inputs = [("A", 0), ("X", 1), ("Y", 2), ("O", 3), ("PEAK", 4), ("MASS", 5), ("B", 6)]
        operands = [*inputs, *self._extra_operands(names), ("ZD", out), ("DELTA", delta)]
        return self._launch("attention_tile_rows", cut.defines(form, names), operands, more, phases, form.m, names)

    def keys(self) -> Launch:
        """Keys' owners: dK and dV."""
        form, cut, names = self.form, self.cut, ("MASK", "SCORE", "DROP", "GRAD")
        walk, out, delta = Loop("x", -(-form.m // cut.bx)), form.outputs, form.outputs + 3
        again = [walk] if cut.chunked else []
        passes = 2 if cut.chunked else 1
        lane = var("x", cut.bx) + var("l") + var("i", cut.items)
        block = (Bound(var("l") + var("i", cut.items), cut.bx),)
        asked = (
            [at(4, _B, self._other(j), clamps=self._last_row) for j in range(cut.tx) for _ in range(cut.to)]
            if "MASK" in form.programs()
            else []
        )
        phases = [
            self._stage(1, cut.bo, var("o", cut.bo), cut.cd, cut.chunks_d, again),
            self._stage(2, cut.bo, var("o", cut.bo), cut.ce, cut.chunks_e, again),
            Phase(
                (walk, Loop("i", -(-cut.bx // cut.items))),
                tuple(at(p, _B, _within(lane, cut), when=NEVER) for p in (4, 5, delta)),
                0,
                tuple(at(p, _B, lane, clamps=self._last_row, when=block) for p in (4, 5, delta)),
            ),
            Phase((walk,), tuple(asked)),
            *([self._stage(0, cut.bx, var("x", cut.bx), cut.cd, cut.chunks_d, (walk,))] * passes),
            *([self._stage(6, cut.bx, var("x", cut.bx), cut.ce, cut.chunks_e, (walk,))] * passes),
            self._extras(names, walk, False),
            self._arithmetic(walk, names, cut.cd * cut.chunks_d * 2, cut.ce * cut.chunks_e * 2),
            self._store(out + 1, cut.cd, cut.chunks_d),
            self._store(out + 2, cut.ce, cut.chunks_e),
        ]
        more = [
            ("GRAD_KEYS", 1),
            *self._load_names("A", 1, cut.bo, cut.cd),
            *self._load_names("B", 2, cut.bo, cut.ce),
            *self._load_names("X", 0, cut.bx, cut.cd),
            *self._load_names("Y", 6, cut.bx, cut.ce),
            self._store_names("ZD", out + 1),
            self._store_names("ZE", out + 2),
        ]
        inputs = [("X", 0), ("A", 1), ("B", 2), ("PEAK", 4), ("MASS", 5), ("Y", 6)]
        outputs = [("ZD", out + 1), ("ZE", out + 2), ("DELTA", delta)]
        operands = [*inputs, *self._extra_operands(names), *outputs]
        return self._launch("attention_tile_keys", cut.defines(form, names), operands, more, phases, form.n, names)


def _scaled(index: Index, factor: int) -> Index:
    return Index(index.const * factor, tuple(Term(t.loop, t.coef * factor, t.div, t.mod) for t in index.terms))


def _within(lane: Index, cut: _Cut) -> Index:
    """Items beyond the block load nothing: there may be more of them than positions."""
    return lane if cut.items <= cut.bx else lane + var("l", 1 << 20, cut.bx)


@lru_cache(maxsize=1 << 12)
def _launches(
    variant: KernelVariant, spec: OpSpec, how: tuple[tuple[int, Reader], ...]
) -> tuple[tuple[Launch, ...], tuple[Scratch, ...]]:
    """The same over all layouts that are read and written alike."""
    form = Form.of(spec)
    builder = _Builder(variant, form, dict(how))
    if spec.kind == "attention":
        return (builder.forward(),), ()
    return (builder.rows(), builder.keys()), (Scratch("float32", Layout.row_major((form.b, form.m))),)
