"""The line that a run prints for each step: a progress bar on a terminal, plain lines in a file."""

import sys

import rich.progress

SHOWN_METRICS = (
    "reward/mean", "eval/accuracy", "staleness/mean", "staleness/max", "rollout/tokens_per_s",
    "rollout/tokens_per_s_per_gpu", "time/step_s", "time/wait_s", "loss/total",
)  # fmt: skip


class Progress:
    """Shows the steps of a run."""

    def __init__(self, num_steps: int):
        self.num_steps = num_steps
        self._bar = rich.progress.Progress(
            rich.progress.MofNCompleteColumn(),
            rich.progress.BarColumn(bar_width=20),
            rich.progress.TimeRemainingColumn(),
            rich.progress.TextColumn("{task.description}"),
            disable=not sys.stdout.isatty(),
        )
        self._task = self._bar.add_task("", total=num_steps)
        self._bar.start()

    def show(self, metrics: dict[str, float]) -> None:
        """Show one finished step."""
        numbers = "  ".join(
            f"{name} {metrics[name]:.4g}" for name in SHOWN_METRICS if metrics.get(name) is not None
        )
        self._bar.update(self._task, completed=metrics["step"], description=numbers)
        if self._bar.disable:
            print(f"step {int(metrics['step'])}/{self.num_steps}  {numbers}", flush=True)

    def close(self) -> None:
        """Restore the terminal."""
        self._bar.stop()
