"""Numbers in few bits, in numpy: what they stand for, how they are packed, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layoutopt.errors import GraphError
from layoutopt.quantize import (
    KINDS,
    LEVELS,
    WEIGHTS,
    Format,
    dequantise,
    groups_per_row,
    quantise,
    row_bytes,
    words_per_row,
)

FEW = ("int8", "int4", "fp4", "nf4")
formats = st.builds(Format, st.sampled_from(FEW), st.sampled_from((None, 8, 16, 24, 64)))


@st.composite
def matrices(draw) -> np.ndarray:
    """Rows of very different sizes, some of zeros."""
    rows, cols = draw(st.integers(1, 4)), draw(st.integers(1, 150))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.standard_normal((rows, cols)) * 10.0 ** rng.integers(-30, 30, (rows, 1))
    x[rng.random((rows, cols)) < draw(st.sampled_from((0.0, 0.1, 0.9)))] = 0.0
    return x.astype(np.float32)


def levels_of(fmt: Format) -> np.ndarray:
    """Every value that a code stands for, ascending."""
    if fmt.kind in LEVELS:
        return np.unique(np.array(LEVELS[fmt.kind], np.float32))
    return np.arange(-fmt.peak, fmt.peak + 1, dtype=np.float32)


@given(matrices(), formats)
def test_every_number_becomes_the_nearest_level(x: np.ndarray, fmt: Format) -> None:
    words, scales = quantise(x, fmt)
    rows, cols = x.shape
    assert (words.dtype, words.shape) == (np.int32, (rows, words_per_row(fmt, cols)))
    assert (scales.dtype, scales.shape) == (np.float32, (rows, groups_per_row(fmt, cols)))
    assert words.nbytes + scales.nbytes == rows * row_bytes(fmt, cols)
    got, levels = dequantise(words, scales, cols, fmt), levels_of(fmt).astype(np.float64)
    for i in range(rows):
        for g in range(scales.shape[1]):
            part = slice(g * (fmt.group or cols), (g + 1) * (fmt.group or cols))
            own, scale = x[i, part].astype(np.float64), float(scales[i, g])
            assert scale == pytest.approx(np.abs(own).max() / fmt.peak, rel=1e-6)
            nearest = np.abs(own[:, None] - levels * scale).min(axis=1)
            assert np.all(np.abs(got[i, part] - own) <= nearest + 2e-6 * np.abs(own).max())


@given(matrices(), formats)
def test_what_was_quantised_stays_as_it_is(x: np.ndarray, fmt: Format) -> None:
    cols = x.shape[1]
    once = quantise(x, fmt)
    again = quantise(dequantise(*once, cols, fmt), fmt)
    np.testing.assert_array_equal(once[0], again[0])
    np.testing.assert_allclose(once[1], again[1], rtol=1e-6)


@given(matrices(), st.sampled_from(FEW))
def test_rows_and_groups_are_apart(x: np.ndarray, kind: str) -> None:
    """What is in another row or group changes nothing."""
    fmt = Format(kind, 16)
    words, scales = quantise(x, fmt)
    for i in range(len(x)):
        for g in range(scales.shape[1]):
            alone = quantise(x[i : i + 1, 16 * g : 16 * g + 16], fmt)
            first = 16 * g // fmt.codes_per_word
            np.testing.assert_array_equal(alone[0][0], words[i, first : first + alone[0].shape[1]])
            assert alone[1][0, 0] == scales[i, g]


@given(matrices())
def test_float32_keeps_every_bit(x: np.ndarray) -> None:
    fmt = Format("float32")
    words, scales = quantise(x, fmt)
    assert scales.shape == (len(x), 0)
    np.testing.assert_array_equal(dequantise(words, scales, x.shape[1], fmt).view(np.int32), x.view(np.int32))


@settings(max_examples=20)
@given(st.integers(1, 40), st.sampled_from(FEW))
def test_the_tail_of_the_last_word_is_zero_codes(cols: int, kind: str) -> None:
    fmt = Format(kind)
    words, _ = quantise(np.full((1, cols), -3.0, np.float32), fmt)
    used = cols % fmt.codes_per_word * (32 // fmt.codes_per_word)
    assert used == 0 or int(words[0, -1:].view(np.uint32)[0]) >> used == 0


def test_words_by_hand() -> None:
    x = np.array([[127, -1, 0, 2, -127]], np.float32)
    words, scales = quantise(x, Format("int8"))
    assert [hex(w) for w in words.view(np.uint32)[0]] == ["0x200ff7f", "0x81"]
    assert scales[0, 0] == 1.0
    words, scales = quantise(np.array([[7, -7, 1, -1, 0, 3, 0, 2, 5]], np.float32), Format("int4"))
    assert [hex(w) for w in words.view(np.uint32)[0]] == ["0x2030f197", "0x5"]
    words, scales = quantise(np.array([[6, -6, 0.25, 0.26, 5, -5.1, -0.1, 1]], np.float32), Format("fp4"))
    assert [hex(w) for w in words.view(np.uint32)[0]] == ["0x20f610f7"]
    words, scales = quantise(np.array([[-2, 2, 0, 0.16, 0]], np.float32), Format("nf4"))
    assert [hex(w) for w in words.view(np.uint32)[0]] == ["0x787f0"]


def test_zeros_have_no_scale() -> None:
    for kind in FEW:
        words, scales = quantise(np.zeros((2, 9), np.float32), Format(kind, 8))
        assert not scales.any()
        assert not dequantise(words, scales, 9, Format(kind, 8)).any()
    tiny = np.full((1, 8), 1e-42, np.float32)  # devices differ on numbers as small as these
    assert not dequantise(*quantise(tiny, Format("int8")), 8, Format("int8")).any()


def test_what_is_not_finite_is_refused_with_its_place() -> None:
    x = np.zeros((3, 5), np.float32)
    x[2, 4] = np.nan
    for kind in KINDS:
        with pytest.raises(GraphError, match="row 2, column 4 is nan"):
            quantise(x, Format(kind))
    with pytest.raises(GraphError, match=r"matrix of rows; got the shape \(3,\)"):
        quantise(x[:, 0], Format("int8"))


def test_formats_as_text() -> None:
    for text in ("float32", "int8", "int4:64", "fp4:8", "nf4:64"):
        assert str(Format.parse(text)) == text
    assert [str(WEIGHTS[name]) for name in ("int8", "nf4")] == ["int8", "nf4:64"]
    for text, why in (
        ("int5", "unknown number format 'int5'"),
        ("int8:", "expected KIND or KIND:GROUP"),
        ("int8:x", "expected KIND or KIND:GROUP"),
        ("int8:12", "multiple of 8 values, got 12"),
        ("int4:0", "multiple of 8 values, got 0"),
        ("float32:8", "has no scales"),
    ):
        with pytest.raises(GraphError, match=why):
            Format.parse(text)
    with pytest.raises(GraphError, match=r"expected words and scales of shapes \(2, 3\) and \(2, 1\)"):
        dequantise(np.zeros((2, 2), np.int32), np.zeros((2, 1), np.float32), 9, Format("int8"))


def test_large_matrices_are_quantised_in_parts() -> None:
    x = np.random.default_rng(0).standard_normal((3, (1 << 19) + 5)).astype(np.float32)
    words, scales = quantise(x, Format("nf4", 64))
    one = quantise(x[2:], Format("nf4", 64))
    np.testing.assert_array_equal(words[2:], one[0])
    np.testing.assert_array_equal(scales[2:], one[1])
