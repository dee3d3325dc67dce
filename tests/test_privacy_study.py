"""The attacks of the privacy study find what is there, and only that."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs the extra 'torch'")

from benchmarks.privacy import inversion, labels, pivot, taps
from benchmarks.side_privacy import balanced, privacy_of

pytestmark = pytest.mark.peer

TEXTS = ("the cat sat on the mat", "a dog barked at the old cat", "birds fly over the house", "the house is old")


@pytest.fixture(scope="module")
def backbone() -> taps.Backbone:
    return taps.tiny(3)[0]


@pytest.fixture(scope="module")
def messages(tmp_path_factory) -> taps.Messages:
    file = tmp_path_factory.mktemp("data") / "lines.tsv"
    lines = [f"{i % 2}\t{text}" for i, text in enumerate(TEXTS)]
    file.write_text("\n".join([*lines, lines[0]]) + "\n")
    return taps.Messages.read(file, taps.tiny(3)[1], 12)


@given(st.integers(2, 9), st.integers(0, 2**32 - 1), st.floats(0.1, 2))
def test_differences_tell_the_label_and_what_the_head_says(classes, seed, scale):
    draw = np.random.default_rng(seed)
    p = labels.softmax(draw.normal(0, scale, (20, classes)))
    y = draw.integers(0, classes, 20)
    d = labels.differences(y, p)
    assert (d.argmax(1) == y).all()
    assert ((d > 0).sum(1) == 1).all()
    assert (labels.by_magnitude(d) == p.argmax(1)).all()


def test_agreement_is_of_partitions():
    y = np.array([0, 0, 0, 0, 1, 1, 2, 2])
    assert labels.agreement(np.array([2, 0, 1])[y], y) == 1
    assert labels.agreement(np.zeros(8, int), y) == pytest.approx(1 / 3)
    assert labels.agreement(np.array([5, 5, 5, 0, 1, 1, 2, 2]), y) == pytest.approx((0.75 + 1 + 1) / 3)
    assert balanced(np.zeros(8, int), y) == pytest.approx(1 / 3)


def test_a_secret_linear_mask_comes_off():
    draw = np.random.default_rng(1)
    rows = draw.normal(0, 1, (600, 20))
    y = (rows[:, 0] + draw.normal(0, 0.3, 600) > 0).astype(int)
    masked = np.eye(2)[y] - rows @ draw.normal(0, 1, (20, 2))
    guess = np.where(draw.random(600) < 0.1, 1 - y, y)
    assert labels.agreement(labels.by_clusters(masked, 2, 0), y) < 0.8
    assert 0.8 < labels.agreement(guess, y) < 0.95
    for start in (guess, 1 - guess):
        assert labels.agreement(labels.by_sparse_errors(masked, rows, start), y) == 1


def test_differences_in_a_secret_code_are_read_by_the_head_that_fits():
    draw = np.random.default_rng(7)
    rows = draw.normal(0, 1, (500, 12))
    q = labels.softmax(rows @ draw.normal(0, 1, (12, 2)))
    y = (draw.random(500) < q[:, 1]).astype(int)
    coded = labels.differences(y, q) @ draw.normal(0, 1, (2, 5)) + draw.normal(0, 1, 5)
    assert labels.agreement(labels.by_consistent_head(coded, rows), y) == 1


def test_shares_of_a_class_look_alike():
    draw = np.random.default_rng(2)
    y = draw.integers(0, 2, 400)
    shares = draw.permutation(6)[y * 3 + draw.integers(0, 3, 400)]
    rows = np.eye(2)[y] + draw.normal(0, 1, (400, 2))
    assert labels.agreement(labels.by_groups(shares, rows, 2, 0), y) == 1


def test_word_figures_by_hand():
    truth = np.zeros((2, 4), bool)
    truth[0, [0, 3]] = truth[1, 1] = True
    scores = truth * 0.9
    figures = pivot.word_figures(scores, truth, 0.5)
    assert figures == dict.fromkeys(("average_precision", "rarer", "precision", "recall", "by_count"), 1.0)
    scores[0, 1] = 0.95
    figures = pivot.word_figures(scores, truth, 0.5)
    assert (figures["precision"], figures["recall"], figures["by_count"]) == (0.75, 1.0, pytest.approx(2 / 3))
    assert figures["rarer"] == 1
    assert figures["average_precision"] == pytest.approx(0.75)


def test_words_are_told_from_what_is_linear_in_them_and_not_from_noise():
    draw = np.random.default_rng(3)
    bags = draw.random((500, 30)) < 0.2
    told = bags @ draw.normal(0, 1, (30, 60))
    told, noise = (x.astype(np.float32) for x in (told, draw.normal(0, 1, told.shape)))
    for rows, least, most in ((told, 0.99, 1.0), (noise, 0.1, 0.35)):
        scores, threshold = pivot.ridge_scores(rows[:400], bags[:400], rows[400:])
        assert least <= pivot.word_figures(scores, bags[400:], threshold)["average_precision"] <= most


def test_known_messages_are_told_apart_by_what_they_give():
    known = np.random.default_rng(6).normal(0, 1, (30, 8)).astype(np.float32)
    which = np.array([3, 7, 29])
    near = known[which] + np.float32(1e-3)
    assert pivot.matched(near, known, which) == 1
    assert pivot.matched(near, known, which - 1) == 0
    assert pivot.matched(near, np.concatenate([known, known]), which) == 0.5


def test_bags_hold_words_of_the_public(messages):
    public, sent = messages.part(slice(2)), messages.part(slice(2, 4))
    bags = pivot.WordBags.of(public, sent, 2)
    often = {int(w) for w in set(public.ids[0]) & set(public.ids[1]) if w not in messages.special}
    assert set(bags.words) == often
    assert bags.public.all()
    mine = [set(row[mask > 0]) - set(messages.special) for row, mask in zip(sent.ids, sent.mask, strict=True)]
    assert bags.covered == pytest.approx(sum(len(m & often) for m in mine) / sum(map(len, mine)))


def test_messages_come_once_and_parts_share_none(messages):
    assert len(messages) == len(TEXTS)
    parts = taps.Parts.of(messages, 2, 1, 1, 0)
    rows = [tuple(row) for part in (parts.device, parts.held_out, parts.public) for row in part.ids]
    assert len(set(rows)) == len(TEXTS)


def test_rows_are_the_padded_states_without_padding(backbone, messages):
    rows = backbone.rows(messages)
    pivots = backbone.pivots(messages)
    length = int(messages.mask[0].sum())
    for tap, state in enumerate(backbone.every_state(messages.ids, messages.mask)):
        assert rows.taps[tap] == pytest.approx(state[messages.mask > 0], abs=1e-5)
        assert pivots[tap] == pytest.approx(state[:, 0], abs=1e-5)
        alone = backbone.state(messages.ids[:1, :length], tap)[0]
        assert alone == pytest.approx(state[0, :length], abs=1e-5)


def test_the_embedding_is_looked_up(backbone, messages):
    rows = backbone.rows(messages)
    (ranked,) = inversion.look_up(backbone, [rows.taps[0]], rows.position)
    found = inversion.recovery(ranked, rows, messages.is_text(rows.ids))
    assert found == {"top1": 1.0, "with_special": 1.0, "top5": 1.0, "whole": 1.0}


def test_search_finds_the_text_among_candidates(backbone, messages):
    rows = backbone.rows(messages)
    own = rows.message == 0
    candidates = np.random.default_rng(0).integers(1000, 20000, (own.sum(), 6))
    candidates[:, 3] = rows.ids[own]
    for tap in (1, 2):
        found = inversion.refine(backbone, tap, rows.taps[tap][own], candidates, sweeps=int(own.sum()))
        assert (found == rows.ids[own]).all()


def test_inverters_learn_a_scrambled_embedding():
    draw = np.random.default_rng(4)
    words = draw.normal(0, 1, (300, 16)).astype(np.float32)
    scramble = draw.normal(0, 1, (16, 24)).astype(np.float32)
    ids, message = draw.integers(0, 300, 1200), np.repeat(np.arange(100), 12)
    rows = taps.Rows({}, ids, np.tile(np.arange(12), 100), message)
    seen = words[ids] @ scramble
    linear = inversion.LinearInverter.fit(seen, ids, words)
    unseen = draw.integers(0, 300, 200)
    assert (linear.ranked(words[unseen] @ scramble)[:, 0] == unseen).all()
    context = inversion.ContextInverter(seen, rows, words, epochs=6, seed=0)
    assert (context.ranked(seen, rows)[:, 0] == ids).mean() > 0.9


def test_recovery_by_hand():
    rows = taps.Rows({}, np.array([1, 5, 6, 2, 1, 7, 2]), np.zeros(7), np.array([0, 0, 0, 0, 3, 3, 3]))
    ranked = np.array([[1, 5, 9, 2, 1, 7, 2], [0, 0, 6, 0, 0, 0, 0]]).T
    is_text = ~np.isin(rows.ids, (1, 2))
    assert inversion.recovery(ranked, rows, is_text) == {
        "top1": pytest.approx(2 / 3),
        "with_special": pytest.approx(6 / 7),
        "whole": 0.5,
    }


def test_more_noise_is_a_smaller_epsilon():
    states = np.random.default_rng(5).normal(0, 1, (2, 50, 8)).astype(np.float32)
    assert privacy_of(states, 1.0) > privacy_of(states, 2.0) > 0
