"""The training script, on a tiny model for a few steps."""

import json

import pytest
import torch

import glm5fn
from glm5fn.params import named_leaves
from training import train as script
from training.data import Corpus
from training.objective import Observer, losses

TINY = {
    **script.CONFIG,
    "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "n_routed_experts": 4,
    "num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 8,
    "q_lora_rank": 8, "index_topk": 16, "index_head_dim": 8, "linear_num_heads": 2, "linear_head_dim": 8,
}  # fmt: skip


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(script, "CONFIG", TINY)
    monkeypatch.setattr(script, "TOKENS", 48)
    monkeypatch.setattr(script, "BATCH", 2)
    text = 'The "for" statement is used to iterate over the elements of a sequence.\n' * 20
    monkeypatch.setattr(script, "corpus", lambda: Corpus([text], [text.upper()], [text[:300]]))
    with torch.compiler.set_stance("force_eager"):
        yield


def values(run):
    return torch.load(run / "state.pt", weights_only=True)["params"]


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path):
    script.train(tmp_path / "whole", steps=4, minutes=9, seed=1)
    script.train(tmp_path / "cut", steps=4, minutes=0, seed=1)  # stops after its first step
    assert torch.load(tmp_path / "cut/state.pt", weights_only=True)["step"] == 1
    script.train(tmp_path / "cut", steps=4, minutes=9, seed=1)
    whole, cut = values(tmp_path / "whole"), values(tmp_path / "cut")
    assert all(torch.equal(whole[path], cut[path]) for path in whole)
    steps = [json.loads(line)["step"] for line in (tmp_path / "cut/log.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3]


@pytest.mark.parametrize("dense", [True, False])
def test_every_parameter_is_trained(dense):
    cfg = glm5fn.Config.from_dict(TINY)
    params = script.map_leaves(lambda p: p.requires_grad_(), glm5fn.init_params(cfg, seed=0))
    observer = Observer(dense=dense)
    result = losses(params, cfg, torch.randint(0, 256, (2, 64)), observer)
    sum(result).backward()
    untrained = [path for path, p in named_leaves(params) if p.grad is None or not p.grad.abs().max() > 0]
    # The correction bias of a router is moved by the load, not by a gradient.
    assert all(path.endswith("ffn.bias") for path in untrained), untrained
    assert len(observer.loads) == 4
    assert all(int(load.sum()) > 0 for load in observer.loads)


def test_the_training_backend_selects_and_attends_as_the_reference_does():
    cfg = glm5fn.Config.from_dict(TINY)
    params = glm5fn.init_params(cfg, seed=0)
    tokens = torch.randint(0, 256, (2, 64))
    result = losses(params, cfg, tokens, Observer(dense=False))
    logits, _ = glm5fn.forward(params, cfg, tokens[:, :-1])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(result.main, expected, rtol=1e-5, atol=1e-5)


def test_training_lowers_the_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "WARMUP", 2)
    script.train(tmp_path, steps=25, minutes=9, seed=0)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert log[-1]["main"] < log[0]["main"] - 0.5
    assert "held_out" in log[-1]
