"""Conversations built turn by turn are what the chat template writes, and no token of the policy's changes."""

import functools
import itertools

import pytest

from extras.conversation import Conversation

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (  # thoughts are dropped from every assistant message but the last
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% elif m.role == 'assistant' and '</think>' not in m.content %}<think>\n\n</think>\n\n{{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>",
    "<s>", "</s>", "[INST]", "[/INST]",
]  # fmt: skip
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXT = (
    "the user says: 12 is lower, the assistant goes left\n\nright\n<think>\n\n</think>\n\n up and down. "
    * 3
)
NO_REPLY = "no fixed text between two turns"
TALK = (
    "P__\n_OG", "right", "Answer with a number.\n", "I go left,\nthen down: 12", "lower", "", "higher",
)  # fmt: skip
"""What the user and the assistant say in turn."""


@functools.cache
def tokenizer_with(template, eos="<eos>"):
    """A byte-level BPE that splits text as Llama 3's and Qwen's do, with merges of its own."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        bos_token="<s>",
        extra_special_tokens=SPECIAL,
        chat_template=template,
    )


def whole(tokenizer, talk) -> list[int]:
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": next(roles), "content": content} for content in talk]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )


def built(tokenizer, talk, ended) -> list[int]:
    conversation = Conversation(tokenizer)
    tokens = conversation.first(talk[0])
    for response, observation in zip(talk[1::2], talk[2::2], strict=True):
        tokens += tokenizer.encode(response, add_special_tokens=False)
        tokens += [conversation.end_of_turn] * ended
        tokens += conversation.reply(observation, ended)
    return tokens


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize(("template", "closing"), [(CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>")])
def test_turns_put_together_are_the_template_of_the_whole(template, closing, ended):
    tokenizer = tokenizer_with(template)
    assert built(tokenizer, TALK, ended) == whole(tokenizer, TALK)
    end_of_turn = Conversation(tokenizer).end_of_turn
    assert tokenizer.convert_ids_to_tokens(end_of_turn) == closing


def test_a_template_that_drops_earlier_thoughts_gives_the_same_reply_and_keeps_them_in_the_context():
    tokenizer = tokenizer_with(QWEN3)
    talk = ("up?", "so\n</think>\n\nup", "down?", "hm\n</think>\n\ndown", "left?")
    opened = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n"
    pieces = itertools.cycle((opened, "{}<|im_end|>\n"))
    expected = "".join(next(pieces).format(content) for content in talk)
    assert tokenizer.decode(built(tokenizer, talk, ended=True)) == expected
    assert "so" not in tokenizer.decode(whole(tokenizer, talk))


def test_a_template_without_generation_prompt_or_system_message_will_do():
    tokenizer = tokenizer_with(MISTRAL, "</s>")
    reply = Conversation(tokenizer).reply("up", ended=False)
    assert tokenizer.decode(reply) == "</s>[INST] up [/INST]"


@pytest.mark.parametrize(
    ("template", "line"),
    [
        (None, r"has no chat template, .*such as Qwen/Qwen3-0\.6B"),
        ("{{ messages[0].content }}{{ raise_exception('one turn only') if messages | length > 1 }}",
         r"refuses a conversation of user, assistant and user \(one turn only\)"),
        # no special token
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", NO_REPLY),
        # turns are numbered
        (CHATML.replace("{{ m.content }}", "{{ loop.index }}{{ m.content }}"), NO_REPLY),
        # closed at the very end
        ("{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}<|im_end|>", NO_REPLY),
        # no assistant
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}", NO_REPLY),
    ],
)  # fmt: skip
def test_a_template_without_a_fixed_reply_is_refused_in_one_line(template, line):
    with pytest.raises(ValueError, match=line) as caught:
        Conversation(tokenizer_with(template))
    assert "\n" not in str(caught.value)
