"""What `glm5fn generate` writes: the text to standard output as it comes, everything else to standard error."""

from __future__ import annotations

import io
import json
import sys

import pytest
import torch

from glm5fn import ContractError, generate, load_checkpoint, save_checkpoint
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
    with pytest.raises(ContractError, match=r"^generate: threads must be at least 1, got 0\.$"):
        stream(str(folder), **OPTIONS | {"threads": 0})
