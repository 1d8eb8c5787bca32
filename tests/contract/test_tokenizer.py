"""Tokenizers: there and back, and streams that lose no character and never show half of one."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5fn.tokenizer import ByteTokenizer, load_tokenizer, stream_text

TEXTS = [
    "",
    "plain",
    "Grüße, 世界!",
    "🙂🙃👩‍👩‍👧",
    "a\n\tb\x00c",
    " leading and  double  spaces ",
    "e\u0301 \ufffd end",
]
REPLACEMENT = "\ufffd"


# ---------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_there_and_back(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode_bytes(ids).decode() == text


def test_special_ids_have_no_bytes():
    assert ByteTokenizer().decode_bytes([256, 72, 300, 105, -1]) == b"Hi"


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.text(max_size=20))
def test_a_stream_of_bytes_is_the_text(text):
    pieces = list(stream_text(ByteTokenizer(), list(text.encode())))
    assert "".join(pieces) == text
    assert len(pieces) == len(text.encode()) + 1, "one piece per token, and the rest"


def test_a_split_character_comes_with_its_last_byte():
    assert list(stream_text(ByteTokenizer(), "a€b".encode())) == ["a", "", "", "€", "b", ""]


def test_special_tokens_do_not_break_a_character():
    euro = list("€".encode())
    assert list(stream_text(ByteTokenizer(), [euro[0], 256, *euro[1:]])) == ["", "", "", "€", ""]


@pytest.mark.parametrize(
    ("ids", "text"),
    [([0xE2, 0x82], REPLACEMENT), ([0x41, 0xFF, 0x42], f"A{REPLACEMENT}B"), ([0xE2, 0x41], f"{REPLACEMENT}A")],
)
def test_bytes_that_are_no_text_are_shown_as_such(ids, text):
    assert "".join(stream_text(ByteTokenizer(), ids)) == text == bytes(ids).decode(errors="replace")


def test_pieces_come_as_the_tokens_do():
    """The stream asks for no token before it has shown the one before."""
    asked = []

    def tokens():
        for byte in b"abc":
            asked.append(byte)
            yield byte

    stream = stream_text(ByteTokenizer(), tokens())
    assert (next(stream), asked) == ("a", [97])
    assert (next(stream), asked) == ("b", [97, 98])


# ------------------------------------------------------------------------------------------------ tokenizers of the Hub


def byte_level(tokenizers):
    """Byte-level BPE as in GPT-2 and GLM: tokens are pieces of UTF-8, so characters are split."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS, "the theme of the thesis " * 5], trainer)
    return tokenizer


def metaspace(tokenizers):
    """SentencePiece-like: a space is part of the word after it, and is dropped at the start of a text."""
    words = ["<unk>", "▁Hello", "▁wor", "ld", "!", "▁"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("|", "removed")
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


@pytest.fixture
def folder(tmp_path):
    """``folder(make)``: a checkpoint folder with the tokenizer that ``make`` builds."""
    tokenizers = pytest.importorskip("tokenizers")

    def save(make):
        make(tokenizers).save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        return tmp_path

    return save


@pytest.mark.parametrize("text", TEXTS)
def test_the_hubs_format_there_and_back_and_streamed(folder, text):
    tokenizer = load_tokenizer(folder(byte_level))
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids).decode() == text
    assert len(ids) < len(text.encode()) or not text.startswith("plain")
    pieces = list(stream_text(tokenizer, ids))
    assert "".join(pieces) == text
    assert len(pieces) == len(ids) + 1


def test_the_last_character_of_a_stream_is_shown(folder):
    """Also when it is cut: as what decoding all at once gives."""
    tokenizer = load_tokenizer(folder(byte_level))
    ids = tokenizer.encode("ok 𝄞")[:-1]
    assert "".join(stream_text(tokenizer, ids)) == tokenizer.decode_bytes(ids).decode() == f"ok {REPLACEMENT}"
    assert "".join(stream_text(tokenizer, tokenizer.encode("ends with \ufffd"))) == "ends with \ufffd"


def test_no_half_characters_on_the_way(folder):
    tokenizer = load_tokenizer(folder(byte_level))
    pieces = list(stream_text(tokenizer, tokenizer.encode("𝄞a€b🙂c")))
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "" in pieces[:-1], "no character was split, so nothing was tested"


def test_special_tokens_are_not_shown_and_lose_nothing(folder):
    tokenizer = load_tokenizer(folder(byte_level))
    clef = tokenizer.encode("𝄞")
    assert len(clef) > 1
    assert "".join(stream_text(tokenizer, [0, *clef, 0, *tokenizer.encode("th"), 0])) == "𝄞th"


def test_spaces_between_words_survive(folder):
    """A decoder that strips the space at the start of a text must not do so in the middle of a stream."""
    tokenizer = load_tokenizer(folder(metaspace))
    ids = [1, 2, 3, 4, 5, 1, 2]
    assert list(stream_text(tokenizer, ids)) == ["Hello", " wor", "ld", "!", " ", " Hello", " wor", ""]
    assert list(stream_text(tokenizer, [1, 6, 1, 2])) == ["Hello", "", " Hello", " wor", ""], "a special token between"
    assert "".join(stream_text(tokenizer, ids)) == tokenizer.decode_bytes(ids).decode()


def test_a_long_stream_does_not_decode_everything_again(folder):
    tokenizer = load_tokenizer(folder(byte_level))
    longest = 0

    class Counting:
        def decode_bytes(self, ids):
            nonlocal longest
            longest = max(longest, len(list(ids)))
            return tokenizer.decode_bytes(ids)

    text = "the theme of the thesis € " * 20
    assert "".join(stream_text(Counting(), tokenizer.encode(text))) == text
    assert longest < 10


# -------------------------------------------------------------------------------------------------------------- loading


def test_byte_tokenizer_by_name(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByteTokenizer"}')
    assert isinstance(load_tokenizer(str(tmp_path)), ByteTokenizer)


@pytest.mark.parametrize("config", [None, '{"tokenizer_class": "Other"}', "{}"])
def test_no_tokenizer(tmp_path, config):
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(FileNotFoundError) as error:
        load_tokenizer(tmp_path)
    assert str(error.value) == (
        f"{tmp_path} has no tokenizer: expected tokenizer.json, or tokenizer_config.json with class ByteTokenizer."
    )


def test_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist; expected the folder of a checkpoint\.$"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"file is a file; expected the folder of a checkpoint\.$"):
        load_tokenizer(tmp_path / "file")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"[]", "must hold a JSON object, got list."),
        (b'"ByteTokenizer"', "must hold a JSON object, got str."),
        (b"null", "must hold a JSON object, got NoneType."),
        (b"{", "is not valid JSON: Expecting property name"),
        (b"", "is not valid JSON: Expecting value"),
        (b"\xff\xfe{}", "is not valid JSON: 'utf-8' codec can't decode"),
    ],
)
def test_settings_that_cannot_be_read(tmp_path, content, problem):
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ValueError, match="tokenizer_config") as error:
        load_tokenizer(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'tokenizer_config.json'} {problem}")


@pytest.mark.parametrize("content", [b"[]", b"{", b"", b"\xff", b'{"model": {"type": "none"}}'])
def test_a_tokenizer_that_cannot_be_read(tmp_path, content):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read") as error:
        load_tokenizer(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'tokenizer.json'} cannot be read as a tokenizer: ")


def test_the_package_is_named_when_it_is_missing(folder, monkeypatch):
    path = folder(byte_level)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"tokenizer\.json needs the package `tokenizers`: pip install tokenizers$"):
        load_tokenizer(path)
