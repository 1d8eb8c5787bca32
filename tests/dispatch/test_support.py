"""The support table: every operation at the released shapes, for any chip, as data and as text."""

from __future__ import annotations

import attrs
import pytest

import glm5fn
from glm5fn import Hardware, register, support_table
from glm5fn.dispatch.support import released_call
from glm5fn.kernels import TABLE


@pytest.mark.parametrize("name", TABLE)
def test_every_operation_accepts_its_released_call(name):
    choice = glm5fn.explain(name, **released_call(name))
    assert choice.op == name
    assert choice.backend == "reference"


@pytest.mark.parametrize("chip", ["cpu", "Ascend910B2", "Ascend310P3", "H100", "MI300X"])
def test_reference_runs_everything_everywhere(chip):
    table = support_table(chip)
    assert [row.op for row in table.rows] == list(TABLE)
    data = table.to_dict()
    assert data["hardware"]["name"] == chip
    for operation in data["operations"].values():
        assert operation["backends"]["reference"] == []
        assert list(operation["backends"]) == ["ascendc", "triton", "reference"]


def test_where_there_is_no_kernel_it_says_so():
    missing = [
        (op, column) for op, kernels in TABLE.items() for column in ("ascendc", "triton") if column not in kernels
    ]
    data = support_table("Ascend910B2").to_dict()["operations"]
    title = {"ascendc": "AscendC", "triton": "Triton"}
    for op, column in missing:
        assert f"glm5fn {glm5fn.__version__} has no {title[column]} kernel for {op}" in data[op]["backends"][column]


def test_this_machine_by_default():
    table = support_table()
    assert table.hardware.device_type in ("cpu", "cuda", "npu")
    assert str(table).startswith(f"glm5fn {glm5fn.__version__} on {table.hardware}")


def test_text_has_a_line_for_every_operation_and_a_note_for_every_reason():
    chip = attrs.evolve(Hardware.named("H100"), triton_problem="triton 9 is installed but does not work: boom")
    table = support_table(chip)
    lines = str(table).splitlines()
    body = lines[2 : 2 + len(TABLE)]
    assert [line.split()[0] for line in body] == list(TABLE)
    notes = "\n".join(lines[2 + len(TABLE) :])
    assert notes.count("does not work: boom") == 1, "a reason that all operations share is written once"
    assert "AscendC needs an Ascend NPU, found H100 (cuda, sm_90)" in notes
    used = {
        number for line in body for number in line.replace("(", ",").replace(")", ",").split(",") if number.isdigit()
    }
    assert used == {line[1 : line.index(")")] for line in notes.splitlines()}


def test_html():
    page = support_table("H100")._repr_html_()
    assert page.count("<tr>") == len(TABLE) + 1
    assert "AscendC needs an Ascend NPU" in page


def test_a_users_kernel_shows_with_its_limits():
    def mine(x, *, eps=1e-6):
        return x

    def too_big(spec):
        return [f"last dimension must be at most 64, got {spec.shapes['x'][-1]}"]

    with register("l2_norm", "mine", mine, unsupported=too_big):
        data = support_table("cpu").to_dict()["operations"]
        assert data["l2_norm"]["backends"]["mine"] == ["last dimension must be at most 64, got 128"]
        assert "mine" in str(support_table("cpu")).splitlines()[1].split()
    assert "mine" not in data["rms_norm"]["backends"]


def test_an_unknown_chip():
    with pytest.raises(ValueError, match="No hardware named 'TPU'"):
        support_table("TPU")
