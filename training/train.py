"""Train the checkpoint that ships with glm5fn, through the library's own functions.

python -m training.train --run runs/pydoc      # stop at any time; the same command resumes
python -m training.train --run runs/pydoc --export src/glm5fn/assets/pydoc-3m
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree
from tqdm import tqdm

import glm5fn
from glm5fn.params import MoE, cast, count, map_leaves, named_leaves
from training.data import VOCAB, Corpus, batches, corpus
from training.objective import Observer, losses

CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 192,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "index_topk": 128,
    "index_kpool": 4,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "linear_num_heads": 6,
    "linear_head_dim": 32,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 65536,
    "pad_token_id": 257,
    "eos_token_id": 256,
}
BATCH, TOKENS = 6, 512
PEAK_LR, WARMUP, WEIGHT_DECAY = 3e-3, 100, 0.1
DENSE_SHARE = 0.6
"""Share of the steps that attend densely, so that the indexer has learned to rank before attention depends on it."""
MTP_WEIGHT, INDEXER_WEIGHT, BALANCE_RATE = 0.3, 0.01, 1e-3


def main() -> None:
    """Parse the command line and train or export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run: state, log")
    parser.add_argument("--steps", type=int, default=2600, help="length of the learning-rate schedule")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop and save after this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--export", type=Path, help="write the checkpoint, its model card and plots to this folder, and stop"
    )
    args = parser.parse_args()
    if args.export:
        from training.card import export

        export(args.run, args.export)
    else:
        train(args.run, args.steps, args.minutes, args.seed)


def train(run: Path, steps: int, minutes: float, seed: int) -> None:
    """Train for ``steps`` steps or ``minutes``, resuming what ``run`` holds; saves every 200 steps and at the end."""
    run.mkdir(parents=True, exist_ok=True)
    cfg, text = glm5fn.Config.from_dict(CONFIG), corpus()
    params = map_leaves(lambda p: p.requires_grad_(), glm5fn.init_params(cfg, seed=seed))
    optimizer = _optimizer(params)
    begin = _resume(run, params, optimizer)
    print(
        f"{count(params):,} parameters, {sum(map(len, text.topics + text.docstrings)):,} characters, from step {begin}"
    )

    deadline = time.monotonic() + 60 * minutes
    progress = tqdm(range(begin, steps), initial=begin, total=steps, unit="step", mininterval=5)
    with (run / "log.jsonl").open("a") as log:
        for step, tokens in zip(
            progress, batches(text, batch=BATCH, tokens=TOKENS, seed=seed, start=begin), strict=False
        ):
            began = time.monotonic()
            record = _step(params, cfg, optimizer, tokens, step, steps)
            record["seconds"] = time.monotonic() - began
            if step % 200 == 199 or step + 1 == steps:
                _save(run, params, optimizer, step + 1)
                record["held_out"] = bits_per_byte(cast(params, torch.bfloat16), cfg, text.held_out)
            log.write(json.dumps(record) + "\n")
            log.flush()
            progress.set_postfix({k: f"{v:.3f}" for k, v in record.items() if k in ("main", "mtp", "indexer")})
            if time.monotonic() > deadline:
                _save(run, params, optimizer, step + 1)
                print(f"stopped at step {step + 1}; run the same command to go on")
                return


def _optimizer(params: glm5fn.Params) -> torch.optim.Optimizer:
    decayed: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for path, p in named_leaves(params):
        matrix = p.dim() >= 2 and not path.endswith((".base", ".scale", "dt_bias", "A_log", "conv", "compress_ape"))
        (decayed if matrix else others).append(p)
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.95), eps=1e-8)


def _step(
    params: glm5fn.Params,
    cfg: glm5fn.Config,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    step: int,
    steps: int,
) -> dict[str, float]:
    lr = PEAK_LR * min((step + 1) / WARMUP, 0.5 * (1 + math.cos(math.pi * step / steps)) * 0.97 + 0.03)
    for group in optimizer.param_groups:
        group["lr"] = lr
    observer = Observer(dense=step < DENSE_SHARE * steps)
    # Parameters are float32; each step computes with their bfloat16 rounding, which is what the checkpoint stores.
    loss = losses(cast(params, torch.bfloat16), cfg, tokens, observer)
    optimizer.zero_grad(set_to_none=True)
    (loss.main + MTP_WEIGHT * loss.mtp + INDEXER_WEIGHT * loss.indexer).backward()
    norm = torch.nn.utils.clip_grad_norm_(pytree.tree_leaves(params), 1.0)
    optimizer.step()
    _balance(params, observer.loads)
    return {"step": step, "lr": lr, "grad_norm": norm.item()} | {k: v.item() for k, v in loss._asdict().items()}


@torch.no_grad()
def _balance(params: glm5fn.Params, loads: list[torch.Tensor]) -> None:
    """Move each router's correction bias towards equal load (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)."""
    routers = [p.ffn.bias for p in (*params.layers, *params.mtp) if p is not None and isinstance(p.ffn, MoE)]
    for bias, load in zip(routers, loads, strict=True):
        load = load.float()
        bias += BALANCE_RATE * (load.mean() - load).sign()


@torch.no_grad()
def bits_per_byte(params: glm5fn.Params, cfg: glm5fn.Config, documents: list[str]) -> float:
    """Bits per byte of ``documents``, each read as one sequence from its second byte on."""
    bits = size = 0.0
    for text in documents:
        tokens = torch.tensor([list(text.encode())])
        logits, _ = glm5fn.forward(params, cfg, tokens[:, :-1])
        bits += F.cross_entropy(logits[0].float(), tokens[0, 1:], reduction="sum").item() / math.log(2)
        size += tokens.shape[1] - 1
    return bits / size


def _save(run: Path, params: glm5fn.Params, optimizer: torch.optim.Optimizer, step: int) -> None:
    state = {
        "step": step,
        "params": {path: p.detach() for path, p in named_leaves(params)},
        "optimizer": optimizer.state_dict(),
    }
    torch.save(state, run / "state.tmp")
    (run / "state.tmp").replace(run / "state.pt")


def _resume(run: Path, params: glm5fn.Params, optimizer: torch.optim.Optimizer) -> int:
    if not (run / "state.pt").exists():
        return 0
    state = torch.load(run / "state.pt", weights_only=True)
    with torch.no_grad():
        for path, p in named_leaves(params):
            p.copy_(state["params"][path])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def load_run(run: Path) -> tuple[glm5fn.Config, glm5fn.Params, Corpus]:
    """The configuration, the float32 parameters and the corpus of a saved run."""
    cfg = glm5fn.Config.from_dict(CONFIG)
    params = glm5fn.init_params(cfg)
    state = torch.load(run / "state.pt", weights_only=True)
    for path, p in named_leaves(params):
        p.copy_(state["params"][path])
    return cfg, params, corpus()


if __name__ == "__main__":
    main()
