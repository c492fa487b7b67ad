"""qwen35 (Bonsai 27B): three gated delta-net layers, then one layer of gated full attention, and so on.

Delta net, for each value head with state S (key x value), one token after another:

    u = silu(conv(Wqkv a))            q, k, v = unit(u_q), unit(u_k), u_v     (value head h: key head h % groups)
    beta = sigmoid(Wbeta a)           g = ssm_a * softplus(Walpha a + dt)               (g <= 0)
    S *= exp(g)                       d = (v - S^T k) * beta
    S += k d^T                        o = S^T q / sqrt(state size)
    y = rms(o) * ssm_norm * silu(Wgate a)        x += Wout y

Full attention: Wq gives [query | gate] per head; the result is multiplied by sigmoid(gate) before Wo.
Text positions only: the multi-section RoPE is then ordinary RoPE over halves. Prediction layers
(`nextn_predict_layers`, the last ones) are not run.
"""

from __future__ import annotations

from dataclasses import dataclass

from prism_core.errors import ModelError
from prism_core.models.blocks import feed_forward, project_out, project_qkv
from prism_core.models.graph import ALL_TOKENS, Graph
from prism_core.models.hyper import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Hyper
from prism_core.models.symbols import Buffer, Operation

CONV_TAPS = 4
COLUMNS_PER_UNIT = 32
"""Value columns of a head's state that one unit of the scan keeps in the first-level cache."""
CHANNELS_PER_UNIT = 16


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of the recurrent layers."""

    groups: int
    """Key heads."""
    value_heads: int
    state: int
    """Elements of a key and of a value head."""

    @property
    def keys(self) -> int:
        return self.groups * self.state

    @property
    def values(self) -> int:
        return self.value_heads * self.state

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v side by side."""
        return 2 * self.keys + self.values


def build(g: Graph) -> None:
    """Write the model into `g`."""
    h = g.hyper
    delta = read_delta_net(h)
    layers = h.layers - h.keys.integer("nextn_predict_layers", 0, h.layers - 1, default=0)
    g.ignored += [name for name in g.shapes if layers <= _block(name) < h.layers]
    x = g.embed()
    turn = g.rope_table(h.rope)
    for layer, full in enumerate(full_attention_layers(h)[:layers]):
        at = f"blk.{layer}."
        a = g.rms_norm(x, f"{at}attn_norm.weight")
        g.add(x, _attention(g, a, turn, layer) if full else _delta_net(g, a, delta, layer))
        g.add(x, feed_forward(g, g.rms_norm(x, f"{at}post_attention_norm.weight"), layer))
    g.head(x)


def _attention(g: Graph, a: Buffer, turn: Buffer, layer: int) -> Buffer:
    at = f"blk.{layer}."
    heads, kv_heads, dim = g.hyper.attention_sizes(layer)
    q, k, v = project_qkv(g, a, layer, gates=True)
    g.head_norm(q, f"{at}attn_q_norm.weight", heads, 2 * dim)
    g.head_norm(k, f"{at}attn_k_norm.weight", kv_heads, dim)
    g.rope(q, turn, heads, 2 * dim)
    g.rope(k, turn, kv_heads, dim)
    attended = g.attention(q, k, v, layer=layer, scale=dim**-0.5, q_stride=2 * dim)
    g.chain("sigmoid_gate", attended, attended.pitch, q, q.pitch, heads, dim, 2 * dim, dim, writes=attended)
    return project_out(g, attended, layer)


def _delta_net(g: Graph, a: Buffer, delta: DeltaNet, layer: int) -> Buffer:
    at, eps = f"blk.{layer}.", float(g.hyper.eps)
    u, z, beta, alpha = g.linear(
        a,
        (f"{at}attn_qkv.weight", "u", delta.channels),
        (f"{at}attn_gate.weight", "z", delta.values),
        (f"{at}ssm_beta.weight", "beta", delta.value_heads),
        (f"{at}ssm_alpha.weight", "alpha", delta.value_heads),
    )
    window = g.state((CONV_TAPS - 1) * delta.channels)
    taps = g.vector(f"{at}ssm_conv1d.weight", CONV_TAPS, delta.channels)
    convolve = (u, u.pitch, taps, delta.channels, window, *g.workspace(4 * CONV_TAPS * CHANNELS_PER_UNIT))
    g.recurrent(Operation("convolve", convolve, delta.channels // CHANNELS_PER_UNIT, ALL_TOKENS), u)

    g.watch(u)
    dt = g.vector(f"{at}ssm_dt.bias", delta.value_heads)
    decay = g.vector(f"{at}ssm_a", delta.value_heads, high=0.0)
    g.chain("unit_length", u, u.pitch, delta.state, 2 * delta.groups, eps, writes=u)
    g.chain("delta_gates", beta, beta.pitch, alpha, alpha.pitch, dt, decay, delta.value_heads, writes=beta)

    memory = g.state(delta.values * delta.state)
    o = g.buffer("o", delta.values)
    sizes = (delta.groups, delta.state, memory)
    scan = (u, u.pitch, beta, beta.pitch, alpha, alpha.pitch, o, o.pitch, *sizes)
    columns = delta.state // COLUMNS_PER_UNIT
    g.recurrent(Operation("delta_scan", scan, delta.value_heads * columns, ALL_TOKENS), o)

    g.norm_of(o, f"{at}ssm_norm.weight", delta.state, delta.value_heads)
    (out,) = g.linear(g.gated("silu", z, o), (f"{at}ssm_out.weight", "projected", g.hyper.width))
    return out


def read_delta_net(h: Hyper) -> DeltaNet:
    """The `ssm.*` keys, checked against each other."""
    keys = h.keys
    taps = keys.integer("ssm.conv_kernel", 1, 64)
    if taps != CONV_TAPS:
        raise ModelError(f"qwen35.ssm.conv_kernel must be {CONV_TAPS}, not {taps}")
    delta = DeltaNet(
        groups=keys.integer("ssm.group_count", 1, MAX_HEADS),
        value_heads=keys.integer("ssm.time_step_rank", 1, MAX_HEADS),
        state=keys.integer("ssm.state_size", COLUMNS_PER_UNIT, 1024),
    )
    if delta.state % COLUMNS_PER_UNIT:
        raise ModelError(f"qwen35.ssm.state_size must be a multiple of {COLUMNS_PER_UNIT}, not {delta.state}")
    if delta.value_heads % delta.groups:
        raise ModelError(
            f"qwen35.ssm.time_step_rank {delta.value_heads} is not a multiple of ssm.group_count {delta.groups}"
        )
    inner = keys.integer("ssm.inner_size", 1, MAX_WIDTH)
    if inner != delta.values:
        raise ModelError(f"qwen35.ssm.inner_size is {inner}, but {delta.value_heads} heads x {delta.state} is not")
    return delta


def value_heads(h: Hyper) -> tuple[int, int]:
    """(key heads, value heads) of the delta net: what a rotation that groups value heads must know."""
    delta = read_delta_net(h)
    return delta.groups, delta.value_heads


def full_attention_layers(h: Hyper) -> list[bool]:
    """Which layers are full attention: `attention.recurrent_layers` inverted, or every n-th."""
    if h.keys.has("attention.recurrent_layers"):
        return [not recurrent for recurrent in h.keys.flags("attention.recurrent_layers", h.layers)]
    interval = h.keys.integer("full_attention_interval", 1, MAX_LAYERS, default=4)
    return [(layer + 1) % interval == 0 for layer in range(h.layers)]


def _block(name: str) -> int:
    """The layer that a tensor belongs to, -1 for none."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" and len(parts) > 2 and parts[1].isdecimal() else -1
