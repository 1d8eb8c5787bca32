"""The grammar of GLM5FN_BACKEND, and when the environment is read."""

from __future__ import annotations

import subprocess
import sys

import pytest

from glm5fn import reload_env
from glm5fn.dispatch.selection import environment, parse


@pytest.mark.parametrize(("text", "everything", "per_op"), [
    ("", None, {}),
    ("  ", None, {}),
    ("auto", "auto", {}),
    ("triton", "triton", {}),
    ("triton,kda_chunk=reference", "triton", {"kda_chunk": "reference"}),
    ("kda_chunk=reference", None, {"kda_chunk": "reference"}),
    (" kda_chunk = reference , auto , l2_norm=ascendc ", "auto", {"kda_chunk": "reference", "l2_norm": "ascendc"}),
    ("ascendc,", "ascendc", {}),
])  # fmt: skip
def test_grammar(text, everything, per_op):
    assert parse(text) == (everything, per_op)


@pytest.mark.parametrize(("text", "message"), [
    ("tritn", "GLM5FN_BACKEND='tritn': no backend named 'tritn'. Known: auto, ascendc, triton, reference."),
    ("Triton", "no backend named 'Triton'"),
    ("kda_chunk=tritn", "no backend named 'tritn'"),
    ("kda_chunk=", "no backend named ''"),
    ("kda_chnk=triton", "GLM5FN_BACKEND='kda_chnk=triton': no operation named 'kda_chnk'. Known: rms_norm,"),
    ("triton,reference", "only one word may be general, got 'triton' and 'reference'"),
    ("kda_chunk=triton,kda_chunk=reference", "kda_chunk is given twice"),
    ("a=b=c", "no operation named 'a'"),
])  # fmt: skip
def test_grammar_errors(text, message):
    with pytest.raises(ValueError, match="GLM5FN_BACKEND") as error:
        parse(text)
    assert message in str(error.value)


def test_a_bad_word_is_an_error_at_every_use_until_it_is_mended(toy, monkeypatch):
    monkeypatch.setenv("GLM5FN_BACKEND", "tritn")
    with pytest.raises(ValueError, match="tritn"):
        reload_env()
    for _ in range(2):
        with pytest.raises(ValueError, match="tritn"):
            toy()
    assert toy(backend="reference") == "reference", "what is named does not need the environment"
    monkeypatch.setenv("GLM5FN_BACKEND", "reference")
    reload_env()
    assert toy() == "reference"


def test_import_does_not_read_the_environment():
    code = (
        "import torch, glm5fn; x = torch.ones(1, 2)\ntry: glm5fn.l2_norm(x)\nexcept ValueError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], env={"GLM5FN_BACKEND": "nope"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "no backend named 'nope'" in run.stdout


def test_changes_count_only_after_reload_env(toy, monkeypatch):
    toy.add("mine")
    assert toy() == "reference"
    monkeypatch.setenv("GLM5FN_BACKEND", "mine")
    assert toy() == "reference"
    reload_env()
    assert toy() == "mine"
    monkeypatch.delenv("GLM5FN_BACKEND")
    reload_env()
    assert toy() == "reference"


def test_a_registered_backend_is_a_known_word(toy, set_env):
    with pytest.raises(ValueError, match="mine"):
        parse("mine")
    toy.add("mine")
    set_env(GLM5FN_BACKEND="reference,toy=mine")
    assert environment().per_op == {"toy": "mine"}
    assert toy() == "mine"


def test_unknown_fallback_word(set_env):
    with pytest.raises(ValueError, match="GLM5FN_FALLBACK: must be one of warn, silent, error, got 'loud'"):
        set_env(GLM5FN_FALLBACK="loud")
