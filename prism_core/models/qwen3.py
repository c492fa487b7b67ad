"""qwen3 (Bonsai 1.7B, 4B, 8B): the llama block with an RMS norm on every head of q and k, before RoPE over halves.

q, k = rms(Wq a) * q_norm, rms(Wk a) * k_norm      over each head of key_length elements
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
        at = f"blk.{layer}."
        a = g.rms_norm(x, f"{at}attn_norm.weight")
        q, k, v = project_qkv(g, a, layer)
        for buffer, heads, norm in ((q, h.heads[layer], "attn_q_norm"), (k, h.kv_heads[layer], "attn_k_norm")):
            g.head_norm(buffer, f"{at}{norm}.weight", heads, h.head_dim)
            g.rope(buffer, turn, heads, h.head_dim)
        g.add(x, project_out(g, g.attention(q, k, v, layer=layer, scale=h.head_dim**-0.5), layer))
        g.add(x, feed_forward(g, g.rms_norm(x, f"{at}ffn_norm.weight"), layer))
    g.head(x)
