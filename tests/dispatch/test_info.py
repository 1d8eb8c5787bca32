"""``glm5fn info``, also where things are broken, and the command line around it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import glm5fn
from glm5fn.cli import COMMANDS, main
from glm5fn.diagnostics import text


def run(*words, path=None, **variables):
    env = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **variables}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, "-m", "glm5fn", *words], env=env, capture_output=True, text=True, check=False
    )


def test_text(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"glm5fn {glm5fn.__version__}")
    for fragment in (
        "\npackages\n",
        "  torch ",
        "\nhardware\n",
        "\nselection\n",
        "\nsupport\n",
        "kda_chunk",
        "transformers",
    ):
        assert fragment in shown


def test_json(capsys):
    assert main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["glm5fn"] == glm5fn.__version__
    assert report["packages"]["torch"]["problem"] is None
    assert report["hardware"][0]["device_type"] == "cpu"
    assert report["support"]["operations"]["kda_chunk"]["backends"]["reference"] == []


def test_another_chip(capsys):
    assert main(["info", "--json", "--hardware", "Ascend310P3"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["support"]["hardware"]["soc"] == "310P"


def test_the_selection_in_force(capsys, set_env):
    set_env(GLM5FN_BACKEND="reference,kda_chunk=auto", GLM5FN_FALLBACK="silent")
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    assert "GLM5FN_BACKEND=reference,kda_chunk=auto" in shown
    assert "every operation: reference\n  kda_chunk: auto\n" in shown
    assert "on falling back to reference on an accelerator: silent" in shown


def test_a_bad_variable_is_shown_and_the_rest_too():
    found = run(GLM5FN_BACKEND="tritn")
    assert found.returncode == 0, found.stderr
    assert "no backend named 'tritn'. Known: auto, ascendc, triton, reference." in found.stdout
    assert "\npackages\n" in found.stdout
    assert "\nhardware\n" in found.stdout


@pytest.fixture
def broken(tmp_path):
    """A folder with a ``triton`` and a ``torch_npu`` that raise when they are imported."""
    (tmp_path / "triton.py").write_text("raise RuntimeError('libcuda is in pieces')\n")
    (tmp_path / "torch_npu.py").write_text("raise SystemExit('no CANN')\n")
    return tmp_path


def test_broken_packages(broken):
    found = run("--json", path=broken)
    assert found.returncode == 0, found.stderr
    report = json.loads(found.stdout)
    assert report["packages"]["triton"]["problem"] == "RuntimeError: libcuda is in pieces"
    assert report["packages"]["torch-npu"]["problem"] == "SystemExit: no CANN"
    assert report["support"]["operations"]["kda_chunk"]["auto"] == "reference"
    assert "does not work: RuntimeError: libcuda is in pieces" in text(report)


def test_a_torch_npu_that_breaks_torch_itself(broken):
    metadata = broken / "torch_npu-2.13.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    (broken / "torch_npu.py").write_text("raise ImportError('libhccl.so')\n")
    found = run("info", "--json", "--hardware", "H100", path=broken)
    assert found.returncode == 0, found.stderr
    report = json.loads(found.stdout)
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in report["packages"]["torch"]["problem"]
    assert report["packages"]["torch-npu"] == {"version": "2.13.0", "problem": "ImportError: libhccl.so"}
    assert report["support"]["hardware"]["name"] == "H100"
    code = "import glm5fn\ntry: glm5fn.kda_chunk\nexcept ImportError as error: print(error)"
    used = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(broken)}, capture_output=True, text=True)
    assert "glm5fn needs torch, but `import torch` failed. `python -m glm5fn` says more." in used.stdout


def test_no_torch_at_all(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libc10.so: cannot open')\n")
    found = run(path=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "libc10.so: cannot open" in found.stdout
    assert "torch cannot be imported, so there is nothing to say about hardware and backends." in found.stdout


def test_bad_input_is_explained_with_exit_code_2(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["nope"])
    assert exit_.value.code == 2
    assert "invalid choice: 'nope' (choose from" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        main(["info", "--jsn"])
    assert exit_.value.code == 2
    assert "unrecognized arguments: --jsn" in capsys.readouterr().err
    assert main(["info", "--hardware", "TPU"]) == 2
    error = capsys.readouterr().err
    assert "glm5fn info: No hardware named 'TPU'. Known: cpu, Ascend910B2" in error
    assert "Traceback" not in error
    with pytest.raises(ValueError, match="TPU"):
        main(["info", "--hardware", "TPU", "--traceback"])


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"glm5fn {glm5fn.__version__}\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--device", "cuda:99"], "device 'cuda:99' cannot be used here. "),
        (["--temperature", "-1"], "temperature must be a number from 0 up, got -1.0."),
        (["--threads", "0"], "threads must be at least 1, got 0."),
        (["--backend", "tritn"], "use_backend: no backend named 'tritn'."),
        (["/nowhere/at/all"], "/nowhere/at/all does not exist; expected the folder of a checkpoint."),
    ],
    ids=str,
)
def test_a_command_is_named_once(capsys, words, text):
    assert main(["generate", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"glm5fn generate: {text}")
    assert err.endswith("\n(--traceback shows where this comes from)\n")


def test_a_missing_package_is_explained(capsys, monkeypatch, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert main(["generate", str(tmp_path)]) == 2
    assert "tokenizer.json needs the package `tokenizers`: pip install tokenizers\n" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["info", "generate --max-new-tokens 1", "--version"])
@pytest.mark.parametrize(("closed", "shown"), [(">&-", "standard output is closed"), (">&- 2>&-", "")])
def test_a_closed_output(words, closed, shown):
    command = f"{sys.executable} -m glm5fn {words} {closed}"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert found.stdout == ""
    assert shown in found.stderr
    assert "Traceback" not in found.stderr


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    for command in COMMANDS:
        assert command.__name__ in shown
        assert command.__doc__


def test_a_closed_pipe_is_not_an_error():
    command = f"{sys.executable} -m glm5fn --json | head -c 10"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert len(found.stdout) == 10
    assert found.stderr == ""
