"""gemma3: norms before and after each block, a sliding window on most layers, GELU feed-forward, scaled embeddings.

    x = embedding * sqrt(width)
    x += rms(Wo . attention(rope(rms(q)), rope(rms(k)), v)) * post_attention_norm
    x += rms(Wdown . (gelu(Wgate h) * Wup h)) * post_ffw_norm              h = rms(x) * ffn_norm

Layer i is local iff i % pattern < pattern - 1: it sees `sliding_window` keys and turns with `rope.freq_base_swa`.
The norm weights of a file already include the + 1.
"""

from __future__ import annotations

import math
from dataclasses import replace

from prism_core.errors import ModelError
from prism_core.models.blocks import feed_forward, project_out, project_qkv
from prism_core.models.graph import Graph
from prism_core.models.hyper import MAX_LAYERS, MIN_FACTOR, Hyper, Rope

LAYERS_OF_27B = 62


def build(g: Graph) -> None:
    """Write the model into `g`."""
    h = g.hyper
    window = h.keys.integer("attention.sliding_window", 0, 1 << 24, default=0)
    pattern = h.keys.integer("attention.sliding_window_pattern", 1, MAX_LAYERS, default=6)
    softcap = h.keys.real("final_logit_softcapping", 0.0, 1e6, default=0.0)
    if 0.0 < softcap < MIN_FACTOR:
        raise ModelError(f"gemma3.final_logit_softcapping must be 0 or at least {MIN_FACTOR:g}, not {softcap:g}")
    x = g.embed()
    g.scale(x, h.width**0.5)
    everywhere, nearby = g.rope_table(h.rope), g.rope_table(local_rope(h), "rope.local")
    for layer in range(h.layers):
        at = f"blk.{layer}."
        local = window > 0 and layer % pattern < pattern - 1
        turn = nearby if local else everywhere
        q, k, v = project_qkv(g, g.rms_norm(x, f"{at}attn_norm.weight"), layer)
        for buffer, heads, norm in ((q, h.heads[layer], "attn_q_norm"), (k, h.kv_heads[layer], "attn_k_norm")):
            g.head_norm(buffer, f"{at}{norm}.weight", heads, h.head_dim)
            g.rope(buffer, turn, heads, h.head_dim)
        attended = g.attention(q, k, v, layer=layer, scale=query_scale(h, layer), window=window if local else 0)
        out = project_out(g, attended, layer)
        g.add(x, g.rms_norm(out, f"{at}post_attention_norm.weight"))
        out = feed_forward(g, g.rms_norm(x, f"{at}ffn_norm.weight"), layer, "gelu")
        g.add(x, g.rms_norm(out, f"{at}post_ffw_norm.weight"))
    g.head(x, softcap=softcap)


def local_rope(h: Hyper) -> Rope:
    """The unscaled rotation of local layers."""
    base = h.keys.real("rope.freq_base_swa", 1.0, 1e12, default=10000.0)
    return replace(h.rope, base=base, scaling="none", factor=1.0, attention_factor=1.0)


def query_scale(h: Hyper, layer: int) -> float:
    """1/sqrt(head size); the 27B model uses width/heads instead."""
    size = h.width / h.heads[layer] if h.layers == LAYERS_OF_27B else h.head_dim
    return 1.0 / math.sqrt(size)
