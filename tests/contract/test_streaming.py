"""What `glm5fn generate` writes: the text to standard output as it comes, everything else to standard error."""

from __future__ import annotations

import io
import json
import sys

import pytest
import torch

from glm5fn import BackendUnavailable, ContractError, generate, load_checkpoint, save_checkpoint
from glm5fn.dispatch.selection import environment
from glm5fn.streaming import stream
from glm5fn.testing.inputs import model as inputs

CFG = inputs.config("KM", vocab_size=258, eos_token_id=[256, 257])
OPTIONS = {
    "prompt": "für", "max_new_tokens": 12, "temperature": 0.0, "top_p": 1.0, "seed": 0, "dtype": None, "device": "cpu",
    "backend": "reference", "threads": None, "prefill_chunk": 3,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _threads():
    """The command sets the threads of its process, which is this one here."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path):
    """A byte-level checkpoint whose greedy text is not all valid UTF-8."""
    save_checkpoint(CFG, inputs.params(CFG), tmp_path / "model")
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByteTokenizer"}))
    return tmp_path / "model"


def continuation(folder, prompt, n=12, **options):
    cfg, params = load_checkpoint(folder)
    return [int(step.token) for step in generate(params, cfg, list(prompt.encode()), max_new_tokens=n, **options)]


def test_text_and_report(folder, capsys):
    assert stream(str(folder), **OPTIONS) == 0
    out, err = capsys.readouterr()
    tokens = continuation(folder, "für")
    assert out == "für" + bytes(t for t in tokens if t < 256).decode(errors="replace") + "\n"
    assert f"{folder}: " in err
    assert "prompt of 4 tokens, up to 12 more" in err
    assert f"{len(tokens)} tokens at " in err
    assert "ModelCache: 1 row, capacity 15 tokens" in err
    calls = {line.split()[0]: line.split()[1:] for line in err.splitlines() if " reference " in line}
    assert calls["kda_chunk"] == ["reference", "1"], "the first piece of the prompt"
    assert calls["kda_recurrent"] == ["reference", str(len(tokens))], "the second, and one per token but the last"


def test_sampling_options_arrive(folder, capsys):
    stream(str(folder), **OPTIONS | {"temperature": 1.5, "top_p": 0.8, "seed": 3})
    tokens = continuation(folder, "für", temperature=1.5, top_p=0.8, seed=3)
    assert capsys.readouterr().out == "für" + bytes(t for t in tokens if t < 256).decode(errors="replace") + "\n"


def test_end_of_text_is_not_shown(folder, capsys):
    first = continuation(folder, "ab", 1)[0]
    config = json.loads((folder / "config.json").read_text())
    where = config.get("text_config", config)
    where["eos_token_id"] = first
    (folder / "config.json").write_text(json.dumps(config))
    stream(str(folder), **OPTIONS | {"prompt": "ab"})
    out, err = capsys.readouterr()
    assert out == "ab\n"
    assert "1 tokens at" in err


def test_prompt_from_standard_input(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("für"))
    stream(str(folder), **OPTIONS | {"prompt": "-"})
    piped = capsys.readouterr().out
    stream(str(folder), **OPTIONS)
    assert capsys.readouterr().out == piped


def test_only_the_prompt(folder, capsys):
    assert stream(str(folder), **OPTIONS | {"max_new_tokens": 0}) == 0
    assert capsys.readouterr().out == "für\n"


def test_an_empty_prompt(folder):
    with pytest.raises(ContractError, match=r"^generate: the prompt is empty; it must hold at least one character\.$"):
        stream(str(folder), **OPTIONS | {"prompt": ""})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype(folder, capsys, dtype):
    stream(str(folder), **OPTIONS | {"dtype": dtype})
    assert f"latent        [1, 15, 10] {dtype}" in capsys.readouterr().err


def test_threads(folder, capsys):
    stream(str(folder), **OPTIONS | {"max_new_tokens": 1, "threads": 2})
    assert torch.get_num_threads() == 2
    stream(str(folder), **OPTIONS | {"max_new_tokens": 1})
    assert torch.get_num_threads() == 1, "one thread is fastest for a model this small"


class NothingIsRead:
    """In place of a checkpoint's path: reading it is an error."""

    def __fspath__(self):
        raise AssertionError("the checkpoint was read")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threads": 0}, "generate: threads must be at least 1, got 0."),
        ({"threads": 10**6}, "generate: threads must be at most "),
        ({"temperature": -1.0}, "generate: temperature must be a number from 0 up, got -1.0."),
        ({"temperature": float("nan")}, "generate: temperature must be a number from 0 up, got nan."),
        ({"top_p": 1.5}, "generate: top_p must be in (0, 1], got 1.5."),
        ({"max_new_tokens": -1}, "generate: max_new_tokens must be at least 0, got -1."),
        ({"seed": 10**30}, "generate: seed must be a 64-bit number, got "),
        ({"prefill_chunk": 0}, "generate: prefill_chunk must be at least 1, got 0."),
        ({"backend": "tritn"}, "use_backend: no backend named 'tritn'. Known: auto, "),
        ({"backend": ""}, "use_backend: no backend named ''. Known: auto, "),
        ({"device": "cuda:99"}, "generate: device 'cuda:99' cannot be used here. "),
        ({"device": "nonsense"}, "generate: device 'nonsense' cannot be used here. "),
    ],
    ids=str,
)
def test_bad_options_are_found_before_anything_is_read(capsys, change, message):
    with pytest.raises(ValueError, match=r"must be|cannot be used|no backend") as error:
        stream(NothingIsRead(), **OPTIONS | change)
    assert str(error.value).startswith(message)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("name", "value"), [("GLM5FN_BACKEND", "tritn"), ("GLM5FN_FALLBACK", "loud")])
def test_bad_variables_are_found_before_anything_is_read(capsys, monkeypatch, name, value):
    environment.cache_clear()
    monkeypatch.setenv(name, value)
    try:
        with pytest.raises(ValueError, match=f"^{name}"):
            stream(NothingIsRead(), **OPTIONS)
    finally:
        environment.cache_clear()
    assert capsys.readouterr().out == ""


def test_a_backend_that_cannot_run_prints_no_text(folder, capsys):
    with pytest.raises(BackendUnavailable):
        stream(str(folder), **OPTIONS | {"backend": "ascendc"})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("from_input", [False, True])
def test_a_prompt_that_is_no_text(folder, capsys, monkeypatch, from_input):
    raw = b"f\xff"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
    prompt = "-" if from_input else raw.decode(errors="surrogateescape")
    with pytest.raises(ContractError, match=r"^generate: the prompt is not valid UTF-8\.$"):
        stream(str(folder), **OPTIONS | {"prompt": prompt})
    assert capsys.readouterr().out == ""


def test_a_closed_standard_input(folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(
        ContractError, match=r"^generate: the prompt is to come from standard input, but that is closed"
    ):
        stream(str(folder), **OPTIONS | {"prompt": "-"})
