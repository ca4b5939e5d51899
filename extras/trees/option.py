"""The changes of `--share-prefix`: the check of a model, and the policy.

Importing this is cheap. The policy's part imports transformers.
"""

from typing import TYPE_CHECKING

from asyncrl.config import Config
from asyncrl.plugins import Plugin

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from asyncrl.trainer.policy import Policy
    from extras.trees.policy import Sharing


class SharingPlugin(Plugin):
    """The changes of --share-prefix."""

    def check(self, config: Config, hf_config: "PreTrainedConfig") -> None:
        """Raise ValueError, in one line, for a model that cannot share prefixes as it must."""
        from extras.trees.attention import unfit_for_sharing

        unfit = unfit_for_sharing(hf_config)
        if unfit and config.share_prefix in ("prompt", "tree"):
            raise ValueError(
                f"--share-prefix needs full attention in every layer, {config.model} has {', '.join(unfit)}; leave the "
                "option out"
            )

    def make_policy_plugin(self, policy: "Policy") -> "Sharing":
        """Return what reads shared prefixes of a policy's updates once."""
        from extras.trees.policy import Sharing

        return Sharing(policy)


PLUGIN = SharingPlugin()
