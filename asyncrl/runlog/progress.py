"""The line that a run prints for each step."""

SHOWN_METRICS = (
    "reward/mean", "eval/accuracy", "eval/policy_version", "staleness/mean", "staleness/max",
    "rollout/tokens_per_s_per_gpu", "time/step_s", "time/wait_s", "loss/total",
)  # fmt: skip


def print_step(metrics: dict[str, float], num_steps: int) -> None:
    """Print one finished step of `num_steps`."""
    numbers = "  ".join(
        f"{name} {metrics[name]:.4g}" for name in SHOWN_METRICS if metrics.get(name) is not None
    )
    print(f"step {int(metrics['step'])}/{num_steps}  {numbers}", flush=True)
