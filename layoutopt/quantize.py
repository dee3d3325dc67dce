"""Numbers in few bits: rows of float32 as packed codes and scales, in numpy. It defines what kernels do on a device.

A row is cut into groups of neighbours (the last may be short), each with one float32 scale; a value is a code of 8 or 4
bits times its group's scale. Codes lie in int32 words, the first in the lowest bits, so that a device needs no further
type. A row begins with a word of its own, and what its last word has no value for is 0.

========  ============================  ===================  =====================================================
kind      codes                         scale                rounding
========  ============================  ===================  =====================================================
float32   the number's own 32 bits      none                 none: the words are the numbers
int8      -127 to 127                   largest / 127        to the nearest, ties to even
int4      -7 to 7                       largest / 7          to the nearest, ties to even
fp4       sign, then 0 0.5 1 1.5 2 3 4 6  largest / 6        to the nearest, ties to the smaller magnitude
nf4       the 16 levels of QLoRA        largest              to the nearest, ties to the lower level
========  ============================  ===================  =====================================================

"Largest" is the largest magnitude of the group. A scale below the smallest normal float32 is stored as 0, and its group
as zeros: devices differ on subnormal numbers. int8 and int4 suit activations that are sent, in groups or by rows; fp4
and nf4 keep more of small values: nf4's levels are those that normally distributed weights use equally often.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from layoutopt.errors import GraphError

__all__ = [
    "KINDS",
    "LEVELS",
    "WEIGHTS",
    "Format",
    "dequantise",
    "groups_per_row",
    "quantise",
    "row_bytes",
    "words_per_row",
]

_BITS = {"float32": 32, "int8": 8, "int4": 4, "fp4": 4, "nf4": 4}
KINDS = tuple(_BITS)
_PEAKS = {"int8": 127.0, "int4": 7.0, "fp4": 6.0, "nf4": 1.0}

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
LEVELS: dict[str, tuple[float, ...]] = {"fp4": (*_FP4, *(-x for x in _FP4)), "nf4": _NF4}
"""What the 16 codes of a kind stand for."""

_SMALLEST = float(np.finfo(np.float32).tiny)
_GROUP_STEP = 8
_CHUNK_ELEMS = 1 << 20


@dataclass(frozen=True)
class Format:
    """How rows are stored.

    Attributes:
        kind: "float32", "int8", "int4", "fp4" or "nf4".
        group: values that share a scale, a multiple of 8; None: a whole row.

    Raises:
        GraphError: there is no such kind or group.
    """

    kind: str
    group: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in _BITS:
            raise GraphError(f"unknown number format {self.kind!r}: choose one of {', '.join(_BITS)}")
        if self.group is not None and self.kind == "float32":
            raise GraphError(f"number format float32 has no scales, and so no groups: got a group of {self.group}")
        if self.group is not None and (self.group < 1 or self.group % _GROUP_STEP):
            raise GraphError(
                f"number format {self.kind}: a group is a multiple of {_GROUP_STEP} values, got {self.group}"
            )

    @classmethod
    def parse(cls, text: str) -> Format:
        """``int8`` (a scale per row) or ``int4:64`` (one per 64 values), as :meth:`__str__` writes it."""
        kind, colon, group = text.partition(":")
        if colon and not group.isdecimal():
            raise GraphError(f"number format {text!r}: expected KIND or KIND:GROUP, such as int8 or int4:64")
        return cls(kind, int(group) if colon else None)

    def __str__(self) -> str:
        return self.kind if self.group is None else f"{self.kind}:{self.group}"

    @property
    def codes_per_word(self) -> int:
        """Values in an int32 word."""
        return 32 // _BITS[self.kind]

    @property
    def peak(self) -> float:
        """What the largest magnitude of a group is a multiple of its scale by (float32: 1)."""
        return _PEAKS.get(self.kind, 1.0)


WEIGHTS = {"int8": Format("int8"), "nf4": Format("nf4", 64)}
"""How weights are stored, by the name of the storage (``plan(..., storage="nf4")``)."""


def words_per_row(fmt: Format, cols: int) -> int:
    """int32 words of a row of ``cols`` values."""
    return -(-cols // fmt.codes_per_word)


def groups_per_row(fmt: Format, cols: int) -> int:
    """Scales of a row of ``cols`` values."""
    return 0 if fmt.kind == "float32" or not cols else -(-cols // (fmt.group or cols))


def row_bytes(fmt: Format, cols: int) -> int:
    """Bytes of a row, words and scales."""
    return 4 * (words_per_row(fmt, cols) + groups_per_row(fmt, cols))


def quantise(x: np.ndarray, fmt: Format) -> tuple[np.ndarray, np.ndarray]:
    """Rows of numbers as codes and scales.

    Args:
        x: float32[rows, cols].
        fmt: how to store them.

    Returns:
        words int32[rows, words_per_row], scales float32[rows, groups_per_row].

    Raises:
        GraphError: ``x`` is no matrix, or a number in it is not finite.
    """
    if x.ndim != 2:
        raise GraphError(f"to be stored as {fmt}, numbers are a matrix of rows; got the shape {x.shape}")
    x = np.ascontiguousarray(x, np.float32)
    if fmt.kind == "float32":
        _check_finite(x, fmt, 0)
        return x.view(np.int32).copy(), np.zeros((x.shape[0], 0), np.float32)
    rows, cols = x.shape
    words = np.zeros((rows, words_per_row(fmt, cols)), np.int32)
    scales = np.zeros((rows, groups_per_row(fmt, cols)), np.float32)
    step = max(1, _CHUNK_ELEMS // max(cols, 1))
    for begin in range(0, rows if cols else 0, step):
        part = x[begin : begin + step]
        _check_finite(part, fmt, begin)
        words[begin : begin + step], scales[begin : begin + step] = _quantise_rows(part, fmt)
    return words, scales


def dequantise(words: np.ndarray, scales: np.ndarray, cols: int, fmt: Format) -> np.ndarray:
    """The numbers that codes and scales stand for.

    Args:
        words: int32[rows, words_per_row].
        scales: float32[rows, groups_per_row]; where they are float64, so is the result.
        cols: values in a row.
        fmt: how they are stored.

    Returns:
        float32[rows, cols].

    Raises:
        GraphError: words or scales have another shape than the format's.
    """
    rows = len(words)
    expected = (rows, words_per_row(fmt, cols)), (rows, groups_per_row(fmt, cols))
    if (words.shape, scales.shape) != expected:
        raise GraphError(
            f"rows of {cols} values as {fmt}: expected words and scales of shapes {expected[0]} and {expected[1]}, "
            f"got {words.shape} and {scales.shape}"
        )
    words = np.ascontiguousarray(words, np.int32)
    if fmt.kind == "float32":
        return words.view(np.float32).copy()
    values = np.take(_values(fmt), _unpack(words, fmt)[:, :cols])
    return values * np.repeat(scales, fmt.group or max(cols, 1), axis=1)[:, :cols]


def _check_finite(x: np.ndarray, fmt: Format, first_row: int) -> None:
    finite = np.isfinite(x)
    if not finite.all():
        row, col = np.argwhere(~finite)[0]
        raise GraphError(
            f"row {first_row + row}, column {col} is {x[row, col]}: only finite numbers are stored as {fmt}"
        )


def _quantise_rows(x: np.ndarray, fmt: Format) -> tuple[np.ndarray, np.ndarray]:
    rows, cols = x.shape
    group = fmt.group or cols
    groups = -(-cols // group)
    padded = np.zeros((rows, groups * group), np.float32)
    padded[:, :cols] = x
    grouped = padded.reshape(rows, groups, group)
    scales = np.abs(grouped).max(2) / np.float32(fmt.peak)
    scales[scales < _SMALLEST] = 0.0
    divisors = np.where(scales > 0, scales, np.float32(np.inf))
    ratios = (grouped / divisors[:, :, None]).reshape(rows, groups * group)[:, :cols]
    return _pack(_codes(ratios, fmt), fmt), scales


def _codes(ratios: np.ndarray, fmt: Format) -> np.ndarray:
    """uint32 codes of values over scales, without bits beyond their width."""
    if fmt.kind in ("int8", "int4"):
        nearest = np.clip(np.rint(ratios), -fmt.peak, fmt.peak).astype(np.int32)
        return nearest.view(np.uint32) & np.uint32((1 << _BITS[fmt.kind]) - 1)
    between = midpoints(fmt)
    if fmt.kind == "nf4":
        return np.searchsorted(between, ratios).astype(np.uint32)
    magnitude = np.searchsorted(between, np.abs(ratios)).astype(np.uint32)
    return magnitude | ((ratios < 0) & (magnitude > 0)).astype(np.uint32) << np.uint32(3)


def midpoints(fmt: Format) -> np.ndarray:
    """float32 limits between neighbouring levels of nf4, or magnitudes of fp4: a value above limit i has code i + 1."""
    levels = np.array(_NF4 if fmt.kind == "nf4" else _FP4, np.float32)
    return (levels[:-1] + levels[1:]) / np.float32(2)


def _values(fmt: Format) -> np.ndarray:
    """float32 values of all codes of a kind."""
    if fmt.kind in LEVELS:
        return np.array(LEVELS[fmt.kind], np.float32)
    count = 1 << _BITS[fmt.kind]
    return ((np.arange(count) + count // 2) % count - count // 2).astype(np.float32)


def _pack(codes: np.ndarray, fmt: Format) -> np.ndarray:
    rows, cols = codes.shape
    per_word, bits = fmt.codes_per_word, _BITS[fmt.kind]
    padded = np.zeros((rows, words_per_row(fmt, cols) * per_word), np.uint32)
    padded[:, :cols] = codes
    shifted = padded.reshape(rows, -1, per_word) << (np.arange(per_word, dtype=np.uint32) * np.uint32(bits))
    return np.bitwise_or.reduce(shifted, axis=2).view(np.int32)


def _unpack(words: np.ndarray, fmt: Format) -> np.ndarray:
    """uint32 codes, those beyond a row's values included."""
    per_word, bits = fmt.codes_per_word, _BITS[fmt.kind]
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    codes = words.view(np.uint32)[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.reshape(len(words), words.shape[1] * per_word)
