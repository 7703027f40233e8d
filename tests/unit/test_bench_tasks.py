"""The figures of the accuracy bench, against values worked out by hand or another way."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from bench.tasks import metrics, wordpiece
from bench.tasks.task import evaluate
from hypothesis import given
from hypothesis import strategies as st

texts = st.text("abc", max_size=8)


@pytest.mark.parametrize(
    ("a", "b", "edits"),
    [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("ab", "ba", 2)],
)
def test_edit_distance(a: str, b: str, edits: int):
    assert metrics.edit_distance(a, b) == edits


@given(texts, texts, texts)
def test_edit_distance_is_a_distance(a: str, b: str, c: str):
    ab = metrics.edit_distance(a, b)
    assert ab == metrics.edit_distance(b, a)
    assert (ab == 0) == (a == b)
    assert abs(len(a) - len(b)) <= ab <= max(len(a), len(b))
    assert metrics.edit_distance(a, c) <= ab + metrics.edit_distance(b, c)


def test_error_rate_counts_all_characters_together():
    assert metrics.character_error_rate(["abcd", "ef"], ["abxd", "efg"]) == pytest.approx(2 / 6)


def test_ctc_drops_repeats_and_blanks():
    best = [0, 1, 1, 0, 1, 2, 2, 0, 3, 3]
    scores = np.eye(4)[best]
    assert metrics.ctc_greedy(scores, ["a", "b", " "]) == "aab "
    assert metrics.ctc_greedy(np.eye(4)[[0, 0]], ["a", "b", " "]) == ""
    assert metrics.ctc_greedy(np.eye(4)[[2, 2]], ["a", "b", " "]) == "b"


def test_ranks_share_ties():
    assert metrics.ranks([10.0, 5.0, 10.0, 1.0]).tolist() == [3.5, 2.0, 3.5, 1.0]


def test_spearman():
    a = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    assert metrics.spearman(a, np.exp(a)) == pytest.approx(1)
    assert metrics.spearman(a, -(a**3)) == pytest.approx(-1)
    # 1 - 6 * sum(d^2) / (n * (n^2 - 1)) without ties.
    assert metrics.spearman(a, np.array([2.0, 1.0, 4.0, 3.0, 5.0])) == pytest.approx(1 - 24 / 120)
    assert metrics.spearman(a, np.ones(5)) == 0


def test_sqnr_is_of_all_arrays_together():
    wanted, found = [np.full(4, 10.0), np.zeros(2)], [np.full(4, 9.0), np.zeros(2)]
    assert metrics.sqnr_db(wanted, found) == pytest.approx(20)
    assert metrics.sqnr_db(wanted, wanted) == math.inf
    assert metrics.sqnr_db([np.zeros(2)], [np.ones(2)]) == -math.inf


def test_agreement_and_top1():
    a = [np.array([0.1, 0.9]), np.array([0.8, 0.2])]
    b = [np.array([0.3, 0.4]), np.array([0.3, 0.4])]
    assert metrics.agreement(a, b) == 0.5
    assert metrics.top1(a, [1, 0]) == 1
    assert metrics.top1(b, [0, 0]) == 0


def test_pooling_leaves_padding_out():
    tokens = np.array([[[3.0, 0.0], [3.0, 8.0], [100.0, 100.0]]])
    np.testing.assert_allclose(metrics.pooled(tokens, np.array([[1, 1, 0]])), [0.6, 0.8])


def test_speech_is_where_it_is_loud():
    loud, silent = np.tile([1.0, -1.0], 50), np.zeros(100)
    # A single silent frame between loud ones is a pause inside a word.
    sound = np.concatenate([silent, silent, loud, silent, loud, silent, silent, 0.5 * loud])
    expected = [False, False, True, True, True, False, False, True]
    assert metrics.speech_frames(sound, 100).tolist() == expected


VOCABULARY = wordpiece.read_vocabulary(
    "\n".join(
        ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##aff", "##able", "cafe", "!", "$", "un!"]
    )
    + "\n"
)


def test_words_are_plain():
    assert wordpiece.words_of("Café,  co-op\tNO!\n") == ["cafe", ",", "co", "-", "op", "no", "!"]
    assert wordpiece.words_of("a中b\x00c") == ["a", "中", "bc"]
    assert wordpiece.words_of("5$+x") == ["5", "$", "+", "x"]


def test_longest_pieces_first():
    assert wordpiece.pieces("unaffable", VOCABULARY) == ["un", "##aff", "##able"]
    assert wordpiece.pieces("unknown", VOCABULARY) == ["[UNK]"]
    assert wordpiece.pieces("un" + "##aff" * 40, VOCABULARY) == ["[UNK]"]


def test_tokens_are_framed_and_cut():
    assert wordpiece.tokens_of("Unaffable café!", VOCABULARY, 16) == [2, 4, 5, 6, 7, 8, 3]
    assert wordpiece.tokens_of("Unaffable café!", VOCABULARY, 4) == [2, 4, 5, 3]
    assert wordpiece.tokens_of("", VOCABULARY, 4) == [2, 3]


def test_carried_inputs_take_the_output_before():
    def run(feed: Any) -> dict[str, Any]:
        return {"y": feed["x"], "next": feed["state"] + feed["x"]}

    feeds: list[dict[str, Any]] = [{"x": 1, "state": 0}, {"x": 2}, {"x": 4}, {"x": 8, "state": 100}]
    found = evaluate(run, feeds, {"state": "next"})
    assert [item["next"] for item in found] == [1, 3, 7, 108]
