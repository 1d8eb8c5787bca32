"""What ``import glm5fn`` needs and how long it takes, each time in a fresh process."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

import pytest

BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked by the test", name=name)

sys.meta_path.insert(0, Blocked())
"""

OPTIONAL = ("triton", "torch_npu", "transformers", "matplotlib", "rich", "tqdm", "hypothesis", "pytest", "kernels")
OF_TORCH = {"sympy", "mpmath", "cython_runtime"}
NEEDED = {"torch", "attr", "attrs", "einops", "safetensors", "numpy"}


def python(code: str, **options):
    """Run ``code`` in a fresh process outside the repository and return what it prints as JSON."""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **options)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def test_works_with_every_optional_package_blocked(tmp_path):
    code = BLOCK.format(blocked=OPTIONAL) + (
        "import json, torch, glm5fn\n"
        "names = [getattr(glm5fn, name) and name for name in glm5fn.__all__]\n"
        "x = torch.randn(1, 5, 8)\n"
        "out = glm5fn.causal_conv1d(x, torch.randn(8, 4)).out\n"
        "table = str(glm5fn.support_table())\n"
        "print(json.dumps([names, list(out.shape), 'triton is not installed' in table]))"
    )
    names, shape, said = python(code, cwd=tmp_path)
    assert "kda_chunk" in names
    assert shape == [1, 5, 8]
    assert said


def test_imports_nothing_but_the_runtime_needs(tmp_path):
    code = (
        "import json, sys, torch\n"
        "before = set(sys.modules)\n"
        "import glm5fn\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "new = [name for name in sorted(new) if name not in sys.stdlib_module_names]\n"
        "print(json.dumps([new, 'torch._dynamo' in sys.modules]))"
    )
    new, dynamo = python(code, cwd=tmp_path)
    assert set(new) & set(OPTIONAL) == set()
    assert {name for name in new if not name.startswith("_")} <= NEEDED | OF_TORCH | {"glm5fn"}
    assert not dynamo, "it takes a second to import, and eager use never needs it"


@pytest.mark.serial
def test_import_takes_less_than_a_second_beyond_torch(tmp_path):
    code = BLOCK.format(blocked=OPTIONAL) + (
        "import json, time, torch\n"
        "start = time.perf_counter()\n"
        "import glm5fn\n"
        "print(json.dumps(time.perf_counter() - start))"
    )
    assert statistics.median(python(code, cwd=tmp_path) for _ in range(5)) < 1.0


def test_kernels_at_the_root_is_not_a_package_of_ours(request):
    """Hugging Face's ``kernels`` distribution must be found from the root of the repository, and nothing else."""
    code = (
        "import importlib.util, json\n"
        "spec = importlib.util.find_spec('kernels')\n"
        "print(json.dumps(None if spec is None else spec.origin))"
    )
    root = request.config.rootpath
    origin = python(code, cwd=root)
    assert origin is None or not origin.startswith(str(root))


def test_public_names_are_all_there_and_no_more():
    import glm5fn

    public = {name for name in vars(glm5fn) if not name.startswith("_")}
    modules = {name for name in public if getattr(getattr(glm5fn, name), "__name__", "") == f"glm5fn.{name}"}
    assert public - modules == {name for name in glm5fn.__all__ if not name.startswith("_")}
    assert callable(glm5fn.generate), "the function, not the module of that name"
