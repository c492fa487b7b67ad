"""The two blocks that nearly every architecture repeats, in the words of the builder."""

from __future__ import annotations

from prism_core.models.graph import Graph
from prism_core.models.symbols import Buffer


def project_qkv(g: Graph, a: Buffer, layer: int, *, gates: bool = False) -> tuple[Buffer, Buffer, Buffer]:
    """q, k, v = attn_q a, attn_k a, attn_v a, with biases where the file has them.

    With `gates` each head of q is followed by as many values that gate its result.
    """
    at = f"blk.{layer}."
    heads, kv_heads, dim = g.hyper.attention_sizes(layer)
    q, k, v = g.linear(
        a,
        (f"{at}attn_q.weight", "q", heads * dim * (2 if gates else 1)),
        (f"{at}attn_k.weight", "k", kv_heads * dim),
        (f"{at}attn_v.weight", "v", kv_heads * dim),
    )
    for buffer, name in ((q, "attn_q"), (k, "attn_k"), (v, "attn_v")):
        g.bias(buffer, f"{at}{name}.bias")
    return q, k, v


def project_out(g: Graph, attended: Buffer, layer: int) -> Buffer:
    """attn_output . attended, with its bias where the file has one."""
    (out,) = g.linear(attended, (f"blk.{layer}.attn_output.weight", "projected", g.hyper.width))
    g.bias(out, f"blk.{layer}.attn_output.bias")
    return out


def feed_forward(g: Graph, h: Buffer, layer: int, activation: str = "silu") -> Buffer:
    """down . (activation(gate h) * up h)."""
    at, width = f"blk.{layer}.ffn_", g.hyper.feed_forward[layer]
    gate, up = g.linear(h, (f"{at}gate.weight", "gate", width), (f"{at}up.weight", "up", width))
    g.bias(gate, f"{at}gate.bias")
    g.bias(up, f"{at}up.bias")
    (down,) = g.linear(g.gated(activation, gate, up), (f"{at}down.weight", "projected", g.hyper.width))
    g.bias(down, f"{at}down.bias")
    return down
