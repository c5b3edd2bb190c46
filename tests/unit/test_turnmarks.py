"""The marks of a chat template, read off from rendered conversations."""

from __future__ import annotations

import jinja2
import pytest

from kvedit.errors import BadRequest, Unsupported
from kvedit.lang.turn_marks import Message, Render, TurnMarks, read_turn_marks

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_DEFAULT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
) + CHATML
LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise('System role not supported') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
)
# The system message stands inside the first user message: no text of its own around it.
MISTRAL = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{% if loop.last and system %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
DROPS_THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and not loop.last %}"
    "<think></think>{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def renderer(template: str) -> Render:
    def refuse(message: str) -> None:
        raise BadRequest(f"kvedit: {message}")

    compiled = jinja2.Environment().from_string(template)

    def render(messages: list[Message], add_generation_prompt: bool) -> str:
        return compiled.render(
            messages=messages, add_generation_prompt=add_generation_prompt, **{"raise": refuse}
        )

    return render


@pytest.mark.parametrize("template", [CHATML, WITH_DEFAULT, LLAMA3])
@pytest.mark.parametrize("header", [True, False])
def test_marks_render_as_the_template_does(template: str, header: bool) -> None:
    render = renderer(template)
    roles = ["system", "user", "assistant", "user", "user", "assistant"]
    messages = [{"role": role, "content": f"text {i}"} for i, role in enumerate(roles)]
    assert read_turn_marks(render).render(messages, header) == render(messages, header)


def test_a_default_system_message_is_told_from_the_marks() -> None:
    marks = read_turn_marks(renderer(WITH_DEFAULT))
    assert marks == TurnMarks(
        {
            "system": ("<|im_start|>system\n", "<|im_end|>\n"),
            "user": ("<|im_start|>user\n", "<|im_end|>\n"),
            "assistant": ("<|im_start|>assistant\n", "<|im_end|>\n"),
        },
        "Be kind.",
    )
    assert read_turn_marks(renderer(CHATML)).default_system is None


@pytest.mark.parametrize("template", [MISTRAL, DROPS_THINKING, "{{ messages[0].content }}"])
def test_a_template_without_fixed_marks_is_refused(template: str) -> None:
    with pytest.raises(Unsupported, match="kvedit: .*chat template: expected "):
        read_turn_marks(renderer(template))


def test_the_refusal_of_a_role_comes_through() -> None:
    with pytest.raises(BadRequest, match="System role not supported"):
        read_turn_marks(renderer(GEMMA))
