"""Chat templates: rendered in a sandbox, refusals quoted, nothing guessed."""

import pytest

from jaxserve.text import ChatTemplateError, Tokenizer
from jaxserve.text.chat_template import ChatTemplate
from tests.text.vocabularies import byte_tokenizer

USER = {"role": "user", "content": "hi"}
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
)


def template(source):
    return ChatTemplate(source, {"bos_token": "<|bos|>", "eos_token": "<|eos|>"})


def with_template(tmp_path, source, adds_bos):
    backend = byte_tokenizer(tmp_path)._backend
    return Tokenizer(
        backend,
        bos_id=256,
        eos_ids=[257],
        adds_bos=adds_bos,
        chat_templates={"default": source} if source else None,
        special_tokens={"bos_token": "<|bos|>"},
    )


def test_a_refused_system_role_quotes_the_template():
    with pytest.raises(ChatTemplateError, match="refused the messages: System role not supported"):
        template(ALTERNATING).render([{"role": "system", "content": "x"}, USER])


def test_two_user_turns_in_a_row_quote_the_template():
    with pytest.raises(ChatTemplateError, match="Conversation roles must alternate"):
        template(ALTERNATING).render([USER, USER])


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "user", "content": None}, {"content": "x"}])
def test_messages_that_break_a_template_are_the_clients_mistake(message):
    with pytest.raises(ChatTemplateError, match="do not fit the model's chat template"):
        template("{% for m in messages %}{{ m['content'].strip() + m.role }}{% endfor %}").render([message])


def test_no_template_is_an_error_not_a_guess(tmp_path):
    with pytest.raises(ChatTemplateError, match="no chat template; use /v1/completions"):
        with_template(tmp_path, None, False).encode_chat([USER])


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_template_with_bos_gives_exactly_one(tmp_path, adds_bos):
    assert with_template(tmp_path, ALTERNATING, adds_bos).encode_chat([USER]) == [256, *b"[user]hi"]


def test_a_template_without_bos_gets_the_tokenizers(tmp_path):
    plain = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert with_template(tmp_path, plain, True).encode_chat([USER]) == [256, *b"hi"]
    assert with_template(tmp_path, plain, False).encode_chat([USER]) == [*b"hi"]


def test_whitespace_of_blocks_is_trimmed_as_transformers_does():
    source = "{% for m in messages %}\n    {{ m['content'] }}\n    {% endfor %}\nend"
    assert template(source).render([USER]) == "    hi\nend"


def test_helpers_of_transformers_are_there():
    source = (
        "{{ tools | tojson }}|{{ strftime_now('%Y') | length }}|"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    rendered = template(source).render([USER, USER], tools=[{"name": "café <&>"}])
    assert rendered == '[{"name": "café <&>"}]|4|hi'


def test_the_generation_prompt_is_left_out_when_not_wanted():
    source = "{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    assert template(source).render([USER]) == "hi>"
    assert template(source).render([USER], add_generation_prompt=False) == "hi"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source):
    with pytest.raises(ChatTemplateError):
        template(source).render([USER])


def test_a_broken_template_is_refused_when_chat_is_used_and_not_before(tmp_path):
    tokenizer = with_template(tmp_path, "{% for m in %}", False)
    assert tokenizer.encode("hi") == [*b"hi"]
    with pytest.raises(ChatTemplateError, match="chat template is not valid"):
        tokenizer.encode_chat([USER])


TRIMMING = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</>{% endfor %}"


@pytest.mark.parametrize("content", ["Paris is ", "  two\n", "", "</>", "a<assistant>a"])
def test_an_open_rendering_ends_with_the_last_content(content):
    messages = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": content}]
    text = ChatTemplate(TRIMMING, {}).render_open(messages)
    # What the template trims in front is trimmed; the end stays as the client wrote it.
    assert text == "<user>hi</><assistant>" + content.lstrip()


@pytest.mark.parametrize(
    "source", ["{{ messages[0]['content'] }}", "{% for i in '12' %}{{ messages[-1]['content'] }}{% endfor %}"]
)
def test_a_template_that_does_not_write_the_last_content_once_cannot_be_left_open(source):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ChatTemplateError, match="continue_final_message is not possible"):
        ChatTemplate(source, {}).render_open(messages)
