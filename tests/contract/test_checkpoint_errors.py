"""Every way in which a checkpoint's files can be wrong, and what is said about it."""

from __future__ import annotations

import json
import pickle

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5fn.checkpoint import CheckpointError, inspect_checkpoint, load_checkpoint, save_checkpoint
from glm5fn.config import ConfigError, VisionConfig
from glm5fn.params import init_params
from glm5fn.testing.compare import assert_bitwise
from glm5fn.testing.inputs.checkpoint import PREFIX, TINY, edit_file, make_params, quantise_file


@pytest.fixture(scope="module")
def params():
    return make_params()


@pytest.fixture
def folder(tmp_path, params):
    """A checkpoint in one file, to be changed."""
    save_checkpoint(TINY, params, tmp_path / "model")
    return tmp_path / "model"


def _report(folder, **kwargs):
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(folder, **kwargs)
    assert str(error.value) == str(error.value.report)
    return error.value.report


def test_one_report_lists_everything(folder):
    def change(tensors):
        del tensors[PREFIX + "layers.1.self_attn.A_log"]
        tensors["model.language_model.layers.0.surprise"] = torch.zeros(1)
        tensors[PREFIX + "norm.weight"] = torch.zeros(7, dtype=torch.bfloat16)
        tensors[PREFIX + "layers.2.hc_ffn_base"] = tensors[PREFIX + "layers.2.hc_ffn_base"].bfloat16()
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int32)

    edit_file(folder / "model.safetensors", change)
    report = _report(folder)
    assert report.missing == (PREFIX + "layers.1.self_attn.A_log",)
    assert report.unexpected == (PREFIX + "layers.0.surprise",)
    assert report.wrong_shape == ((PREFIX + "norm.weight", (7,), (136,)),)
    assert set(report.wrong_dtype) == {
        (PREFIX + "layers.2.hc_ffn_base", "BF16", "F32"),
        ("lm_head.weight", "I32", "BF16 or F16 or F32 or F8_E4M3"),
    }
    text = str(report)
    for line in (
        "does not fit its config.json; nothing was loaded.",
        "missing (1):\n  model.language_model.layers.1.self_attn.A_log",
        "unexpected (1):\n  model.language_model.layers.0.surprise",
        "wrong shape (1):\n  model.language_model.norm.weight: [7], must be [136]",
        "wrong dtype (2):",
        "model.language_model.layers.2.hc_ffn_base: BF16, must be F32",
    ):
        assert line in text
    assert not inspect_checkpoint(folder).ok


def test_long_lists_are_printed_in_part_and_kept_in_full(folder):
    edit_file(
        folder / "model.safetensors",
        lambda tensors: [tensors.pop(name) for name in list(tensors) if ".experts." in name],
    )
    report = _report(folder)
    assert len(report.missing) == 4 * 4 * 3
    assert "missing (48):" in str(report)
    assert "… and 38 more" in str(report)
    assert len(str(report).splitlines()) == 1 + 1 + 10 + 1


def test_nothing_is_read_before_the_check(folder, monkeypatch):
    from glm5fn.shards import Shards

    edit_file(folder / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight"))
    monkeypatch.setattr(Shards, "tensor", lambda *_: pytest.fail("a weight was read"))
    _report(folder)


def test_hint_when_only_the_mtp_layer_is_missing(folder, params):
    edit_file(folder / "model.safetensors", lambda t: [t.pop(name) for name in list(t) if ".layers.5." in name])
    report = _report(folder)
    assert "Load with mtp=False" in str(report)
    assert_bitwise(load_checkpoint(folder, mtp=False)[1], params._replace(mtp=()))


def test_hint_when_the_config_forgets_the_mtp_layer(folder):
    data = json.loads((folder / "config.json").read_text())
    data["text_config"]["num_nextn_predict_layers"] = 0
    (folder / "config.json").write_text(json.dumps(data))
    report = _report(folder)
    assert all(".layers.5." in name for name in report.unexpected)
    assert "set num_nextn_predict_layers to 1" in str(report)


def test_hint_for_names_in_memory(folder):
    edit_file(
        folder / "model.safetensors",
        lambda t: t.update({PREFIX + "layers.0.attn_hc.fn": t.pop(PREFIX + "layers.0.hc_attn_fn")}),
    )
    assert "save_original_format=True" in str(_report(folder))


def test_tied_head_on_disk_is_unexpected(folder):
    data = json.loads((folder / "config.json").read_text())
    data["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(data))
    assert _report(folder).unexpected == ("lm_head.weight",)


@pytest.mark.parametrize("vision", [None, VisionConfig(depth=1)])
def test_vision_tensors_are_recognised_and_left_alone(tmp_path, vision):
    cfg = attrs.evolve(TINY, vision=vision)
    params = init_params(cfg)
    save_checkpoint(cfg, params, tmp_path / "model")
    names = {"model.visual.patch_embed.proj.bias", "model.visual.blocks.0.attn.q_norm.weight"}
    edit_file(tmp_path / "model" / "model.safetensors", lambda t: t.update({name: torch.zeros(1) for name in names}))
    _, loaded = load_checkpoint(tmp_path / "model")
    assert_bitwise(loaded, params)
    report = inspect_checkpoint(tmp_path / "model")
    assert set(report.not_loaded) == names
    assert "not loaded: 2 tensors of the vision tower" in str(report)
    if vision is not None:
        edit_file(
            tmp_path / "model" / "model.safetensors",
            lambda t: t.update({"model.visual.blocks.1.norm1.weight": torch.zeros(1)}),
        )
        assert _report(tmp_path / "model").unexpected == ("model.visual.blocks.1.norm1.weight",)


@pytest.fixture
def sharded(tmp_path, params):
    save_checkpoint(TINY, params, tmp_path / "sharded", shard_bytes=60_000)
    return tmp_path / "sharded"


def _edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def test_wrong_shard_in_the_index(sharded):
    name = PREFIX + "layers.0.self_attn.q_proj.weight"
    shards = sorted(f.name for f in sharded.glob("model-*"))
    _edit_index(sharded, lambda index: index["weight_map"].update({name: shards[-1]}))
    report = _report(sharded)
    assert report.misplaced == ((name, shards[-1]),)
    assert f"not in the file that the index names (1):\n  {name}, placed in {shards[-1]}" in str(report)


def test_missing_and_broken_shards_are_all_reported(sharded):
    shards = sorted(sharded.glob("model-*"))
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-10])
    shards[2].write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    report = _report(sharded)
    assert [file for file, _ in report.unreadable] == [s.name for s in shards[:3]]
    assert (report.missing, report.misplaced, report.unexpected) == ((), (), ())
    reasons = dict(report.unreadable)
    assert reasons[shards[0].name] == "the file is missing"
    assert reasons[shards[1].name].startswith("truncated, or not a safetensors file (")
    assert "unreadable file (3):" in str(report)


def test_scales_of_unreadable_shards_are_not_called_unexpected(folder):
    quantise_file(folder / "model.safetensors", lambda name: "experts" in name)
    tensors = load_file(folder / "model.safetensors")
    scales = {name: x for name, x in tensors.items() if name.endswith("_scale_inv")}
    (folder / "model.safetensors").unlink()
    save_file(scales, folder / "b.safetensors")
    files = {name: "b.safetensors" if name in scales else "a.safetensors" for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    report = _report(folder)
    assert report.unreadable == (("a.safetensors", "the file is missing"),)
    assert report.unexpected == ()


def test_tensor_that_the_index_does_not_list(sharded):
    name = PREFIX + "layers.0.self_attn.q_proj.weight"
    _edit_index(sharded, lambda index: index["weight_map"].pop(name))
    report = _report(sharded)
    assert report.missing == (name,)
    assert report.unexpected == (
        f"{name} (in model-00001-of-00015.safetensors, but not in model.safetensors.index.json)",
    )


@pytest.mark.parametrize(
    "file",
    [
        "/etc/model.safetensors",
        "../model.safetensors",
        "sub/../../model.safetensors",
        "C:\\model.safetensors",
        "\\\\host\\share\\model.safetensors",
        "..\\model.safetensors",
        "model.bin",
        "",
    ],
)
def test_index_must_stay_inside_the_folder(sharded, file, monkeypatch):
    from glm5fn.shards import Shards

    _edit_index(sharded, lambda index: index["weight_map"].update({"lm_head.weight": file}))
    monkeypatch.setattr(Shards, "header", lambda *_: pytest.fail("a file was opened"))
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(sharded)
    assert f"places tensors in {file!r}; it may only name .safetensors files inside its own folder" in str(error.value)


def test_subfolders_and_links_are_fine(sharded, params, tmp_path):
    (sharded / "parts").mkdir()
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    first, second = sorted(sharded.glob("model-*"))[:2]
    first.rename(sharded / "parts" / first.name)
    second.rename(blobs / "0123")
    second.symlink_to(blobs / "0123")
    moved = {first.name: f"parts/{first.name}"}
    _edit_index(sharded, lambda index: index.update(
        weight_map={k: moved.get(v, v) for k, v in index["weight_map"].items()}))  # fmt: skip
    assert_bitwise(load_checkpoint(sharded)[1], params)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", 'must hold an object "weight_map"'),
        ('{"weight_map": []}', 'must hold an object "weight_map"'),
        ('{"weight_map": {"a": 1}}', 'must hold an object "weight_map"'),
    ],
)
def test_broken_index(sharded, content, message):
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(sharded)


def test_several_files_without_an_index(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"holds 15 safetensors files \(model-00001-.*but no model.safetensors.index"
    ):
        load_checkpoint(sharded)


@pytest.mark.parametrize("content", [b"", b"hello, this is not safetensors", b"\x10\0\0\0\0\0\0\0{broken json....."])
def test_single_file_that_is_not_safetensors(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"model.safetensors cannot be read: truncated, or not a safetensors file"
    ):
        load_checkpoint(folder)


def test_truncated_single_file(folder):
    data = (folder / "model.safetensors").read_bytes()
    for size in (len(data) - 1, len(data) // 2, 100, 7):
        (folder / "model.safetensors").write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="cannot be read: truncated"):
            load_checkpoint(folder)


class _Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was opened",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_never_opened(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(CheckpointError, match=f"no safetensors file, only {name}.*never opened; convert"):
        load_checkpoint(folder)
    (folder / name).rename(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(folder)


def test_folders_without_a_checkpoint(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist; give the folder"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="is a file; give the folder"):
        load_checkpoint(folder / "model.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty holds no config.json"):
        load_checkpoint(tmp_path / "empty")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no safetensors file: expected model.safetensors, or"):
        load_checkpoint(folder)
    (folder / "config.json").write_text('{"hidden_size": 0}')
    with pytest.raises(ConfigError, match="hidden_size"):
        load_checkpoint(folder)
