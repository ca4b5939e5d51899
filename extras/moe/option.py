"""The changes of `--optim.seq-aux-loss-coef`: the check of a model, and the policy of a model with experts.

Importing this is cheap. The policy's part imports transformers.
"""

from typing import TYPE_CHECKING

from asyncrl.config import Config
from asyncrl.plugins import Plugin

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from asyncrl.trainer.policy import Policy
    from extras.moe.routing import Routing


class BalancePlugin(Plugin):
    """Counts what the routers of a model choose. With --optim.seq-aux-loss-coef it also balances them."""

    rules = (
        (
            lambda c: c.optim.seq_aux_loss_coef > 0 and c.share_prefix in ("prompt", "tree"),
            "--optim.seq-aux-loss-coef {c.optim.seq_aux_loss_coef:g} balances experts within a sequence, and "
            "--share-prefix {c.share_prefix} reads several as one; change one of the two",
        ),
    )

    def check(self, config: Config, hf_config: "PreTrainedConfig") -> None:
        """Raise ValueError, before a model is loaded, for --optim.seq-aux-loss-coef and a model without experts."""
        if not config.optim.seq_aux_loss_coef:
            return
        import torch
        from transformers import AutoModelForCausalLM

        from extras.moe.routing import find_routers

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=False)
        find_routers(model, config.optim.seq_aux_loss_coef)

    def make_policy_plugin(self, policy: "Policy") -> "Routing | None":
        """Return what watches the routers of a policy; None for a model without experts."""
        from extras.moe.routing import Routing, find_routers

        routers, index = find_routers(policy.module.model, policy.config.optim.seq_aux_loss_coef)
        return Routing(policy, routers, index) if routers else None


PLUGIN = BalancePlugin()
