"""The training text and the baselines it is compared with."""

import math

import pytest
import torch

from training.baselines import gzip_bits_per_byte, ngram_bits_per_byte
from training.data import EOS, Corpus, _key, _paragraphs, batches, corpus


@pytest.fixture(scope="module")
def text():
    return corpus()


def test_no_paragraph_of_the_held_out_topics_is_in_the_training_text(text):
    assert len(text.topics) > 40
    assert len(text.docstrings) > 100
    assert sum(map(len, text.held_out)) > 20_000
    hidden = {_key(p) for document in text.held_out for p in _paragraphs(document)}
    seen = {_key(p) for document in text.topics + text.docstrings for p in _paragraphs(document)}
    assert not hidden & seen


def test_the_split_is_the_same_every_time(text):
    assert corpus() == text


def test_a_resumed_stream_of_batches_continues_as_the_first_would_have():
    text = Corpus(["a" * 100 + "b" * 100], ["c" * 300], [])
    whole = batches(text, batch=4, tokens=8, seed=3)
    first = [next(whole) for _ in range(5)]
    again = batches(text, batch=4, tokens=8, seed=3, start=2)
    for expected in first[2:]:
        assert torch.equal(next(again), expected)
    assert not torch.equal(first[0], first[1])
    assert all(int(x.max()) <= EOS for x in first)


def test_ngram_bits_by_hand():
    # Unigram "a" seen 3 times of 4 and "b" once: p(a) = (3 + 2/256) / 6, p(b) = (1 + 2/256) / 6.
    bits = ngram_bits_per_byte(["aaab"], ["ab"], order=1)
    expected = -(math.log2((3 + 2 / 256) / 6) + math.log2((1 + 2 / 256) / 6)) / 2
    assert bits == pytest.approx(expected)


def test_a_longer_context_helps_and_gzip_is_in_range():
    train, held_out = ["the cat sat on the mat. " * 50], ["the cat sat on the mat. "]
    assert ngram_bits_per_byte(train, held_out, 5) < ngram_bits_per_byte(train, held_out, 1) < 8
    assert 0 < gzip_bits_per_byte(["abc" * 1000]) < 1
