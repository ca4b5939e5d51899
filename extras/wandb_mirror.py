"""The metrics of a run at Weights & Biases: `--wandb`."""

from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.plugins import Plugin


class MirrorPlugin(Plugin):
    """What --wandb changes."""

    def start_mirror(
        self, config: Config, run_path: Path, run_id: str, resumed_from: int | None
    ) -> Any:
        """Begin or continue the run at Weights & Biases.

        Online a resumed run continues at the checkpoint's step, to which the server cuts it back. Offline there is no
        record of the steps that are made again. Raises ValueError, in one line, for what Weights & Biases refuses.
        """
        import wandb  # here, because only rank 0 writes

        run = {"id": run_id}
        if resumed_from is not None:
            moment = {"resume_from": f"{run_id}?_step={resumed_from}"}
            run = moment if config.wandb == "online" else {"id": run_id, "resume": "allow"}
        settings = {
            "project": config.wandb_project,
            "name": run_path.name,
            "dir": str(run_path),
            "config": config.as_dict(),
        }
        try:
            return wandb.init(mode=config.wandb, **settings, **run)
        except wandb.Error as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ValueError(
                f"--wandb {config.wandb}: {reason}; run `wandb login`, set WANDB_API_KEY, or use --wandb offline"
            ) from None


PLUGIN = MirrorPlugin()
