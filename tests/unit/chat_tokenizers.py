"""Tokenizers for the tests of chat forms: the default model's with other models' marks, and small
ones trained here in the manner of Llama-3 (words take one mark along, marks take line breaks)
and of sentencepiece."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Text of the template stands in the system's message, and quotes around a tool's answer.
LLAMA31 = LLAMA3.replace(
    "{{ m.content | trim }}",
    "{% if m.role == 'system' %}Today Date: 26 Jul 2024\n\n{% endif %}"
    "{{ m.content | tojson if m.role == 'tool' else m.content | trim }}",
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role in ['system', 'tool'] %}{{ raise_exception('no such role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('order') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Folds the system's text into the first user message, as later Gemma templates do.
GEMMA_FOLDING = (
    "{{ bos_token }}{% set ns = namespace(first='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.first = m.content + '\n\n' %}"
    "{% elif m.role == 'tool' %}{{ raise_exception('no such role') }}{% else %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ ns.first }}{{ m.content | trim }}<end_of_turn>\n{% set ns.first = '' %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}[SYSTEM_PROMPT] {{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
# The system's text goes to the last user message.
MISTRAL_V3 = (
    "{{ bos_token }}{% set ns = namespace(s='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.s = m.content + '\n\n' %}"
    "{% elif m.role == 'user' %}[INST] {{ ns.s if loop.last else '' }}{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{{ raise_exception('no such role') }}"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
# A tool's answer is a user message with text around it, which anybody can write.
QWEN25 = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ m.content }}\n</tool_response><|im_end|>\n{% else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The same without a text behind the answer, and role names that a blank parts from the marks.
TOOL_AS_USER = QWEN25.replace("\n</tool_response>", "")
BLANK_ROLES = (
    "{% for m in messages %}<|im_start|> {{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant\n{% endif %}"
)
# Nothing closes a message but the opener of the next.
GLM = (
    "[gMASK]<sop>{% for m in messages %}"
    "<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
VICUNA = (
    "{% for m in messages %}{{ m.role | upper }}: {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
MARKS: dict[str, list[str]] = {
    "chatml": [],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "gemma": ["<bos>", "<start_of_turn>", "<end_of_turn>"],
    "mistral": [
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[SYSTEM_PROMPT]",
        "[/SYSTEM_PROMPT]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ],
    "glm": ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    "qwen": ["<tool_response>", "</tool_response>"],
}
TEMPLATES = {
    "llama3": LLAMA3,
    "llama31": LLAMA31,
    "gemma": GEMMA,
    "gemma_folding": GEMMA_FOLDING,
    "mistral": MISTRAL,
    "mistral_v3": MISTRAL_V3,
    "glm": GLM,
    "qwen25": QWEN25,
    "qwen3": QWEN25,
    "vicuna": VICUNA,
    "tool_as_user": TOOL_AS_USER,
    "blank_roles": BLANK_ROLES,
}
MARKS_OF = {
    "llama31": "llama3",
    "gemma_folding": "gemma",
    "mistral_v3": "mistral",
    "qwen25": "chatml",
    "qwen3": "qwen",
    "vicuna": "chatml",
    "tool_as_user": "chatml",
    "blank_roles": "chatml",
}

CORPUS = [
    'The order_status: open.\n\nIt is "closed"; x=open y=(shut).\n',
    "status=open, status=closed! name: José. Wait...\r\n\r\n{'a': \"b\"}\n",
    "the state of the order is open. the state is shut?\n\n\nend of it.\n",
] * 50
LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def with_form(folder: Path, form: str) -> Any:
    """The default model's tokenizer with the marks and the template of ``form``."""
    from transformers import AutoTokenizer

    return add_form(AutoTokenizer.from_pretrained(folder), form)


def add_form(tokenizer: Any, form: str) -> Any:
    marks = MARKS[MARKS_OF.get(form, form)]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    if form in TEMPLATES:
        tokenizer.chat_template = TEMPLATES[form]
    if marks and marks[0] in ("<|begin_of_text|>", "<bos>", "<s>"):
        tokenizer.bos_token = marks[0]
    return tokenizer


def render_with(tokenizer: Any) -> Callable[[list[dict[str, str]], bool], list[int]]:
    def render(messages: list[dict[str, str]], add_generation_prompt: bool) -> list[int]:
        try:
            text = tokenizer.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except TemplateError as error:
            raise ValueError(str(error)) from error
        return list(tokenizer.encode(text, add_special_tokens=False))

    return render


def chat(*pairs: str) -> list[dict[str, str]]:
    """chat("user", "hello", "assistant", "hi") as the API spells it."""
    return [{"role": r, "content": c} for r, c in zip(pairs[::2], pairs[1::2], strict=True)]


def llama3_like() -> Any:
    """Byte-level BPE whose regex lets ``.\\n\\n`` and ``=open`` become one token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _fast(tokenizer)


def sentencepiece_like(*, prepend: bool, byte_fallback: bool = True) -> Any:
    """BPE over U+2581 with byte fallback; ``prepend``: a space in front of every text."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    steps = [normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), *steps] if prepend else steps
    )
    lines = [line for text in CORPUS for line in text.splitlines()]  # no merge spans a line
    words = [word for line in lines for word in line.replace(" ", " \u2581").split(" ")]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(words, trainer)
    spelled = json.loads(tokenizer.to_str())
    vocab = spelled["model"]["vocab"]
    spelled["model"]["byte_fallback"] = byte_fallback
    if byte_fallback:
        vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    tokenizer = Tokenizer.from_str(json.dumps(spelled))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _fast(tokenizer, unk_token="<unk>")


def _fast(tokenizer: Any, **tokens: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)
