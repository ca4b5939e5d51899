"""What a user brings: how it is found, loaded and copied. The lines in which mistakes end are in errors.toml."""

import json
from pathlib import Path

import pytest
from programs import ROOT, run_python
from user_files import ENVIRONMENT, TASK, chat_tokenizer, write_jsonl, write_user_code

from asyncrl import user_code
from asyncrl.config import Config
from asyncrl.tasks import load_task, prepare_task, score_of
from data.problem import Problem
from extras.environments.task import prepare_environment


def test_an_object_is_loaded_once_and_its_module_is_called_as_its_file(tmp_path):
    path = write_user_code(tmp_path, "class Mine: pass\n")
    mine = user_code.load(f"{path}:Mine")
    assert mine is user_code.load(f"{path}:Mine") and mine.__module__ == path.stem


def test_a_file_that_the_program_has_imported_itself_is_loaded_from_there():
    assert user_code.load(f"{__file__}:Problem") is Problem
    assert user_code.load(f"{__file__}:NEIGHBOURS") is NEIGHBOURS


def test_the_files_are_those_that_are_named_and_what_they_import_from_their_folder(tmp_path):
    """A file with a sibling, a package, and a neighbour that it does not import."""
    sources = {
        "main_of_mine.py": "import torch, asyncrl\ndef loss():\n    from sibling_of_mine import x\n",
        "sibling_of_mine.py": "import package_of_mine.deep\n",
        "package_of_mine/deep.py": "x = 1\n",
        "neighbour.py": "",
    }
    (tmp_path / "package_of_mine").mkdir()
    for name, source in sources.items():
        (tmp_path / name).write_text(source)
    files = user_code.files([f"{tmp_path}/main_of_mine.py:loss*2"])
    assert list(files) == list(sources)[:3]


def test_the_name_of_a_run_has_no_blank_of_a_file():
    assert user_code.run_name_part("some folder/my loss.py:loss") == "my-loss-loss"


def test_a_folder_that_python_passes_over_does_not_hide_an_installed_package(tmp_path):
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets/prepare.py").write_text("")
    (tmp_path / "user.py").write_text("from datasets import load_dataset\n")
    text = f"{tmp_path}/user.py:load_dataset"
    assert [*user_code.files([text])] == ["user.py"]
    (tmp_path / "datasets/__init__.py").write_text("")
    line = f"{tmp_path}/datasets has the name of another module; rename it"
    with pytest.raises(ValueError, match=line):
        user_code.load(text)
    assert list(user_code.files([f"{ROOT}/rollout.py:main"])) == ["rollout.py"], "not our modules"


NEIGHBOURS = (
    "algos", "data", "extras", "rollout", "train_async",
    "json", "types", "queue", "random", "signal", "socket", "struct", "string", "token", "importlib", "warnings",
    "concurrent", "torch", "numpy", "transformers", "vllm", "msgspec", "psutil",
)  # fmt: skip
"""Names of files beside a reward and beside a script. A reward may also have an asyncrl.py, and a script may not."""
SCRIPT = """
from asyncrl.cluster.worker_process import WorkerProcess
from asyncrl.engine.reward_pool import RewardPool
from train_async import train


def report(spec, connection):
    import rollout, asyncrl.engine.containment, numpy, queue
    from asyncrl.user_code import load

    assert load(REWARD, "--reward")("a") == 2.0
    connection.send([module.__file__ for module in (rollout, asyncrl.engine.containment, numpy, queue)])


REWARD = "reward.v2.py:score"
if __name__ == "__main__":
    import asyncio, os, sys
    from concurrent.futures import ThreadPoolExecutor
    from types import SimpleNamespace

    pool = RewardPool("addition", [REWARD], 60.0, 1)
    print(asyncio.run(pool.score("4", "an answer")))
    pool.close()
    spec = SimpleNamespace(log_path=os.devnull, placement=SimpleNamespace(worker=0))
    with ThreadPoolExecutor(2) as threads:
        worker = WorkerProcess(spec, report, lambda files: files and print(*files), threads)
        worker.reading.result(timeout=120)
"""


def test_files_beside_a_reward_or_a_script_hide_no_other_module_in_any_process(tmp_path):
    """A script, a worker's process, and the process that scores; each would meet a neighbour on its path."""
    beside_reward, beside_script = tmp_path / "reward", tmp_path / "script"
    for folder, names in ((beside_reward, ("asyncrl", *NEIGHBOURS)), (beside_script, NEIGHBOURS)):
        folder.mkdir()
        for name in names:
            (folder / f"{name}.py").write_text(f"raise RuntimeError({name!r})\n")
    (beside_script / "script.py").write_text(SCRIPT)
    reward = "def score(response):\n    from helper import worth\n    return worth\n"
    (beside_reward / "reward.v2.py").write_text(reward)
    (beside_reward / "helper.py").write_text("worth = 2.0\n")
    script = beside_script / "script.py"
    ended = run_python(script, cwd=beside_reward, PYTHONPATH=str(ROOT))
    assert "(2.0, {})" in ended.stdout, ended.stdout + ended.stderr
    files = ended.stdout.splitlines()[-1].split()
    assert files[:2] == [f"{ROOT}/rollout.py", f"{ROOT}/asyncrl/engine/containment.py"]
    assert all(str(tmp_path) not in file for file in files) and len(files) == 4


def test_a_module_of_a_user_under_a_name_of_ours_is_refused_by_its_file(tmp_path):
    """Also in a folder whose path begins as that of the repository."""
    repository, folder = tmp_path / "rl", tmp_path / "rl-mine"
    repository.symlink_to(ROOT)
    folder.mkdir()
    (folder / "data.py").write_text("")
    script = folder / "script.py"
    script.write_text("import data\nimport asyncrl\n")
    ended = run_python(script, PYTHONPATH=str(repository))
    line = f"ImportError: {folder}/data.py has the name of a module of {repository}; rename it"
    assert ended.stderr.splitlines()[-1] == line


# Tasks


def test_a_users_task_is_made_with_seed_data_and_arguments_and_scores_by_its_text_alone(tmp_path):
    text = f"{write_user_code(tmp_path, TASK)}:Double"
    task = load_task(
        Config(task=text, seed=3, data_path="here", task_args=("factor=3", "words={} x {} ="))
    )
    problem = task.train_problem(0)
    assert problem == Problem("3 x 6 =", "18")
    held_out = {problem.prompt for problem in task.eval_problems(100)}
    train = {task.train_problem(index).prompt for index in range(100)}
    assert len(held_out) == 40 and held_out.isdisjoint(train)
    tokens = task.encode_prompt(problem, chat_tokenizer())
    assert chat_tokenizer().decode(tokens) == "[user]3 x 6 =[assistant]"
    assert score_of(text)("4", "4") == 1.0


HANGING = """
import time


class Hanging:
    def __init__(self, seed):
        pass

    def train_problem(self, index):
        time.sleep(60)

    def eval_problems(self, count):
        return []
"""


def test_problems_of_a_users_task_must_come_in_time(tmp_path):
    name = f"{write_user_code(tmp_path, HANGING)}:Hanging"
    task = load_task(Config(task=name, env_timeout_s=0.2))
    line = "problem 17 is not there after 0.2 s; fix it, or raise --env-timeout-s"
    with pytest.raises(ValueError) as caught:
        task.train_problem(17)
    assert str(caught.value) == f"--task {name}: {line} if it is only slow"


def test_a_users_environment_takes_arguments_asks_and_rewards(tmp_path):
    turns = "class Echo(gymnasium.Env):\n    def __init__(self, turns: int = 3):\n        self.most = turns\n"
    source = ENVIRONMENT.replace("class Echo(gymnasium.Env):", turns)
    name = f"environment:{write_user_code(tmp_path, source)}:Echo"
    task = prepare_task(Config(task=name, task_args=("turns=5",)))()
    environment = prepare_environment(name, ("turns=7",))()
    assert environment.most == 7
    problem = task.train_problem(0)
    observation, _ = environment.reset(seed=problem.environment_seed)
    assert task.first_observation(problem) == observation and observation.startswith("Say ")
    assert environment.step(observation)[1] == 1.0
    seeds = {problem.environment_seed for problem in task.eval_problems(200)}
    assert seeds.isdisjoint(task.train_problem(i).environment_seed for i in range(1000))


# Rows


ROWS = [{"prompt": f"Say {n}", "answer": str(n), "more": {"n": [n]}} for n in range(50)]
PROMPTS = {row["prompt"] for row in ROWS}


def jsonl(path: Path, rows=ROWS, *task_args):
    return load_task(
        Config(task="jsonl", data_path=str(write_jsonl(path, rows)), task_args=task_args)
    )


def prompts_of(task) -> tuple[set[str], set[str]]:
    """The prompts of training, and those held out."""
    train = {task.train_problem(index).prompt for index in range(200)}
    return train, {problem.prompt for problem in task.eval_problems(1000)}


def test_rows_are_split_by_a_hash_of_their_prompts_and_the_parts_are_disjoint(tmp_path):
    train, held_out = prompts_of(jsonl(tmp_path / "a.jsonl", ROWS + ROWS, "held_out=0.3"))
    assert 5 <= len(held_out) <= 25 and held_out.isdisjoint(train) and held_out | train == PROMPTS
    more = jsonl(tmp_path / "b.jsonl", [*ROWS, {"prompt": "another"}], "held_out=0.3")
    assert held_out <= prompts_of(more)[1], "a row stays where it was"
    few = jsonl(tmp_path / "c.jsonl", ROWS[:4], "held_out=0.001")
    assert len(prompts_of(few)[1]) == 1, "one at least"


def test_held_out_rows_may_have_a_file_of_their_own_or_one_by_its_name(tmp_path):
    expected = ({row["prompt"] for row in ROWS[:30]}, {row["prompt"] for row in ROWS[30:]})
    test = write_jsonl(tmp_path / "mine.jsonl", ROWS[30:])
    assert prompts_of(jsonl(tmp_path / "a.jsonl", ROWS, f"test={test}")) == expected
    (tmp_path / "parts").mkdir()
    for name, rows in (("train-0", ROWS[:20]), ("train-1", ROWS[20:30]), ("validation", ROWS[30:])):
        write_jsonl(tmp_path / "parts" / f"{name}.jsonl", rows)
    assert (
        prompts_of(load_task(Config(task="jsonl", data_path=str(tmp_path / "parts")))) == expected
    )


@pytest.mark.parametrize("has_parts", [False, True])
def test_rows_of_parquet_and_of_saved_datasets_with_parts_are_read_too(tmp_path, has_parts):
    import datasets

    rows = [{"prompt": row["prompt"], "answer": row["answer"]} for row in ROWS]
    table, path = datasets.Dataset.from_list(rows), str(tmp_path / "rows [1].parquet")
    if has_parts:
        table.train_test_split(10).save_to_disk(path)
    else:
        table.to_parquet(path)
    train, held_out = prompts_of(load_task(Config(task="jsonl", data_path=path)))
    assert train | held_out == PROMPTS and (len(held_out) == 10 or not has_parts)


def test_the_whole_row_is_the_answer_and_without_a_reward_its_column_answer_is_compared(tmp_path):
    rows = [{"prompt": str(n), f"only_{n}": {"deep": None}, "ü": "ß"} for n in range(20)]
    problem = jsonl(tmp_path / "a.jsonl", rows).train_problem(0)
    assert json.loads(problem.answer) == rows[int(problem.prompt)] and "ß" in problem.answer
    problem, score = jsonl(tmp_path / "b.jsonl").train_problem(0), score_of("jsonl")
    right = json.loads(problem.answer)["answer"]
    assert score(problem.answer, f" {right}\n") == 1.0 and score(problem.answer, f"{right}0") == 0.0


def test_prompts_go_through_the_chat_template_with_a_system_prompt_and_options(tmp_path):
    chat = [{"role": role, "content": role[:2]} for role in ("user", "assistant", "user")]
    task = jsonl(tmp_path / "a.jsonl", [{"ask": chat}, {"ask": "d"}], "prompt=ask", "system=s")
    tokenizer = chat_tokenizer()
    problems = [*task.eval_problems(9), task.train_problem(0)]
    texts = {tokenizer.decode(task.encode_prompt(problem, tokenizer)) for problem in problems}
    conversation = "[system]s[user]us[assistant]as[user]us[assistant]"
    assert texts == {conversation, "[system]s[user]d[assistant]"}
    tokenizer.chat_template = None
    assert tokenizer.decode(task.encode_prompt(Problem("d", ""), tokenizer)) == "s\n\nd"
    with pytest.raises(ValueError, match="need a chat template"):
        task.encode_prompt(Problem(chat, ""), tokenizer)
    options = ('template={"tone": "low"}', "shuffle=false")
    task = jsonl(tmp_path / "b.jsonl", ROWS, *options)
    numbers = [int(task.train_problem(i).prompt.split()[1]) for i in range(20)]
    assert numbers == sorted(numbers), "in the order of the file"
    text = tokenizer.decode(task.encode_prompt(task.train_problem(0), tokenizer))
    assert text == f"Say {numbers[0]}"
    tokenizer.chat_template = "{{ tone }}:{{ messages[0]['content'] }}"
    text = tokenizer.decode(task.encode_prompt(Problem("Say 1", ""), tokenizer))
    assert text == "low:Say 1"
