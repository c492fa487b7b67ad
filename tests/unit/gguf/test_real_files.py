"""The two real models of the test suite: read by our reader as by the gguf package's."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGUFReader

from prism_core.gguf import check_all_scales, describe, open_gguf

pytestmark = pytest.mark.model


@pytest.mark.parametrize(
    ("fixture", "tokens"), [("smollm2_path", 49_152), pytest.param("gemma3_path", 262_144, marks=pytest.mark.full)]
)
def test_keys_and_tensors_agree_with_another_reader(fixture, tokens, request):
    path = request.getfixturevalue(fixture)
    theirs = GGUFReader(path)
    with open_gguf(path) as ours:
        check_all_scales(ours.tensors.values())
        assert describe(ours)["tokenizer"]["tokens"] == tokens
        assert len(ours.metadata["tokenizer.ggml.tokens"]) == tokens
        fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
        assert set(fields) == set(ours.metadata)
        for key, field in fields.items():
            if len(field.parts) < 1000:
                assert list(np.atleast_1d(field.contents())) == list(np.atleast_1d(ours.metadata[key])), key
        sample = fields["tokenizer.ggml.tokens"]
        for index in (0, 1, 300, tokens // 2, tokens - 1):
            raw = bytes(sample.parts[sample.data[index]])
            assert ours.metadata["tokenizer.ggml.tokens"][index] == raw.decode()
        assert [tensor.name for tensor in theirs.tensors] == list(ours.tensors)
        for tensor in theirs.tensors:
            mine = ours.tensors[tensor.name]
            assert (tuple(tensor.shape), tensor.tensor_type.name) == (mine.shape, mine.type.name)
            assert tensor.data_offset == mine.offset
            assert tensor.n_bytes == mine.nbytes
