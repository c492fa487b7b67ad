"""What `describe` says of a file, and that it never raises on an open one."""

from __future__ import annotations

import json

import pytest

from ops.bench import synthetic
from prism_core.gguf import describe, gguf_from_buffers, open_gguf
from prism_core.gguf.describe import class_of


def test_the_facts_of_a_reference_file(data):
    path = data / "tiny-qwen3-q4_k_m" / "tiny-qwen3-q4_k_m.gguf"
    with open_gguf(path) as file:
        facts = describe(file)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["architecture"] == "qwen3"
    assert facts["file_bytes"] == path.stat().st_size
    assert (facts["layers"], facts["context_length"], facts["embedding_length"]) == (3, 2048, 256)
    assert facts["types"]["attention"] == {"Q4_K": 11, "Q6_K": 1}
    assert facts["types"]["ffn"] == {"Q4_K": 8, "Q6_K": 1}
    assert facts["types"]["embedding"] == {"Q6_K": 1}
    assert "head" not in facts["types"]
    assert facts["tied_head"] is True
    assert facts["tokenizer"] == {"model": "gpt2", "pre": "qwen2", "tokens": 1024, "chat_template": True}
    assert facts["rotation"] is None
    assert facts["parts"] == 1
    assert 4.5 < facts["bits_per_weight"] < 5.2


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3", "qwen35"])
def test_every_tensor_of_every_architecture_has_a_class(architecture, data):
    with open_gguf(next(data.glob(f"tiny-{architecture}-q8_0/*.gguf"))) as file:
        facts = describe(file)
        assert "other" not in facts["types"]
        assert sum(sum(types.values()) for types in facts["types"].values()) == len(file.tensors)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "embedding"), ("output.weight", "head"), ("output_norm.weight", "norms"),
        ("blk.12.attn_q.weight", "attention"), ("blk.0.attn_q.bias", "attention"),
        ("blk.0.attn_q_norm.weight", "norms"),
        ("blk.3.ffn_down.weight", "ffn"), ("blk.3.ssm_a", "recurrent"), ("blk.3.ssm_norm.weight", "norms"),
        ("rope_freqs.weight", "other"), ("blk.", "other"), ("v.blk.0.attn_q.weight", "other"),
    ],
)  # fmt: skip
def test_classes_go_by_name(name, expected):
    assert class_of(name) == expected


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"x.block_count": "many", "x.context_length": 1.5, "general.name": 7, "tokenizer.ggml.model": 3},
        {"tokenizer.ggml.tokens": 12, "tokenizer.chat_template": [1, 2], "general.license": True},
        {"tokenizer.ggml.tokens": [1, 2, 3]},
    ],
)
def test_missing_and_senseless_keys_are_null(keys):
    facts = describe(gguf_from_buffers([synthetic.gguf_bytes({"general.architecture": "x", **keys})]))
    assert facts["layers"] is None
    assert facts["weights"] == 0
    json.dumps(facts)
