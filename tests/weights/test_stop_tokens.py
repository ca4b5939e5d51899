"""Which tokens end a response, by all that a model's folder says, and that a checkpoint says the same."""

import json
import re

import pytest
from tiny_families import tiny_config
from tiny_policy import byte_tokenizer, error_of, load, make_config
from transformers import LlamaForCausalLM

from asyncrl.trainer.weight_files import save_weights
from asyncrl.weights.models import load_tokenizer
from asyncrl.weights.stop_tokens import describe_stop_tokens, stop_token_ids

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>",
    "<|return|>", "<|call|>", "<|user|>", "<|assistant|>",
)  # fmt: skip
NOT_SPECIAL = ("<tool_call>", "</tool_call>", "\n\n")
"""Tokens of their own that are text: Qwen3 has such marks, and Gemma such spaces."""

CALLS = "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + CALLS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "<start_of_turn>{{ role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
)
LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% elif m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}{% endif %}{% endfor %}"
)
GLM4 = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
WORDS = "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n### End\n{% endfor %}"
LONE_USER = (
    "{{ messages[0].content }}{% if messages[1] %}{{ raise_exception('no assistant') }}{% endif %}"
)
PIECES = "{% for m in messages %}{{ m.content }}<|im_stop|>\n{% endfor %}"

EOS = "<|endoftext|>"
UNNOTICED = "its chat template ends messages by no single token"
TABLE = {
    # name: eos of the tokenizer, of generation_config.json and of config.json, the template; what ends a response
    "tokenizer": (EOS, None, None, None, {EOS}),
    "list in generation_config.json": (EOS, [EOS, "</s>"], EOS, None, {EOS, "</s>"}),
    "config.json": (EOS, None, "</s>", None, {EOS, "</s>"}),
    "list in config.json": (EOS, None, [EOS, "</s>"], None, {EOS, "</s>"}),
    "config.json beside the other": (EOS, EOS, "<|eot_id|>", None, {EOS, "<|eot_id|>"}),
    "no eos of the tokenizer": (None, None, "</s>", None, {"</s>"}),
    "template alone": (None, None, None, CHATML, {"<|im_end|>"}),
    "qwen3 base": (EOS, EOS, EOS, CHATML, {EOS, "<|im_end|>"}),
    "qwen3": ("<|im_end|>", ["<|im_end|>", EOS], "<|im_end|>", CHATML, {EOS, "<|im_end|>"}),
    "gemma": ("</s>", None, "</s>", GEMMA, {"</s>", "<end_of_turn>"}),
    "llama 3": (EOS, EOS, EOS, LLAMA3, {EOS, "<|eot_id|>"}),
    "llama 2": ("</s>", None, None, LLAMA2, {"</s>"}),
    "phi 3": (EOS, None, EOS, PHI3, {EOS, "<|end|>"}),
    "gpt-oss": (EOS, None, EOS, GPT_OSS, {EOS, "<|return|>", "<|call|>"}),
    "glm 4, whose next role ends a message": (EOS, None, EOS, GLM4, {EOS, "<|user|>"}),
    "a text ends messages": (EOS, None, None, WORDS, {EOS}),
    "what ends messages is no token": (EOS, None, None, PIECES, {EOS}),
    "a template that refuses": (EOS, None, None, LONE_USER, {EOS}),
    "beyond the vocabulary": (EOS, [9999], [-1, EOS], None, {EOS}),
}  # fmt: skip


def write_model(folder, eos, generation, config, template):
    """A tiny Llama whose files say that these tokens, given by name or id, end a response."""
    tokenizer = byte_tokenizer(eos_token=eos, extra_special_tokens=[*SPECIAL])
    tokenizer.add_tokens([*NOT_SPECIAL])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    if not (folder / "model.safetensors").exists():
        shape = tiny_config("llama", vocab_size=len(tokenizer), pad_token_id=None)
        LlamaForCausalLM(shape).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)

    def ids(names):
        if isinstance(names, list):
            return [ids(name) for name in names]
        return tokenizer.convert_tokens_to_ids(names) if isinstance(names, str) else names

    fields = json.loads((folder / "config.json").read_text())
    fields.pop("eos_token_id", None)
    if config is not None:
        fields["eos_token_id"] = ids(config)
    (folder / "config.json").write_text(json.dumps(fields))
    if generation is not None:
        fields = {"eos_token_id": ids(generation), "temperature": 0.6, "top_p": 0.9}
        (folder / "generation_config.json").write_text(json.dumps(fields))
    return tokenizer


def ends_of(folder):
    """Names of the tokens that end a response of a folder's model."""
    tokenizer = load_tokenizer.__wrapped__(str(folder))
    return set(tokenizer.convert_ids_to_tokens(stop_token_ids(str(folder), tokenizer)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.mark.parametrize("name", TABLE)
def test_all_that_a_folder_says_ends_a_response_and_the_line_of_the_start_says_what(folder, name):
    *said, ends = TABLE[name]
    tokenizer = write_model(folder, *said)
    assert ends_of(folder) == ends
    line = describe_stop_tokens(str(folder), tokenizer)
    assert "\n" not in line and all(f"{end!r} (" in line for end in ends)
    assert (UNNOTICED in line) == (said[3] in (WORDS, PIECES, LONE_USER))
    assert ("not at [-1, 9999]" in line) == (name == "beyond the vocabulary")


def test_of_several_templates_the_one_that_prompts_go_through_counts(folder):
    tokenizer = write_model(folder, EOS, None, None, {"default": CHATML, "tool_use": LLAMA3})
    assert ends_of(folder) == {EOS, "<|im_end|>"}
    assert "'<|im_end|>' (258: chat template)" in describe_stop_tokens(str(folder), tokenizer)


@pytest.mark.parametrize("said", [(None, None, None, None), (None, None, [9999], WORDS)])
def test_a_folder_that_ends_no_response_is_refused_in_one_line(folder, said):
    line = error_of(stop_token_ids, str(folder), write_model(folder, *said))
    assert re.fullmatch("ValueError: .+: no token ends a response: .+", line)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("name", ["qwen3", "tokenizer", "list in config.json"])
def test_a_checkpoint_has_the_small_files_of_the_models_folder_and_ends_responses_as_it_does(
    tmp_path, name, lora_rank
):
    """Defaults of sampling are kept for whoever reads them. Without generation_config.json there is none made up."""
    source, saved = tmp_path / "model", tmp_path / "saved"
    source.mkdir()
    *said, ends = TABLE[name]
    write_model(source, *said)
    (source / "LICENSE").write_text("free")
    with open(source / "notes.txt", "w") as too_large:
        too_large.truncate((1 << 26) + 1)
    (source / "adapter_config.json").write_text("{}")
    save_weights(load(make_config(str(source), lora_rank=lora_rank)), str(saved))
    assert ends_of(saved) == ends
    files = [(path / "generation_config.json") for path in (source, saved)]
    texts = [file.read_text() if file.exists() else None for file in files]
    assert texts[0] == texts[1]
    assert (saved / "LICENSE").read_text() == "free"
    assert not (saved / "notes.txt").exists() and not (saved / "adapter_config.json").exists()
