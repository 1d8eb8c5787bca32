"""Write a trained run as a checkpoint folder: weights in the official layout, tokenizer, model card, loss curve."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from string import Template

import torch

import glm5fn
from glm5fn.params import cast, count
from training.baselines import gzip_bits_per_byte, ngram_bits_per_byte
from training.train import BATCH, TOKENS, bits_per_byte, load_run

__all__ = ["export"]

PROMPT = 'The "for" statement'

CARD = Template("""\
# $name

A $parameters-parameter model of the GLM-5.3-Flash architecture (KDA linear attention, NoPE MLA with the kpool indexer,
hyper-connections, mixture of experts, one multi-token-prediction layer), made so that everything in glm5fn can be tried
without a download. It knows nothing but how Python's documentation sounds.

| | |
|---|---|
| layers | $layers |
| tokens | bytes (0-255), end of document 256, padding 257 |
| sparse attention | $topk tokens in pools of $kpool, so prompts longer than $topk bytes exercise it |
| weights | bfloat16; float32 where the model needs it; `model.safetensors`, official tensor names |
| data | Python $python's own text: $topics characters of the language reference (`pydoc_data.topics`), $docstrings of docstrings; half of each batch (PSF licence) |
| training | $steps steps of $batch x $tokens bytes, AdamW, $hours h; dense attention for 60 % of it, then sparse |
| script | `python -m training.train --run runs/pydoc` |

## Held-out text
$held_out characters of reference topics; every paragraph of theirs was removed from the training text.

| | bits per byte |
|---|---|
| this model, bfloat16, sparse attention, each topic from its second byte on | **$model** |
| byte 5-gram, Witten-Bell, same training text | $ngram |
| gzip -9 | $gzip |

![loss](loss.png)

The last step was kept; the held-out loss was lowest (about 1.44) near step 2000. Held-out text is reference topics only, half of each
training batch is docstrings, which are harder: that is why the held-out curve starts below. Greedy continuations of some prompts
end in a run of spaces, as the tables in the training text do; `--temperature 0.7 --top-p 0.9` helps often, not always.

## Sample
Greedy, after `$prompt`:

```text
$sample
```

The training text is copyright of the Python Software Foundation, used under the PSF License Agreement.
""")


def export(run: Path, folder: Path) -> None:
    """Write the run's last saved state to ``folder``."""
    cfg, params, text = load_run(run)
    params = cast(params, torch.bfloat16)
    glm5fn.save_checkpoint(cfg, params, folder, overwrite=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByteTokenizer"}) + "\n")
    log = _log(run)
    _plot(log, folder / "loss.png")

    # What is described is what was written, so it is read back.
    cfg, params = glm5fn.load_checkpoint(folder)
    tokenizer = glm5fn.load_tokenizer(folder)
    steps = glm5fn.generate(params, cfg, tokenizer.encode(PROMPT), max_new_tokens=400)
    sample = tokenizer.decode_bytes(int(step.token[0]) for step in steps).decode(errors="replace")
    train = text.topics + text.docstrings
    (folder / "README.md").write_text(
        CARD.substitute(
            name=folder.name,
            parameters=f"{count(params) / 1e6:.1f}-million",
            layers=", ".join(type(p.attn).__name__ for p in params.layers if p is not None)
            + f" and one MTP layer; hidden size {cfg.hidden_size}",
            topk=cfg.index_topk,
            kpool=cfg.index_kpool,
            python=platform.python_version(),
            topics=f"{sum(map(len, text.topics)):,}",
            docstrings=f"{sum(map(len, text.docstrings)):,}",
            held_out=f"{sum(map(len, text.held_out)):,}",
            steps=log[-1]["step"] + 1,
            batch=BATCH,
            tokens=TOKENS,
            hours=f"{sum(r['seconds'] for r in log) / 3600:.1f}",
            model=f"{bits_per_byte(params, cfg, text.held_out):.3f}",
            ngram=f"{ngram_bits_per_byte(train, text.held_out):.3f}",
            gzip=f"{gzip_bits_per_byte(text.held_out):.3f}",
            prompt=PROMPT,
            sample=PROMPT + sample,
        )
    )
    print((folder / "README.md").read_text())


def _log(run: Path) -> list[dict]:
    """The log's last record of each step: a run that was cut repeats the steps since its last save."""
    records = {r["step"]: r for r in map(json.loads, (run / "log.jsonl").read_text().splitlines())}
    return [records[step] for step in sorted(records)]


def _plot(log: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    nats_to_bits = 1 / 0.6931471805599453
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, label in (("main", "next byte, training"), ("mtp", "byte after next (MTP), training")):
        values = torch.tensor([r[name] * nats_to_bits for r in log])
        smooth = values[: len(values) // 20 * 20].view(-1, 20).mean(1)
        axes.plot([10 + 20 * i for i in range(len(smooth))], smooth, label=label, linewidth=1)
    held_out = [(r["step"] + 1, r["held_out"]) for r in log if "held_out" in r]
    axes.plot(*zip(*held_out, strict=True), "o-", color="black", markersize=3, label="next byte, held out")
    axes.set(title="Training of the shipped checkpoint", xlabel="step", ylabel="bits per byte", ylim=(0.5, 4))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
