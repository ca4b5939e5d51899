"""The task of a run, from --task and --task-args: content of data/, or user code."""

import contextlib
import functools
import inspect
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import islice
from typing import Any

from asyncrl import user_code
from asyncrl.config import Config, flag_of, read_arguments
from data import TASKS
from data.problem import Problem, Task, check_unicode


def load_task(config: Config) -> Task:
    """Return the task of a run, with its data.

    Raises ValueError, in one line, for a wrong name or argument, unreadable data, and errors of user code.
    """
    make_task = prepare_task(config)
    return UserTask(config, make_task) if user_code.is_user_code(config.task) else make_task()


def prepare_task(config: Config) -> Callable[[], Task]:
    """Return a function that makes the task and reads its data. Raises ValueError for a wrong name or argument."""
    for plugin in config.plugins:
        make_task = plugin.prepare_task(config)
        if make_task is not None:
            return make_task
    name, task_args = config.task, config.task_args
    task_class = _task_class(name)
    given = {"seed": config.seed, "data_path": config.data_path}
    if not user_code.is_user_code(name):
        given["name"] = name.partition(":")[2]
    return with_arguments(task_class, name, task_args, given)


def with_arguments(
    make: Callable, name: str, task_args: Iterable[str], given: dict[str, Any]
) -> functools.partial:
    """Return `make` with arguments from --task-args, and with all `given` arguments that it takes.

    Raises ValueError for an argument or rows that it does not take, and for an argument that it lacks.
    """
    signature = inspect.signature(make, eval_str=True)
    if given.get("data_path") and "data_path" not in signature.parameters:
        raise ValueError(
            f"--task {name} reads no --data-path; leave it out, or write --task jsonl --data-path "
            f"{given['data_path']}"
        )
    options = [
        parameter for parameter in signature.parameters.values() if parameter.name not in given
    ]
    arguments = read_arguments("task-args", task_args, f"--task {name}", options)
    arguments |= {
        key: given[key] for key in given if key in signature.parameters and given[key] is not None
    }
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"--task {name}: {error}; give it as --data-path or --task-args NAME=VALUE"
        ) from None
    return functools.partial(make, **arguments)


def score_of(name: str) -> Callable[[str, str], Any]:
    """Return the score of a single-turn task: a function of a problem's answer and a response.

    It returns a finite number, or in user code a dict of parts. It runs in processes without a task, on any text of a
    policy. Raises ValueError if the task has no such score.
    """
    task_class = _task_class(name)
    score = inspect.getattr_static(task_class, "score", None)
    if not isinstance(score, staticmethod):
        raise ValueError(
            f"--task {name} has no static method score; give it a @staticmethod score(answer, response), as it runs in "
            "processes where no task is made, or give --reward FILE.py:FUNCTION"
        )
    return task_class.score


def _task_class(name: str) -> type:
    """Return the class of a single-turn task."""
    task_class = TASKS.get(name.partition(":")[0]) or user_code.load(name, "--task", TASKS)
    if not isinstance(task_class, type):
        raise ValueError(
            f"--task {name} is a {type(task_class).__name__}; give a class with train_problem and eval_problems, an "
            f"environment, which is a subclass of gymnasium.Env, or for an agent --task agent:{name}"
        )
    if hasattr(task_class, "step"):
        raise ValueError(
            f"--task {name} has a method step, as environments have, and is no subclass of gymnasium.Env; make it one"
        )
    for method in ("train_problem", "eval_problems"):
        if not hasattr(task_class, method):
            raise ValueError(
                f"--task {name} has no method {method}; give it train_problem(index) and eval_problems(count)"
            )
    return task_class


def encode(config: Config, task: Task, tokenizer, problem: Problem) -> list[int]:
    """Return token ids of a prompt. Raises ValueError, with the problem's place, if template or tokenizer refuse it.

    For example, a tiny model's tokenizer knows few words.
    """
    place = f"{problem.place}: " * bool(problem.place)
    try:
        return task.encode_prompt(problem, tokenizer)
    except ValueError as error:
        raise ValueError(f"{place}{' '.join(str(error).splitlines())}") from error
    except Exception as error:
        # A template is foreign code, and the library tokenizers raises a plain Exception for an unknown word.
        reason = user_code.one_line(error).removeprefix("Exception: ")
        advice = "change prompt or system message, or take another --model"
        if config.model == "tiny" and "[UNK]" in reason:
            advice = "it reads only columns such as 'a54 b89 ='; --model smollm2 reads text"
        raise ValueError(
            f"{place}--model {config.model}: its tokenizer or chat template refuses {str(problem.prompt)[:60]!r} of "
            f"--task {config.task} ({reason}); {advice}"
        ) from error


class UserTask(Task):
    """A task of user code. Its problems and prompts must come in time, and its errors become a ValueError.

    A call that hangs would keep the controller's lock, and the run could not end. An error or a wrong return value of a
    single-turn task gets file and line. Tasks of several turns describe errors of user code themselves.
    """

    def __init__(self, config: Config, make: Callable[[], Any]) -> None:
        self._config = config
        describe_errors = functools.partial(user_code.errors_as_value_error, config.task)
        if config.is_multi_turn:
            describe_errors = contextlib.nullcontext
        with describe_errors():
            self._task = make()
        if isinstance(self._task, Task):
            self.rows, self.summary = self._task.rows, self._task.summary
        self._calls = queue.SimpleQueue()
        # A daemon thread: one that hangs keeps no process from ending.
        threading.Thread(
            target=_answer_calls, args=(self._calls, describe_errors), name="task", daemon=True
        ).start()

    def train_problem(self, index: int) -> Problem:
        def read() -> Problem:
            return _check_problem(self._task.train_problem(index), "train_problem")

        return self._within("env_timeout_s", f"problem {index}", read)

    def eval_problems(self, count: int) -> list[Problem]:
        def read() -> list[Problem]:
            problems = islice(self._task.eval_problems(count), count)
            return [_check_problem(problem, "eval_problems") for problem in problems]

        return self._within("timeout_s", "eval_problems", read)

    def encode_prompt(self, problem: Problem, tokenizer) -> list[int]:
        """Return token ids of the prompt, by the task's encode_prompt if it has one, else through the chat template."""
        if not hasattr(self._task, "encode_prompt"):
            return super().encode_prompt(problem, tokenizer)

        def encode_by_task() -> list[int]:
            return [int(token) for token in self._task.encode_prompt(problem, tokenizer)]

        seed = problem.environment_seed
        what = f"the prompt of {repr(problem.prompt)[:60] if seed is None else f'seed {seed}'}"
        return self._within("env_timeout_s", what, encode_by_task)

    def try_out(self) -> None:
        """Call user code as a run will: the score of the first answer, or a step of an environment.

        Raises ValueError, in one line, for its errors.
        """
        if hasattr(self._task, "try_step"):
            self._within("env_timeout_s", "a step with an empty action", self._task.try_step)
        if not (self._config.is_multi_turn or self._config.reward):
            answer = self.train_problem(0).answer
            score = score_of(self._config.task)
            self._within("env_timeout_s", "the score of an answer", lambda: score(answer, answer))

    def _within(self, option: str, what: str, function: Callable[[], Any]) -> Any:
        """Return the result of a function within the seconds of an option. Raises ValueError after that time."""
        limit_s = getattr(self._config, option)
        result: Future = Future()
        self._calls.put((result, function))
        try:
            return result.result(limit_s)
        except TimeoutError:
            raise ValueError(
                f"--task {self._config.task}: {what} is not there after {limit_s:g} s; fix it, or "
                f"raise {flag_of(option)} if it is only slow"
            ) from None


def _answer_calls(calls: queue.SimpleQueue, describe_errors: Callable) -> None:
    """Answer calls of user code one after the other, for ever."""
    while True:
        result, function = calls.get()
        try:
            with describe_errors():
                result.set_result(function())
        except BaseException as error:  # foreign code may raise anything
            result.set_exception(error)


def _check_problem(problem: Any, method: str) -> Problem:
    """Return the problem that a method of user code gave. Raises TypeError for another type, and ValueError like
    `check_unicode`."""
    if not isinstance(problem, Problem) or not isinstance(problem.answer, str):
        raise TypeError(
            f"{method} gave {str(problem)[:80]!r}; give data.problem.Problem(prompt, answer), answer a str"
        )
    check_unicode(problem)
    return problem
