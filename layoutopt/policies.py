"""What other mobile runtimes do to a step: their layout for every tensor, and the copies that follow from it.

A *policy* has no costs and makes no choice. It says in which layout an operation of some kind keeps what it reads and
writes; ``wish`` goes through a graph and writes down, per storage, the layout in which it is produced, and per operand
the layout in which it is read. Where the two differ, the peer has a kernel that only moves data, and so have we: a
relayout. What these peers materialise and we see through a view (heads split and merged around attention, tensors
converted for a matrix product) thus becomes a relayout to the layout in which that view *is* the peer's tensor.

How an operation of the graph is read as one of the peer's:

- a matrix product without a batch is a linear layer: tokens × features in the peer's activation layout, the weights in
  its weight layout. A matrix is taken transposed as it is (peers have flags for that);
- one with a batch, and attention, is a batched product: each operand is a tensor of its own, its heads split by a copy;
- convolutions have images and filters in the peer's layouts;
- anything else runs on the layout that its first operand of full size lies in. What a peer would transpose first is
  copied; a broadcast is not;
- gradients and optimizer state lie like their parameter. No peer trains on a phone's GPU: this is their layout strategy
  on our kernels, with both passes and the update treated alike.

Three things cannot be run here and are listed as *extras*, to be priced: a slice or a split that a peer copies to a
tensor of its own (we read it in place), the second kernel where it splits heads and then converts (our relayout does
both), and any other copy that no relayout of the whole storage makes. Left out, in the peers' favour: MNN's transposed
softmax and rearranged mask. Images: no kernel here reads 2-D images, so ``mnn-image`` keeps their texels, row after
row, in buffers, which devices with images read as 1-D ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

from layoutopt import baselines
from layoutopt.candidates import CONVOLUTIONS, fixed_storages
from layoutopt.graph import Op, Operand, TrainingGraph
from layoutopt.layout import LANES, Layout, Mode
from layoutopt.pass_views import seen
from layoutopt.view import View

__all__ = ["POLICIES", "Extra", "Policy", "Wishes", "wish"]

SMALL_ELEMS = 256
"""Tensors below this, vectors and integers stay row-major with every peer, and a copy of them is not counted."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Policy:
    """A peer's layouts, each over our logical axes.

    Attributes:
        name: what ``--strategy`` takes.
        matrix: of activations [rows, columns].
        batched: of an operand of a batched product, [batch, rows, columns].
        image: of [n, c, h, w].
        weights: of a linear layer, [outputs, inputs].
        filters: of a convolution, [outputs, inputs, h, w].
        second: of the second operand of a batched product, [batch, rows, columns]; ``True`` when its columns are what
            is summed over. None where it is as any other.
    """

    name: str
    matrix: Callable[[Shape], Layout]
    batched: Callable[[Shape], Layout]
    image: Callable[[Shape], Layout]
    weights: Callable[[tuple[int, int]], Layout]
    filters: Callable[[Shape], Layout]
    second: Callable[[Shape, bool], Layout] | None = None


def _in_rows(image: Layout) -> Layout:
    """An image's texels row after row in a buffer."""
    _, columns, lanes = image.size
    weight = (columns * lanes, lanes, 1)
    modes = [Mode(m.axis, m.extent, m.stride * weight[m.dim], 0) for m in image.modes]
    return Layout.build(image.shape, modes, (prod(image.size),))


def _stacked(matrix: Callable[[Shape], Layout]) -> Callable[[Shape], Layout]:
    """A batch of matrices as one matrix, each below the one before."""

    def batched(shape: Shape) -> Layout:
        layout = matrix((prod(shape[:-1]), shape[-1])).reshape(shape)
        return layout or Layout.row_major(shape)

    return batched


def _mnn_image(shape: Shape) -> Layout:
    return _in_rows(baselines.mnn_image(shape))


def _converted(shape: Shape, by_columns: bool) -> Layout:
    """TFLite's convolution weights of each matrix of a batch: blocks of four inputs by four outputs."""
    order = (2, 1) if by_columns else (1, 2)
    return Layout.tiled(shape, {1: LANES, 2: LANES}, (0, *order), order)


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy(
            "mnn-image",
            _mnn_image,
            _stacked(_mnn_image),
            _mnn_image,
            lambda shape: _in_rows(baselines.mnn_weights_image(shape)),
            baselines.tvm_oihw4o,
        ),
        Policy(
            "mnn-buffer",
            baselines.mnn_buffer,
            Layout.row_major,
            baselines.mnn_buffer,
            baselines.mnn_matmul_weights,
            baselines.tvm_oihw4o,
        ),
        Policy(
            "tflite",
            baselines.tflite_phwc4,
            _stacked(baselines.tflite_phwc4),
            baselines.tflite_phwc4,
            baselines.tflite_weights,
            lambda shape: Layout.tiled(shape, {0: LANES, 1: LANES}, inner=(1, 0)),
            _converted,
        ),
        Policy(
            "tvm-flat",
            baselines.tvm_flat,
            baselines.tvm_flat,
            baselines.tvm_flat,
            baselines.tvm_flat,
            baselines.tvm_flat,
        ),
    )
}
"""By name. MNN's filters larger than 1×1 are our reading: four outputs innermost, as TVM has them; batches of matrices
on images, and in TFLite's buffers, are one matrix below the other."""


@dataclass(frozen=True)
class Extra:
    """A copy that the peer makes and that is not a relayout here: of ``shape``, from one layout to another."""

    op: str
    tensor: str
    shape: Shape
    source: Layout
    target: Layout


@dataclass
class Wishes:
    """What a policy wants of a graph, over the storages' shapes.

    Attributes:
        primary: the layout in which each storage is produced.
        reads: per op, the layout in which each input is read.
        extras: see :class:`Extra`; each (tensor, view) once.
    """

    primary: dict[str, Layout] = field(default_factory=dict)
    reads: list[dict[int, Layout]] = field(default_factory=list)
    extras: list[Extra] = field(default_factory=list)


def wish(graph: TrainingGraph, policy: Policy, plain: frozenset[str] = frozenset()) -> Wishes:
    """Go through a graph as the peer would.

    Args:
        graph: views folded.
        policy: one of ``POLICIES``.
        plain: storages whose primary must be row-major, besides those of the host.
    """
    return _Wisher(graph, policy, plain).run()


@lru_cache(maxsize=1 << 16)
def _order(view: View, shape: Shape) -> str:
    """How a view goes through a row-major tensor.

    "plain": in order; "swapped": its last two axes exchanged; "moved": in another order, which a peer copies; "part":
    less than all of it; "spread": a broadcast.
    """
    if not view.is_bijective:
        return "spread" if any(step.kind == "expand" for step in view.steps) else "part"
    found, viewed = seen(view, shape), view.shape(shape)
    if found == Layout.row_major(viewed):
        return "plain"
    if found is not None and len(viewed) > 1:
        swapped = found.permute(_swap(len(viewed)))
        if swapped == Layout.row_major(swapped.shape):
            return "swapped"
    return "moved"


def _swap(rank: int) -> Shape:
    return (*range(rank - 2), rank - 1, rank - 2)


class _Wisher:
    def __init__(self, graph: TrainingGraph, policy: Policy, plain: frozenset[str]) -> None:
        self.graph, self.policy, self.plain = graph, policy, plain
        self.out = Wishes()
        self.images = {
            graph.storage_of[o.tensor] for op in graph.ops if op.kind in CONVOLUTIONS for o in op.operands if not o.view
        }
        self._extras: set[tuple[str, View, Layout]] = set()

    def run(self) -> Wishes:
        """Parameters first, then op by op."""
        for name in fixed_storages(self.graph) | self.plain:
            self.out.primary[name] = Layout.row_major(self.graph.storages[name].shape)
        self._parameters()
        for op in self.graph.ops:
            reads = {k: self._read(op, k, operand) for k, operand in enumerate(op.inputs)}
            for k, operand in enumerate(op.outputs):
                self._write(op, len(op.inputs) + k, operand, reads)
            self.out.reads.append(reads)
        return self.out

    # ---- layouts ----------------------------------------------------------------------------------------------------

    def _tensor(self, name: str) -> Layout:
        """The peer's layout of a storage as a whole."""
        shape = self.graph.storages[name].shape
        if self._stays_plain(name):
            return Layout.row_major(shape)
        if len(shape) == 4 and name in self.images:
            return self.policy.image(shape)
        return self.policy.matrix((prod(shape[:-1]), shape[-1])).reshape(shape) or Layout.row_major(shape)

    def _stays_plain(self, name: str) -> bool:
        storage = self.graph.storages[name]
        is_number = storage.dtype in ("float32", "float16")
        return not is_number or len(storage.shape) < 2 or prod(storage.shape) < SMALL_ELEMS

    def _is_natural(self, name: str, layout: Layout) -> bool:
        """Whether the peer has whole tensors in this layout, rather than what a transposition has left."""
        shape = self.graph.storages[name].shape
        if layout in (Layout.row_major(shape), self._tensor(name)):
            return True
        if len(shape) < 3:
            return False
        stack = (prod(shape[:-2]), *shape[-2:])
        return layout == self.policy.batched(stack).reshape(shape)

    def _demanded(self, op: Op, position: int, order: str) -> Layout | None:
        """What a product or a convolution keeps an operand in, over the shape that it sees; None: as it lies."""
        shape = self.graph.operand_shape(op.operands[position])
        if op.kind in CONVOLUTIONS:
            is_filter = position == (2 if op.kind == "conv_grad_weight" else 1)
            return self.policy.filters(shape) if is_filter else self.policy.image(shape)
        if _is_attention_operand(op, position):
            if position in (1, 2) and self.policy.second:
                return self.policy.second(shape, position == 1)
            return self.policy.batched(shape)
        if op.kind != "contraction" or position not in (0, 1, len(op.inputs)):
            return None
        if shape[0] > 1 and position == 1 and self.policy.second:
            return self.policy.second(shape, False)
        if shape[0] == 1 and order in ("plain", "swapped"):
            return None
        kept = self.policy.batched if shape[0] > 1 else _stacked(self.policy.matrix)
        return self._upright(kept, op.operands[position])

    def _upright(self, kept: Callable[[Shape], Layout], operand: Operand) -> Layout:
        """A matrix's layout, or its transpose's seen transposed where that is how the tensor lies."""
        shape = self.graph.tensors[operand.tensor].shape
        found, viewed = seen(operand.view, shape), operand.view.shape(shape)
        if found is None or not _runs_down(found):
            return kept(viewed)
        swap = _swap(len(viewed))
        return kept(tuple(viewed[a] for a in swap)).permute(swap)

    # ---- parameters -------------------------------------------------------------------------------------------------

    def _parameters(self) -> None:
        """Weights as the forward pass wants them; gradients and state like their parameter; the rest row-major."""
        graph, primary = self.graph, self.out.primary
        for op in graph.ops:
            if len(op.inputs) < 2:
                continue
            operand = op.inputs[1]
            name = graph.storage_of[operand.tensor]
            storage = graph.storages[name]
            if storage.role == "parameter" and name not in primary and not self._stays_plain(name):
                layout = self._weights(op, operand, storage.shape)
                if layout is not None:
                    primary[name] = layout
        for name, storage in graph.storages.items():
            of = graph.tensors[name].of
            like = primary.get(graph.storage_of.get(of, ""))
            if name not in primary and like is not None and like.shape == storage.shape:
                primary[name] = like
            if storage.role in ("parameter", "state"):
                primary.setdefault(name, Layout.row_major(storage.shape))

    def _weights(self, op: Op, operand: Operand, shape: Shape) -> Layout | None:
        order = _order(operand.view, shape)
        if op.kind in CONVOLUTIONS and operand.view.is_bijective:
            return operand.view.inverse(shape).layout(self.policy.filters(operand.view.shape(shape)))
        if op.kind != "contraction" or len(shape) != 2 or order not in ("plain", "swapped"):
            return None
        if order == "swapped":
            return self.policy.weights((shape[0], shape[1]))
        return self.policy.weights((shape[1], shape[0])).permute((1, 0))

    # ---- reading and writing ----------------------------------------------------------------------------------------

    def _read(self, op: Op, position: int, operand: Operand) -> Layout:
        name = self.graph.storage_of[operand.tensor]
        shape = self.graph.storages[name].shape
        primary = self.out.primary.setdefault(name, Layout.row_major(shape))
        order = _order(operand.view, shape)
        if self._stays_plain(name) or order == "spread":
            return primary
        wanted = self._demanded(op, position, order)
        if order == "part":
            self._extra(op, operand, primary, wanted)
            return primary
        if wanted is None and (order == "moved" and op.kind != "reduce"):
            viewed = operand.view.shape(shape)
            wanted = _stacked(self.policy.matrix)(viewed) if len(viewed) > 1 else Layout.row_major(viewed)
        if wanted is None:
            return self._as_it_lies(op, position, operand, primary)
        back = operand.view.inverse(shape)
        pulled = back.layout(wanted)
        if order == "moved" and self._is_converted(op, position):
            split = self._upright(self.policy.batched, operand)
            self._note(op, operand, split, wanted)
            pulled = pulled or back.layout(split)
        if pulled is None:
            self._extra(op, operand, primary, wanted)
            return primary
        return pulled

    def _as_it_lies(self, op: Op, position: int, operand: Operand, primary: Layout) -> Layout:
        """Without a copy, unless it lies as no whole tensor does or a linear layer wants its own layout."""
        name = self.graph.storage_of[operand.tensor]
        if self.graph.storages[name].role in ("parameter", "state"):
            return primary
        if operand.view.layout(primary) is None:
            return Layout.row_major(primary.shape)
        is_linear = op.kind == "contraction" and position < 2
        if is_linear or not self._is_natural(name, primary):
            return self._tensor(name)
        return primary

    def _is_converted(self, op: Op, position: int) -> bool:
        if self.policy.second is None:
            return False
        if op.kind == "contraction":
            return position == 1 and self.graph.operand_shape(op.inputs[1])[0] > 1
        return _is_attention_operand(op, position) and position in (1, 2)

    def _extra(self, op: Op, operand: Operand, primary: Layout, wanted: Layout | None) -> None:
        """A part, or a torn tensor, that the peer copies before it reads it."""
        source = operand.view.layout(primary) or operand.view.layout(Layout.row_major(primary.shape))
        if source is not None:
            self._note(op, operand, source, wanted or Layout.row_major(source.shape))

    def _note(self, op: Op, operand: Operand, source: Layout, target: Layout) -> None:
        key = (operand.tensor, operand.view, target)
        if key not in self._extras and prod(source.shape) >= SMALL_ELEMS:
            self._extras.add(key)
            self.out.extras.append(Extra(op.name, operand.tensor, source.shape, source, target))

    def _write(self, op: Op, position: int, operand: Operand, reads: dict[int, Layout]) -> None:
        name = self.graph.storage_of[operand.tensor]
        shape = self.graph.storages[name].shape
        if name in self.out.primary:
            return
        self.out.primary[name] = self._tensor(name)
        if self._stays_plain(name) or not operand.view.is_bijective:
            return
        wanted = self._demanded(op, position, _order(operand.view, shape))
        if wanted is not None:
            self.out.primary[name] = operand.view.inverse(shape).layout(wanted) or self._tensor(name)
        elif op.kind in ("attention", "attention_grad"):
            self.out.primary[name] = Layout.row_major(shape)  # a number per row
        elif op.kind != "contraction" or position > len(op.inputs):
            self.out.primary[name] = self._followed(op, operand, name, reads) or self._tensor(name)

    def _followed(self, op: Op, operand: Operand, name: str, reads: dict[int, Layout]) -> Layout | None:
        """The layout of the first operand of full size, if a whole tensor may lie so."""
        graph = self.graph
        viewed = graph.operand_shape(operand)
        back = operand.view.inverse(graph.storages[name].shape)
        for k, other in enumerate(op.inputs):
            source = graph.storages[graph.storage_of[other.tensor]]
            if other.view.is_bijective and other.view.shape(source.shape) == viewed:
                layout = other.view.layout(reads[k])
                own = back.layout(layout) if layout is not None else None
                if own is not None and self._is_natural(name, own):
                    return own
        return None


def _is_attention_operand(op: Op, position: int) -> bool:
    """Whether it is one of the matrices that attention multiplies, or makes."""
    if op.kind == "attention":
        return position in (0, 1, 2, len(op.inputs))
    return op.kind == "attention_grad" and (position in (0, 1, 2, 3, 6) or position >= len(op.inputs))


def _runs_down(layout: Layout) -> bool:
    """Whether neighbours down a column are closer than those along a row."""
    steps = [
        min((m.stride for m in layout.axis_modes(axis) if m.stride), default=0)
        for axis in (-2 % layout.rank, -1 % layout.rank)
    ]
    return 0 < steps[0] < steps[1]
