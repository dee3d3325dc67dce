"""Labelled text: what a file may look like, what is refused and on which line, and tokens of a fixed length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from layoutopt.errors import LayoutOptError
from layoutopt.textdata import encode, label_ids, read_labelled_text


def write(tmp_path: Path, content: str | bytes) -> Path:
    file = tmp_path / "data.txt"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def test_lines_are_labels_and_texts(tmp_path: Path) -> None:
    got = read_labelled_text(write(tmp_path, "spam\tcall now\nham\ta\tb \n\nham\tgrüße\n"))
    assert got.labels == ("spam", "ham", "ham")
    assert got.texts == ("call now", "a\tb ", "grüße")  # the first tab separates; text stays as it is
    assert got.classes == ("ham", "spam")
    assert got.header == ""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_line_ends_and_byte_order_marks_are_no_part_of_the_data(tmp_path: Path, end: str, mark: str) -> None:
    got = read_labelled_text(write(tmp_path, f"{mark}ham\tone{end}spam\ttwo{end}ham\tthree"))
    assert got.labels == ("ham", "spam", "ham")
    assert got.texts == ("one", "two", "three")


def test_characters_that_split_lines_elsewhere_do_not_here(tmp_path: Path) -> None:
    got = read_labelled_text(write(tmp_path, "ham\ta\x85b\u2028c\x0cd\n"))
    assert got.texts == ("a\x85b\u2028c\x0cd",)


def test_a_header_is_the_first_line_only(tmp_path: Path) -> None:
    got = read_labelled_text(write(tmp_path, "Label\tText\nham\tx\nlabel\ty\n"))
    assert got.header == "Label\tText"
    assert got.labels == ("ham", "label")
    assert got.fingerprint == read_labelled_text(write(tmp_path, "ham\tx\nlabel\ty\n")).fingerprint


def test_the_fingerprint_hangs_on_every_label_and_text_and_their_order(tmp_path: Path) -> None:
    contents = ["a\tx\nb\ty\n", "b\ty\na\tx\n", "a\ty\nb\tx\n", "a\tx\n", "a\tx\nb\tyy\n"]
    assert len({read_labelled_text(write(tmp_path, c)).fingerprint for c in contents}) == len(contents)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "holds no labelled text"),
        ("\n  \n", "holds no labelled text"),
        ("label\ttext\n", "holds no labelled text"),
        ("ham\tx\nno tab here\n", "line 2 has no tab.*'no tab here'"),
        ("ham\tx\n\tlost\n", "line 2 has an empty label"),
        ("ham\tx\nham\t  \n", "line 2 has an empty text"),
        (b"ham\t\xff\xfe\n", "not UTF-8 text .byte 4"),
    ],
)
def test_refused_with_the_line(tmp_path: Path, content: str | bytes, match: str) -> None:
    with pytest.raises(LayoutOptError, match=match):
        read_labelled_text(write(tmp_path, content))


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for where in (tmp_path / "absent", tmp_path):
        with pytest.raises(LayoutOptError, match="no data file at"):
            read_labelled_text(where)


def test_labels_are_numbered_as_the_classes_stand() -> None:
    got = label_ids(("b", "a", "b"), ("b", "a"), "here")
    assert got.dtype == np.int32
    assert got.tolist() == [0, 1, 0]
    with pytest.raises(LayoutOptError, match="here has the label 'c', never seen in training: the model knows b, a"):
        label_ids(("a", "d", "c"), ("b", "a"), "here")


def tokenizer_file(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra 'examples'")
    words = {"[PAD]": 3, "[UNK]": 0, "a": 1, "b": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_padding(pad_id=3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_texts_become_ids_of_one_length(tmp_path: Path) -> None:
    got = encode(["a b", "b b b b b", "what a"], tokenizer_file(tmp_path), 4)
    assert got["input_ids"].tolist() == [[1, 2, 3, 3], [2, 2, 2, 2], [0, 1, 3, 3]]
    assert got["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert got["token_type_ids"].tolist() == [[0] * 4] * 3
    assert {x.dtype for x in got.values()} == {np.dtype(np.int32)}


def test_a_damaged_tokenizer_is_a_sentence(tmp_path: Path) -> None:
    file = tokenizer_file(tmp_path)
    file.write_text(file.read_text()[:40])
    with pytest.raises(LayoutOptError, match="not a tokenizer file, or is damaged"):
        encode(["a"], file, 4)
