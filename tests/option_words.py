"""Words of the command line that give every option another value."""

from asyncrl.config import Option, allowed_values, switch

EXAMPLES = {
    "task": "gsm8k", "algo": "tis", "advantage": "rloo", "top_p": "0.5", "algo_args": "clip_high=0.3",
    "task_args": "held_out=0.2", "model": "another", "save_memory": "optimizer", "listen": "127.0.0.1:1",
    "run_name": "another", "runs_dir": "elsewhere", "data_path": "here", "gpu_memory_utilization": "0.5",
    "temperature": "0.5", "min_p": "0.5", "optimizer": "sgd", "reward": "a.py:f", "optim.min_lr_ratio": "0.5",
    "optim.args": "weight_decay=0.1", "advantage.gamma": "0.5", "advantage.lam": "0.5", "advantage.value_lam": "0.5",
    "swarm.verify_share": "0.5", "swarm.snapshots": "folder", "max_failed_share": "0.25", "tracker_project": "mine",
}  # fmt: skip
"""Values that are not the default's. A choice gives its second word, a number is made one larger, a switch turned."""


def words_that_change(option: Option) -> list[str]:
    """The words that give an option another value than its default."""
    if "bool" in str(option.kind):
        return [switch(option.name, not option.default)]
    value = EXAMPLES.get(option.name)
    if value is None and "Literal" in str(option.kind):
        value = allowed_values(option.kind).split(" or ")[1]
    return [option.flag, value or str((option.default or 0) + 1)]
