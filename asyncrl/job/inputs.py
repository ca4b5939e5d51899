"""Reads and checks the inputs of a run before a worker starts: task, prompts, model and user code."""

import functools

from asyncrl.cluster.cluster import Cluster
from asyncrl.config import Config
from asyncrl.controller.prompts import PromptSource
from asyncrl.controller.tickets import TicketSource
from asyncrl.engine.rewards import load_scorer
from asyncrl.job.choices import try_choices
from asyncrl.plugins import last_given
from asyncrl.tasks import UserTask, encode, load_task
from asyncrl.trainer.families import check_engine, longest_sequence, read_config
from asyncrl.user_code import user_code_names
from asyncrl.weights.models import load_tokenizer
from data.problem import Task


def read_task(config: Config, cluster: Cluster) -> Task:
    """Return the task. Raises ValueError for a row that cannot be scored."""
    task = load_task(config)
    if task.summary and cluster.is_first:
        print(task.summary, flush=True)
    if isinstance(task, UserTask):
        task.try_out()
    if config.reward or config.task == "jsonl":
        scorer = load_scorer(config.task, config.reward)
        for problem in task.rows or [task.train_problem(0)]:
            scorer.check(problem)
    return task


def make_tickets(config: Config, cluster: Cluster, model_path: str, task: Task) -> TicketSource:
    """Return a node's share of the prompts; the first node also has the held-out ones.

    Raises ValueError if a prompt does not fit, or the nodes have different prompts.
    """
    held_out = []
    if config.eval_every and cluster.is_first:
        held_out = task.eval_problems(config.eval_problems)
    prompts = PromptSource(
        train_problem=task.train_problem,
        eval_problems=held_out,
        encode=functools.partial(encode, config, task, load_tokenizer(model_path)),
        rows=task.rows,
        vocab_size=read_config(model_path).vocab_size,
    )
    prompts.check(config)
    if any(digest != prompts.digest for digest in cluster.gather(prompts.digest)):
        raise ValueError("the nodes have different rows; give all the same by --data-path")
    tickets_class = last_given((plugin.tickets for plugin in config.plugins), TicketSource)
    return tickets_class(config, prompts, cluster.node, cluster.num_nodes)


def check_model(config: Config, model_path: str, device: str) -> None:
    """Raise ValueError if the model would be trained wrongly, or an option does not fit it."""
    model = read_config(model_path)
    for plugin in config.plugins:
        plugin.check(config, model)
    check_engine(config, model, device)
    vocab_size = model.get_text_config().vocab_size
    if config.top_logprobs > vocab_size:
        raise ValueError(
            f"--top-logprobs {config.top_logprobs} must be at most the model's vocabulary, {vocab_size}; lower it"
        )
    limit = longest_sequence(model)
    if limit is not None and config.max_sequence_tokens > limit:
        raise ValueError(
            f"--max-prompt-tokens {config.max_prompt_tokens} + --max-response-tokens {config.max_response_tokens} = "
            f"{config.max_sequence_tokens} tokens, and a sequence of {config.model} may have {limit}: its positions "
            "end there, or its longrope changes there; lower one of the two; both have defaults"
        )


def check_tokenizer(config: Config, model_path: str) -> None:
    """Raise ValueError if the model lacks a token of its tokenizer."""
    vocab_size = read_config(model_path).vocab_size
    tokenizer = load_tokenizer(model_path)
    special = set(tokenizer.all_special_ids)
    for token, index in tokenizer.get_vocab().items():
        # Gemma's text models lack the token of an image, and no template writes it.
        is_unused = index in special and token not in str(tokenizer.chat_template)
        if index >= vocab_size and not is_unused:
            raise ValueError(
                f"--model {config.model}: its tokenizer writes {token!r} as {index}, and its config.json has a "
                f"vocabulary of {vocab_size}; take that model's own tokenizer, or resize its embeddings"
            )


def try_copies(config: Config) -> None:
    """Load the copies of user code, as all processes of the run will. Raises ValueError if they lack a file."""
    texts = user_code_names(config)
    try:
        if texts:
            try_choices(config)
        if config.task in texts:
            load_task(config).train_problem(0)
    except ValueError as error:
        raise ValueError(
            f"{error}; a run loads copies of user code, and data beside it are not copied: give their absolute paths"
        ) from None
