"""Templates for files that carry none, chosen by the tokens that the vocabulary has.

A model trained on another format will answer worse with these; `ChatTemplate.describe` says when one is in use.
"""

from __future__ import annotations

from typing import Final

from prism_core.tokenizer.vocabulary import CONTROL, Vocabulary

_CHATML: Final = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

_GEMMA: Final = """
{{- bos_token }}
{%- set waiting = namespace(text='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set waiting.text = waiting.text + message.content + '\\n\\n' %}
    {%- elif message.role == 'assistant' %}
        {{- '<start_of_turn>model\\n' + message.content + '<end_of_turn>\\n' }}
    {%- else %}
        {{- '<start_of_turn>user\\n' + waiting.text + message.content + '<end_of_turn>\\n' }}
        {%- set waiting.text = '' %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}"""

# the line break after the role is a clean seam: an answer that follows it starts without a space
_PLAIN: Final = """
{%- for message in messages %}
    {{- message.role + ':\\n' + message.content + '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'assistant:\\n' }}
{%- endif %}"""


def fallback_for(vocabulary: Vocabulary) -> tuple[str, str]:
    """(name, template): "chatml" or "gemma" where their turn tokens exist, else "plain" role and content lines."""
    control = {vocabulary.texts[index] for index in vocabulary.ids_of_type(CONTROL)}
    if {"<|im_start|>", "<|im_end|>"} <= control:
        return "chatml", _CHATML
    if {"<start_of_turn>", "<end_of_turn>"} <= control and "bos" in vocabulary.special_ids:
        return "gemma", _GEMMA
    return "plain", _PLAIN
