"""What a user brings: how it is found, loaded and fingerprinted, and what is said of what cannot be."""

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
from own_files import ENVIRONMENT, TASK, chat_tokenizer, write_jsonl, write_own

from asyncrl import user_code as own
from asyncrl.config import Config
from asyncrl.tasks import load_task, prepare_environment, score_of
from asyncrl.weights.models import load_tokenizer, resolve_model
from data.problem import Problem

ROOT = Path(__file__).parents[1]


def refusal(call, *args) -> str:
    """The line that a call is refused with."""
    with pytest.raises(ValueError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_object_is_loaded_once_and_its_module_is_called_as_its_file(tmp_path):
    path = write_own(tmp_path, "seen = []\nclass Mine: pass\n")
    mine = own.load(f"{path}:Mine")
    assert mine is own.load(f"{path}:Mine") and mine.__module__ == path.stem
    assert own.load(f"{path}:seen") == [] and own.load("addition", "--task", {"addition": 3}) == 3


def test_paths_of_user_code_are_made_absolute_or_of_a_folder_and_other_texts_stay(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    config = Config(
        algo="mine.py:loss", task="environment:a/mine.py:Env", reward=("../mine.py:score*0.5",)
    )
    here = own.located(config)
    assert (here.algo, here.task) == (
        f"{tmp_path}/mine.py:loss",
        f"environment:{tmp_path}/a/mine.py:Env",
    )
    assert (
        here.reward == (f"{tmp_path.parent}/mine.py:score*0.5",)
        and here.optimizer == config.optimizer
    )
    there = own.located(config, Path("code"))
    assert (there.algo, there.task) == (
        f"{tmp_path}/code/mine.py:loss",
        f"environment:{tmp_path}/code/mine.py:Env",
    )
    assert there.reward == (f"{tmp_path}/code/mine.py:score*0.5",) and own.located(there) == there


def test_a_file_that_is_missing_is_named(tmp_path):
    said = refusal(own.load, f"{tmp_path}/nowhere.py:loss", "--algo")
    assert said.startswith("--algo ") and said.endswith(
        f"there is no file {tmp_path}/nowhere.py; give FILE.py:NAME"
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "x = 1\nimport nothing_of_this_name\n",
            "line 2: ModuleNotFoundError: No module named 'nothing_of_this_name'",
        ),
        ("def f():\n    raise KeyError('k')\n\nf()\n", "line 2: KeyError: 'k'"),
        ("raise SystemExit(3)\n", "line 1: SystemExit: 3"),
        ("x = (\n", "line 1: SyntaxError: '(' was never closed (own"),
    ],
)
def test_a_file_that_raises_on_import_is_named_with_its_line(tmp_path, source, said):
    path = write_own(tmp_path, source)
    assert f"{path.name}, {said}" in refusal(own.load, f"{path}:loss", "--algo")
    assert path.stem not in sys.modules, "it may be mended, and loaded then"


def test_a_file_without_the_name_says_which_it_has(tmp_path):
    path = write_own(tmp_path, "from pathlib import Path\ndef score(): ...\nclass Other: ...\n")
    assert refusal(own.load, f"{path}:scores").endswith(
        "has no scores; it has score, Other; did you mean score?"
    )


def test_a_sibling_that_fails_is_named_with_its_line(tmp_path):
    sibling = write_own(tmp_path, "\n\n1 / 0\n", "sibling")
    path = write_own(tmp_path, f"import {sibling.stem}\n")
    said = refusal(own.load, f"{path}:loss")
    assert f"{sibling.name}, line 3: ZeroDivisionError: division by zero" in said


@pytest.mark.parametrize("stem", ["asyncrl", "data", "json", "numpy", "train_async"])
def test_a_name_that_another_module_has_is_refused(tmp_path, stem):
    (tmp_path / f"{stem}.py").write_text("def loss(): ...\n")
    assert "has the name of another module" in refusal(own.load, f"{tmp_path}/{stem}.py:loss")


def test_a_sibling_that_another_module_hides_is_refused(tmp_path):
    (tmp_path / "colorsys.py").write_text("")
    path = write_own(tmp_path, "import colorsys\n")
    assert f"{tmp_path}/colorsys.py has the name of another module" in refusal(
        own.load, f"{path}:loss"
    )


def test_two_files_of_one_name_are_refused(tmp_path):
    one = write_own(tmp_path / "a", "loss = 1\n")
    other = tmp_path / "b" / one.name
    other.parent.mkdir()
    other.write_text("loss = 2\n")
    assert "would be one module; rename one of the two" in refusal(
        own.files, [f"{one}:loss", f"{other}:loss"]
    )


def brought(folder: Path) -> str:
    """A file with a sibling, a package, and a neighbour that it does not import."""
    (folder / "package_of_mine").mkdir(parents=True)
    (folder / "package_of_mine" / "deep.py").write_text("x = 1\n")
    (folder / "sibling_of_mine.py").write_text("import package_of_mine.deep\n")
    (folder / "neighbour.py").write_text("")
    (folder / "main_of_mine.py").write_text(
        "import torch, asyncrl\ndef loss():\n    from sibling_of_mine import x\n"
    )
    return f"{folder}/main_of_mine.py:loss*2"


def test_the_files_are_those_that_are_named_and_what_they_import_from_their_folder(tmp_path):
    text = brought(tmp_path)
    assert list(own.files([text])) == [
        "main_of_mine.py",
        "sibling_of_mine.py",
        "package_of_mine/deep.py",
    ]


def test_copies_are_imported_in_place_of_the_files(tmp_path):
    sibling = write_own(tmp_path / "mine", "x = 1\n")
    path = write_own(
        tmp_path / "mine", f"import {sibling.stem}\ndef loss():\n    return {sibling.stem}.x\n"
    )
    config = Config(algo=f"{path}:loss")
    first = own.load(config.algo)
    copies = own.copied(config, tmp_path / "code")
    sibling.write_text("x = 2\n")
    loss = own.load(copies.algo)
    assert (
        loss is not first
        and loss() == 1
        and loss.__code__.co_filename == str(tmp_path / "code" / path.name)
    )
    assert sys.modules[sibling.stem].__file__ == str(tmp_path / "code" / sibling.name)
    assert own.load(copies.algo) is loss


def test_this_codes_own_modules_are_not_the_users(tmp_path):
    text = f"{ROOT}/rollout.py:main"
    assert list(own.files([text])) == ["rollout.py"]


# Tasks


def test_a_task_of_ones_own_is_made_with_seed_data_and_arguments(tmp_path):
    text = f"{write_own(tmp_path, TASK)}:Double"
    task = load_task(text, 3, "here", ("factor=3", "words={} x {} ="))
    assert task.train_problem(0) == Problem("3 x 6 =", "18")
    held_out = {problem.prompt for problem in task.eval_problems(100)}
    assert len(held_out) == 40 and held_out.isdisjoint(
        task.train_problem(i).prompt for i in range(100)
    )
    assert score_of(text)("18", "18") == 1.0
    tokenizer = chat_tokenizer()
    assert (
        tokenizer.decode(task.encode_prompt(task.train_problem(0), tokenizer))
        == "[user]3 x 6 =[assistant]"
    )


def test_a_task_of_ones_own_scores_in_another_process_by_its_text_alone(tmp_path):
    text = f"{write_own(tmp_path, TASK)}:Double"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_score_there, (text, "4", "4")) == 1.0


def _score_there(text, answer, response):
    return score_of(text)(answer, response)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("@staticmethod\n    def score(", "def nothing("),
            "has no static method score; give it a @staticmethod score",
        ),
        (
            ("@staticmethod\n    def score(", "def score(self, "),
            "has no static method score; give it a @staticmethod score",
        ),
    ],
)
def test_a_task_without_a_static_score_is_told_what_to_do(tmp_path, change, said):
    text = f"{write_own(tmp_path, TASK.replace(*change))}:Double"
    assert said in refusal(score_of, text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("def train_problem", "def training_problem"),
            "AttributeError: 'Double' object has no attribute 'train_",
        ),
        (
            ("self.seed, self.factor", "self.seed, self.nothing[0]"),
            "line 7: AttributeError: 'Double' object has no",
        ),
        (
            ("class Double:", "Double = 3\nclass Other:"),
            "is a int; give a class with train_problem and eval_problems",
        ),
    ],
)
def test_a_task_that_cannot_be_made_or_asked_is_one_line(tmp_path, change, said):
    text = f"{write_own(tmp_path, TASK.replace(*change))}:Double"
    assert said in refusal(lambda: load_task(text, 0).train_problem(0))


def test_what_a_task_raises_later_names_its_file_and_line(tmp_path):
    path = write_own(
        tmp_path,
        TASK.replace("return self._problem(2 * (", "return 1 // (index - 5) or self._problem(("),
    )
    task = load_task(f"{path}:Double", 0)
    assert f"{path.name}, line 10: ZeroDivisionError" in refusal(task.train_problem, 5)


def test_what_is_no_problem_is_refused(tmp_path):
    path = write_own(tmp_path, TASK.replace("return Problem(", "return ("))
    assert "train_problem gave" in refusal(load_task(f"{path}:Double", 0).train_problem, 0)


def test_an_argument_that_a_task_does_not_take_is_refused_with_those_it_takes(tmp_path):
    text = f"{write_own(tmp_path, TASK)}:Double"
    assert f"factr=3: --task {text} takes factor, words; did you mean factor?" in refusal(
        load_task, text, 0, None, ("factr=3",)
    )
    assert f"factor of --task {text} must be a whole number" in refusal(
        load_task, text, 0, None, ("factor=x",)
    )
    assert (
        refusal(load_task, "addition", 0, None, ("a=1",))
        == "--task-args a=1: --task addition takes none"
    )


def test_an_environment_of_ones_own_asks_and_rewards(tmp_path):
    name = f"environment:{write_own(tmp_path, ENVIRONMENT)}:Echo"
    task = load_task(name, 0)
    problem = task.train_problem(0)
    environment = prepare_environment(name)()
    observation, _ = environment.reset(seed=problem.environment_seed)
    assert task.first_observation(problem) == observation and observation.startswith("Say ")
    assert environment.step(observation)[1] == 1.0
    seeds = {problem.environment_seed for problem in task.eval_problems(200)}
    assert seeds.isdisjoint(task.train_problem(i).environment_seed for i in range(1000))


def test_the_class_of_an_environment_takes_arguments_and_refuses_others(tmp_path):
    turns = "class Echo(gymnasium.Env):\n    def __init__(self, turns: int = 3):\n        self.most = turns\n"
    text = f"{write_own(tmp_path, ENVIRONMENT.replace('class Echo(gymnasium.Env):', turns))}:Echo"
    task = load_task(f"environment:{text}", 0, None, ("turns=5",))
    assert (
        task._environment.most
        == prepare_environment(f"environment:{text}", ("turns=7",))().most - 2
        == 5
    )
    said = refusal(load_task, f"environment:{text}", 0, None, ("turn=5",))
    assert said == f"--task-args turn=5: --task {text} takes turns; did you mean turns?"
    assert (
        refusal(load_task, "frozen_lake", 0, None, ("a=1",))
        == "--task-args a=1: --task frozen_lake takes none"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ('return f"Say {self.word}", {}', "return 3, {}"),
            "reset gives int to observe; give a str",
        ),
        (
            ("super().reset(seed=seed)", "self.nothing()"),
            "line 9: AttributeError: 'Echo' object has no",
        ),
        (
            (
                "class Echo(gymnasium.Env):",
                "class Echo(gymnasium.Env):\n    def __init__(self, x): ...",
            ),
            "missing a required argument: 'x'",
        ),
    ],
)
def test_an_environment_that_does_not_ask_is_one_line(tmp_path, change, said):
    name = f"environment:{write_own(tmp_path, ENVIRONMENT.replace(*change))}:Echo"
    assert said in refusal(lambda: load_task(name, 0).first_observation(Problem("", "", 3)))


# Rows


ROWS = [{"prompt": f"Say {n}", "answer": str(n), "more": {"n": [n]}} for n in range(50)]


def jsonl(path: Path, rows=ROWS, *task_args):
    return load_task("jsonl", 0, str(write_jsonl(path, rows)), task_args)


def test_rows_are_split_by_a_hash_of_their_prompts_and_the_parts_are_disjoint(tmp_path):
    task = jsonl(tmp_path / "a.jsonl", ROWS + ROWS, "held_out=0.3")
    held_out = {problem.prompt for problem in task.eval_problems(1000)}
    train = {task.train_problem(index).prompt for index in range(200)}
    assert 5 <= len(held_out) <= 25 and len(held_out | train) == 50 and held_out.isdisjoint(train)
    more = jsonl(tmp_path / "b.jsonl", [*ROWS, {"prompt": "another"}], "held_out=0.3")
    assert held_out <= {problem.prompt for problem in more.eval_problems(1000)}, (
        "a row stays where it was"
    )


def test_of_few_rows_one_is_held_out(tmp_path):
    task = jsonl(tmp_path / "a.jsonl", ROWS[:4], "held_out=0.001")
    assert len(task.eval_problems(10)) == 1


def test_a_file_of_held_out_rows_takes_its_prompts_out_of_training(tmp_path):
    test = write_jsonl(tmp_path / "mine.jsonl", ROWS[40:])
    task = jsonl(tmp_path / "a.jsonl", ROWS, f"test={test}")
    train = {task.train_problem(index).prompt for index in range(200)}
    assert train == {row["prompt"] for row in ROWS[:40]}
    assert {problem.prompt for problem in task.eval_problems(100)} == {
        row["prompt"] for row in ROWS[40:]
    }


def test_files_of_a_folder_are_parts_by_their_names(tmp_path):
    for name, rows in (("train-0", ROWS[:20]), ("train-1", ROWS[20:30]), ("validation", ROWS[30:])):
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    task = load_task("jsonl", 0, str(tmp_path))
    assert (
        len(task.eval_problems(100)) == 20
        and len({task.train_problem(i).prompt for i in range(100)}) == 30
    )


@pytest.mark.parametrize("saved_as", ["parquet", "save_to_disk", "json"])
def test_rows_of_parquet_and_of_saved_datasets_are_read_too(tmp_path, saved_as):
    import datasets

    rows, path = (
        datasets.Dataset.from_list(
            [{"prompt": row["prompt"], "answer": row["answer"]} for row in ROWS]
        ),
        None,
    )
    if saved_as == "save_to_disk":
        rows.save_to_disk(str(path := tmp_path / "saved"))
    else:
        getattr(rows, f"to_{saved_as}")(str(path := tmp_path / f"rows.{saved_as}"))
    task = load_task("jsonl", 0, str(path))
    prompts = [*task.eval_problems(100), *(task.train_problem(i) for i in range(100))]
    assert {problem.prompt for problem in prompts} == {row["prompt"] for row in ROWS}


def test_the_whole_row_is_the_answer_as_it_stands_in_the_file(tmp_path):
    rows = [{"prompt": f"{n}", f"only_here_{n}": {"deep": None}, "ü": "ß"} for n in range(20)]
    problem = jsonl(tmp_path / "a.jsonl", rows).train_problem(0)
    assert json.loads(problem.answer) == rows[int(problem.prompt)] and "ß" in problem.answer


def test_without_a_reward_the_column_answer_is_compared(tmp_path):
    problem, score = jsonl(tmp_path / "a.jsonl").train_problem(0), score_of("jsonl")
    right = json.loads(problem.answer)["answer"]
    assert score(problem.answer, f" {right}\n") == 1.0 and score(problem.answer, f"{right}0") == 0.0
    assert "no `answer`; give --reward" in refusal(score, json.dumps({"prompt": "?"}), "1")


def test_prompts_of_chat_messages_and_a_system_prompt_go_through_the_template(tmp_path):
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    task = jsonl(
        tmp_path / "a.jsonl",
        [{"ask": chat, "n": n} for n in range(3)] + ROWS_ASK,
        "prompt=ask",
        "system=s",
    )
    tokenizer, prompts = (
        chat_tokenizer(),
        [*task.eval_problems(9), *(task.train_problem(i) for i in range(9))],
    )
    shown = {tokenizer.decode(task.encode_prompt(problem, tokenizer)) for problem in prompts}
    assert shown == {
        "[system]s[user]a[assistant]b[user]c[assistant]",
        "[system]s[user]d[assistant]",
    }
    tokenizer.chat_template = None
    asked = next(problem for problem in prompts if problem.prompt == chat)
    assert "need a chat template" in refusal(task.encode_prompt, asked, tokenizer)


ROWS_ASK = [{"ask": "d", "n": 0}]


def test_options_reach_the_chat_template_and_order_may_be_the_files(tmp_path):
    task = jsonl(tmp_path / "a.jsonl", ROWS, 'template={"tone": "low"}', "shuffle=false")
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ tone }}:{{ messages[0]['content'] }}"
    prompts = [task.train_problem(i).prompt for i in range(20)]
    assert prompts == sorted(prompts, key=lambda prompt: int(prompt.split()[1]))
    assert (
        tokenizer.decode(task.encode_prompt(task.train_problem(0), tokenizer))
        == f"low:{prompts[0]}"
    )


@pytest.mark.parametrize(
    ("rows", "task_args", "said"),
    [
        (
            [{"question": "?"}],
            (),
            "a.jsonl, row 0 of train, has as its prompt 'None', neither",
        ),
        (
            [{"prompt": 3}],
            (),
            "row 0 of train, has as its prompt '3', neither a text nor a list of chat messages",
        ),
        (
            [{"prompt": [{"role": "user"}]}],
            (),
            "neither a text nor a list of chat messages with role and content",
        ),
        ([[1]], (), "a.jsonl, line 1: b'[1]' is no JSON object"),
        (ROWS[:1], (), "gives 0 training and 1 held-out problems; both must have some"),
        (ROWS, ("held_out=1",), "held_out of --task jsonl must be above 0 and below 1"),
        (ROWS, ("template=no",), "template takes a JSON object"),
        (
            ROWS,
            ("colunm=a",),
            "--task jsonl takes prompt, system, test, held_out, shuffle, template",
        ),
        (ROWS, ("test=nowhere.jsonl",), "nowhere.jsonl does not exist"),
    ],
)
def test_rows_and_arguments_that_cannot_be_used_are_one_line(tmp_path, rows, task_args, said):
    assert said in refusal(jsonl, tmp_path / "a.jsonl", rows, *task_args)


def test_rows_of_additions_suit_the_tiny_tokenizer(tmp_path):
    task = jsonl(
        tmp_path / "a.jsonl", [{"prompt": f"a{n} b34 =", "answer": "?"} for n in range(10, 30)]
    )
    assert (
        len(
            task.encode_prompt(
                task.train_problem(0), load_tokenizer(resolve_model("tiny", "addition"))
            )
        )
        == 5
    )


def test_loading_needs_no_torch(tmp_path):
    path = write_own(tmp_path, TASK)
    command = f"import sys; from asyncrl.tasks import load_task; load_task('{path}:Double', 0); "
    command += "print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
