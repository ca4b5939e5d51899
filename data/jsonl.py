"""Rows of the user's: `prompt` is a text or chat messages, and the whole row, as JSON, is the answer."""

import functools
import json
from typing import Annotated

import msgspec

from data.problem import Problem
from data.tables import RowTask, load_splits


class Jsonl(RowTask):
    """Rows of files. A reward function gets the columns of a row."""

    def __init__(
        self,
        seed: int,
        data_path: str,
        *,
        prompt: str = "",
        system: str = "",
        test: str = "",
        held_out: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.1,
        shuffle: bool = True,
        template: str = "{}",
    ) -> None:
        """Read the rows.

        `prompt` names the column that asks; unset it is `prompt`, or `messages` in a row without a prompt. `system` is
        a system message before it. `template` has options of the chat template, as JSON. `test` is a file of held-out
        rows; without it a hash holds out the share `held_out`.
        """
        self.system = system
        self.template = json_object(template)
        splits = load_splits(data_path)
        if test:
            splits["test"] = [row for rows in load_splits(test).values() for row in rows]
        read = functools.partial(read_row, column=prompt)
        super().__init__(seed, splits, read, source=data_path, held_out=held_out, shuffle=shuffle)

    @staticmethod
    def score(answer: str, response: str) -> float:
        """1 if the response is the row's column `answer`, apart from spaces around both. It is for runs without
        --reward. Raises ValueError if no response can be."""
        expected = json.loads(answer)["answer"]
        is_number = isinstance(expected, int | float) and not isinstance(expected, bool)
        if not (is_number or isinstance(expected, str)) or not str(expected).strip():
            raise ValueError(
                f"the answer is {json.dumps(expected)[:80]}; give a text or a number, or a --reward that reads it"
            )
        return float(response.strip() == str(expected).strip())


def read_row(row: dict, place: str, column: str = "") -> Problem:
    """Return the problem of a row whose prompt is in a column.

    Raises ValueError, with the row's place, if the row has no prompt or cannot reach a reward function.
    """
    column = column or ("messages" if "messages" in row and "prompt" not in row else "prompt")
    prompt = row.get(column)
    if not is_prompt(prompt):
        what = f"as its {column} {prompt!r:.80}" if column in row else f"no column {column}"
        raise ValueError(
            f"{place} has {what}; the prompt is a text or a list of chat messages with role and content: name another "
            f"column of {sorted(row)} by --task-args prompt=COLUMN, or fix the row"
        )
    try:
        return Problem(prompt, json.dumps(row, ensure_ascii=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{place} has what cannot be written as JSON: {error}; leave that column out"
        ) from None


def is_prompt(value: object) -> bool:
    """Return whether a value is a text, or a list of chat messages, and no text is blank."""
    if not isinstance(value, list):
        return isinstance(value, str) and bool(value.strip())
    texts = [
        message.get(name) if isinstance(message, dict) else None
        for message in value
        for name in ("role", "content")
    ]
    return bool(texts) and all(isinstance(text, str) and text.strip() for text in texts)


def json_object(text: str) -> dict:
    """Return the JSON object of a text. Raises ValueError for a text without one."""
    try:
        return msgspec.json.decode(text, type=dict)
    except msgspec.DecodeError:
        raise ValueError(
            f'--task-args template takes a JSON object, as {{"enable_thinking": false}}, got {text!r}'
        ) from None
