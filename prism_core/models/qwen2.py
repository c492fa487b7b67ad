"""qwen2: the llama block with biases on q, k and v and RoPE over the two halves of a head.

x += Wo . attention(rope(q), rope(k), v)      q, k, v = Wq a + bq, Wk a + bk, Wv a + bv
x += Wdown . (silu(Wgate h) * Wup h)
"""

from __future__ import annotations

from prism_core.models.blocks import feed_forward, project_out, project_qkv
from prism_core.models.graph import Graph


def build(g: Graph) -> None:
    """Write the model into `g`."""
    h = g.hyper
    x = g.embed()
    turn = g.rope_table(h.rope)
    for layer in range(h.layers):
        a = g.rms_norm(x, f"blk.{layer}.attn_norm.weight")
        q, k, v = project_qkv(g, a, layer)
        g.rope(q, turn, h.heads[layer], h.head_dim)
        g.rope(k, turn, h.kv_heads[layer], h.head_dim)
        g.add(x, project_out(g, g.attention(q, k, v, layer=layer, scale=h.head_dim**-0.5), layer))
        g.add(x, feed_forward(g, g.rms_norm(x, f"blk.{layer}.ffn_norm.weight"), layer))
    g.head(x)
