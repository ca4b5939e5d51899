"""A tiny model of a family that has imitated sums for a few steps knows more of answers than before."""

import torch
from transformers import AutoModelForCausalLM

from asyncrl.tasks import load_task
from asyncrl.trainer.families import read_config
from asyncrl.weights.models import load_tokenizer, resolve_model
from scripts.tiny_families import main


def test_a_model_of_a_family_is_made_for_the_default_task(tmp_path):
    chances = []
    for name, steps in (("before", 0), ("after", 30)):
        folder = resolve_model(str(main("qwen3_moe", tmp_path / name, steps)), "addition")
        assert read_config(folder, shares_prefix=True).model_type == "qwen3_moe"
        chances.append(chance_of_answers(folder))
    assert chances[1] > 5 * chances[0]


@torch.no_grad()
def chance_of_answers(folder) -> float:
    """The mean probability of the tokens of right answers to held-out problems."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    chances = []
    for problem in load_task("addition", seed=0).eval_problems(20):
        prompt, answer = (tokenizer.encode(text) for text in (problem.prompt, problem.answer))
        tokens = torch.tensor([*prompt, *answer])
        probabilities = model(tokens[None]).logits[0, len(prompt) - 1 : -1].softmax(dim=-1)
        chances.append(probabilities.gather(1, torch.tensor(answer)[:, None]))
    return torch.cat(chances).mean().item()
