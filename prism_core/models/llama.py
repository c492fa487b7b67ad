"""llama: pre-norm blocks of grouped-query attention with interleaved RoPE, and a SiLU-gated feed-forward network.

    x += Wo . attention(rope(q), rope(k), v)      q, k, v = Wq a, Wk a, Wv a      a = rms(x) * attn_norm
    x += Wdown . (silu(Wgate h) * Wup h)                                          h = rms(x) * ffn_norm
    logits = W . (rms(x) * output_norm)

Optional biases on every projection; `rope_freqs.weight` divides the angles (llama3).
"""

from __future__ import annotations

from prism_core.errors import ModelError
from prism_core.models.blocks import feed_forward, project_out, project_qkv
from prism_core.models.graph import Graph


def build(g: Graph) -> None:
    """Write the model into `g`."""
    h = g.hyper
    if h.rope.dims != h.head_dim:
        raise ModelError(f"llama.rope.dimension_count {h.rope.dims} must equal the head size {h.head_dim}")
    x = g.embed()
    turn = g.rope_table(h.rope, divisors="rope_freqs.weight")
    for layer in range(h.layers):
        a = g.rms_norm(x, f"blk.{layer}.attn_norm.weight")
        q, k, v = project_qkv(g, a, layer)
        g.rope(q, turn, h.heads[layer], h.head_dim, interleaved=True)
        g.rope(k, turn, h.kv_heads[layer], h.head_dim, interleaved=True)
        g.add(x, project_out(g, g.attention(q, k, v, layer=layer, scale=h.head_dim**-0.5), layer))
        g.add(x, feed_forward(g, g.rms_norm(x, f"blk.{layer}.ffn_norm.weight"), layer))
    g.head(x)
