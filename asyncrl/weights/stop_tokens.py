"""The tokens that end a response, from all files of a model's folder that name them."""

import json
import re
from collections import defaultdict
from pathlib import Path

CONFIG_FILES = ("generation_config.json", "config.json")
TEMPLATE = "chat template"
# Texts of messages that do not occur elsewhere in a template's text.
ASKED, SAID, CALLED, ASKED_AGAIN = "what-is-asked", "what-is-said", "what-is-called", "asked-again"


def stop_token_ids(model_path: str, tokenizer) -> list[int]:
    """Return the ids of the tokens that end a response, in order.

    They are the tokenizer's end of sequence, `eos_token_id` of CONFIG_FILES, and the ends of the chat template's
    messages. Ids beyond the model's vocabulary are left out, because they are never sampled. Raises ValueError if no
    token is found.
    """
    from transformers import AutoConfig

    size = AutoConfig.from_pretrained(model_path, trust_remote_code=False).vocab_size
    ids = sorted(token for token in _sources(model_path, tokenizer) if 0 <= token < size)
    if not ids:
        raise ValueError(
            f"{model_path}: no token ends a response: its tokenizer has no eos_token, {' and '.join(CONFIG_FILES)} "
            "have no eos_token_id, and no chat template ends a message by a single token; add eos_token_id to "
            "generation_config.json in that folder"
        )
    return ids


def describe_stop_tokens(model_path: str, tokenizer) -> str:
    """Return a line with the name, id and sources of each token that ends a response. Raises as stop_token_ids does."""
    ids = stop_token_ids(model_path, tokenizer)
    sources = _sources(model_path, tokenizer)
    tokens = [
        f"{tokenizer.convert_ids_to_tokens(token)!r} ({token}: {', '.join(sources[token])})"
        for token in ids
    ]
    line = f"a response ends at {', '.join(tokens)}"
    beyond = sorted(sources.keys() - set(ids))
    if beyond:
        line += f"; not at {beyond}, which the model's vocabulary does not have"
    if tokenizer.chat_template and not any(TEMPLATE in names for names in sources.values()):
        line += "; its chat template ends messages by no single token, so that end is not noticed"
    return line


def _sources(model_path: str, tokenizer) -> dict[int, list[str]]:
    """Return all tokens that end a response, each with the names of its sources."""
    sources = defaultdict(list)
    if tokenizer.eos_token_id is not None:
        sources[tokenizer.eos_token_id].append("tokenizer")
    for name in CONFIG_FILES:
        for token in _configured(Path(model_path, name)):
            sources[token].append(name)
    if tokenizer.chat_template:
        for token in _message_ends(tokenizer):
            sources[token].append(TEMPLATE)
    return sources


def _configured(path: Path) -> set[int]:
    """Return `eos_token_id` of a file, one or several; empty without one."""
    if not path.exists():
        return set()
    configured = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    return {*(configured if isinstance(configured, list) else [configured])} - {None}


def _message_ends(tokenizer) -> set[int]:
    """Return the tokens that end an assistant's message in the chat template: a text, and a call of a tool.

    The message is the last: gpt-oss ends other messages by <|end|>, and also its thoughts. If a template does not end
    its last message, another message follows it. After a text the first token counts: Phi-3 has <|endoftext|> after
    <|end|>. After a call the last one counts, because the call itself has tokens.
    """
    user = {"role": "user", "content": ASKED}
    text = {"role": "assistant", "content": SAID}
    function = {"name": CALLED, "arguments": {}}
    # Mistral's templates need ids of nine letters.
    call = {"id": "call00001", "type": "function", "function": function}
    tool_call = {"role": "assistant", "content": "", "tool_calls": [call]}
    again = {"role": "user", "content": ASKED_AGAIN}
    added = tokenizer.added_tokens_decoder
    special = [token for token, kind in added.items() if kind.special]
    ends = _tokens_behind(tokenizer, [user, text], SAID, [*added])
    ends = ends or _tokens_behind(tokenizer, [user, text, again], SAID, [*added])
    return {*ends[:1], *_tokens_behind(tokenizer, [user, tool_call], CALLED, special)[-1:]}


def _tokens_behind(tokenizer, messages: list[dict], mark: str, tokens: list[int]) -> list[int]:
    """Return the tokens, of `tokens`, that the chat template writes after a mark, in order; [] if it fails."""
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template is foreign code
        return []
    _, found_mark, behind = text.rpartition(mark)
    names = {str(tokenizer.added_tokens_decoder[token]): token for token in tokens}
    longest_first = sorted(filter(str.strip, names), key=len, reverse=True)
    if not found_mark or not longest_first:
        return []
    pattern = "|".join(map(re.escape, longest_first))
    return [names[name] for name in re.findall(pattern, behind.partition(ASKED_AGAIN)[0])]
