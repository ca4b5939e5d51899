"""The metrics of a run at Weights & Biases: `--wandb`."""

from pathlib import Path

from asyncrl.config import Config


def start(config: Config, path: Path, run_id: str, resumed_from: int | None):
    """Begin or continue the run at Weights & Biases.

    Online a resumed run continues at the checkpoint's step, to which the server cuts it back. Offline there is no
    record of the steps that are made again. Raises ValueError, in one line, for what Weights & Biases refuses.
    """
    import wandb  # here, as all ranks look whether this file is there, and one writes

    run = {"id": run_id}
    if resumed_from is not None:
        moment = {"resume_from": f"{run_id}?_step={resumed_from}"}
        run = moment if config.wandb == "online" else {"id": run_id, "resume": "allow"}
    settings = {
        "project": config.wandb_project,
        "name": path.name,
        "dir": str(path),
        "config": config.as_dict(),
    }
    try:
        return wandb.init(mode=config.wandb, **settings, **run)
    except wandb.Error as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"--wandb {config.wandb}: {reason}; run `wandb login`, set WANDB_API_KEY, or use --wandb offline"
        ) from None
