"""The changes of `--router-replay`: the check of a model, the engine, and the policy.

Importing this is cheap. The engine's part imports vllm, and the trainer's part transformers.
"""

from typing import TYPE_CHECKING

from asyncrl.config import Config, Rule
from asyncrl.plugins import Plugin

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from asyncrl.trainer.policy import Policy
    from extras.router_replay.policy import Replaying

FAMILIES = ("flex_olmo", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Models whose routers take the likeliest experts of a softmax, and that are packed or read one a row.

Other models choose by a sigmoid, a bias or groups, or mix experts with recurrent layers. For recurrent layers
vLLM keeps no prefix on a CPU."""


RULES: list[Rule] = [
    (
        lambda c: c.share_prefix in ("prompt", "tree"),
        "--router-replay has the experts of each response, and --share-prefix {c.share_prefix} reads a prefix of "
        "several once; change one of the two",
    ),
    (
        lambda c: c.on_update == "recompute",
        "--router-replay needs the experts of all keys, and with --on-update recompute vLLM returns those of new "
        "tokens alone; use --on-update keep, resume, restart or wait",
    ),
    (
        lambda c: c.listen is not None,
        "--router-replay needs engines of the run itself, and --listen {c.listen} lets hosts sample whose experts "
        "nobody checks; change one of the two",
    ),
    (
        lambda c: c.is_agent,
        "--router-replay has the experts of one sequence, and --task {c.task} makes several; change one of the two",
    ),
]


class ReplayPlugin(Plugin):
    """The changes of --router-replay."""

    rules = RULES

    def engine_options(self, on_cpu: bool) -> dict:
        """Return vLLM's engine arguments. With them it returns the experts of each token."""
        from extras.router_replay import engine

        return engine.engine_options(on_cpu)

    def check(self, config: Config, hf_config: "PreTrainedConfig") -> None:
        """Raise ValueError, in one line, for a model whose routers are not known."""
        if hf_config.model_type not in FAMILIES:
            raise ValueError(
                f"--router-replay knows the routers of {', '.join(FAMILIES)}, and a {hf_config.model_type} has others "
                "or none; leave it out, or take another --model"
            )

    def make_policy_plugin(self, policy: "Policy") -> "Replaying":
        """Return what replays experts in a policy's passes."""
        from extras.router_replay.policy import Replaying

        return Replaying(policy)


PLUGIN = ReplayPlugin()
