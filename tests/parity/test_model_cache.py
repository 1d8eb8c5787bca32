"""After the same prompt both caches hold the same: states, conv inputs, latents, index keys and pools."""

from __future__ import annotations

import pytest
import torch

from glm5fn import init_cache, prefill, use_backend
from glm5fn.layouts import kda_state_from_k_first, kda_state_to_k_first


@pytest.mark.parametrize("tokens", [3, 64, 70])
def test_caches_agree(pair, close, backend, tokens):
    one = pair("KMM", "dsd")
    cfg, W = one.cfg, one.cfg.linear_conv_kernel_dim
    prompt = torch.randint(61, (2, tokens), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        theirs = one.theirs(input_ids=prompt, use_cache=True).past_key_values
    with use_backend(backend):
        _, ours = prefill(one.params, cfg, prompt, init_cache(cfg, 2, 80, dtype=torch.float32))

    state = theirs.get_recurrent_state(0, state_idx=0)
    close(ours.layers[0].state, kda_state_from_k_first(state))
    close(kda_state_to_k_first(ours.layers[0].state), state)
    conv = theirs.get_conv_state(0, state_idx=0)[:, :, -(W - 1) :].mT
    close(ours.layers[0].conv, conv)

    for layer in (1, 2):
        latent, index = ours.layers[layer]
        close(latent[:, :tokens], theirs.layers[layer].keys[:, 0])
        assert not latent[:, tokens:].any()
        I, ring = cfg.index_head_dim, index.tail.shape[2]
        packed = theirs.layers[layer].indexer_keys
        for p in range(max(0, tokens - ring), tokens):
            close(index.tail[:, 0, p % ring], packed[:, p, :I])
            close(index.tail[:, 1, p % ring], packed[:, p, I : 2 * I])
        pools, _, valid = one.layer(layer).self_attn.indexer.get_pooled_states(packed)
        assert pools.shape[1] == tokens // cfg.index_kpool
        assert valid.all()
        if pools.numel():
            close(index.pooled[:, : pools.shape[1]], pools)
        assert not index.pooled[:, pools.shape[1] :].any()
