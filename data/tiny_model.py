"""What the tiny models have in common: the network, its supervised warm-up, and a cache in which each is made once.

data/tiny.py makes the one that adds, data/tiny_agent.py those that act in environments.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

PAD, EOS = "<pad>", "<eos>"
MAX_POSITIONS = 512
MATRIX_LR = 0.03
"""Learning rate of Muon, which needs half of AdamW's steps here."""
OTHER_LR = 5e-3
"""Learning rate of AdamW, for embeddings and norms."""
LR_WARMUP_STEPS = 50
SEED = 0
NUM_THREADS = 1
"""Fixed, as the order of float sums depends on it; a second one gains a third, and loses it all to busy neighbours."""
_REPORT_EVERY_S = 10.0


def make_once(path: Path, make: Callable[[Path], None]) -> None:
    """Fill the directory `path` unless it exists; it appears whole, and of several processes one makes it."""
    from filelock import FileLock

    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.parent / "tiny.lock"):
        if not path.exists():
            making = path.parent / "tiny-making"
            shutil.rmtree(making, ignore_errors=True)  # of a process that was killed half-way
            making.mkdir()
            make(making)
            making.rename(path)


def untrained_model(vocabulary: list[str]):
    """A Qwen3 of 0.1 M parameters, the same each time; torch's own random state stays as it was."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    # vLLM's CPU attention takes head sizes 32, 64, 80, 96, 128 and a few larger ones.
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.08,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary.index(EOS),
        pad_token_id=vocabulary.index(PAD),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return Qwen3ForCausalLM(config)


def descend(model, losses: Iterator[torch.Tensor], num_steps: int, report: Callable[[str], None]) -> None:
    """A fixed number of optimizer steps; `losses` computes one loss [] of the model each time it is asked."""
    optimizers = _optimizers(model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: _lr_factor(step, num_steps)) for o in optimizers]
    reported = time.monotonic()
    for step, loss in zip(range(num_steps), losses, strict=False):
        model.zero_grad()
        loss.backward()
        for stepper in (*optimizers, *schedules):
            stepper.step()
        if time.monotonic() - reported > _REPORT_EVERY_S:
            reported = time.monotonic()
            report(f"tiny model: step {step + 1}/{num_steps}, loss {loss.item():.3f} nats")


def _optimizers(model) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for everything else."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_LR, weight_decay=0.0),
        torch.optim.AdamW(others, lr=OTHER_LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _lr_factor(step: int, num_steps: int) -> float:
    return min(1.0, (step + 1) / LR_WARMUP_STEPS) * max(0.02, 1 - step / num_steps)


@contextlib.contextmanager
def fixed_threads() -> Iterator[None]:
    """NUM_THREADS threads of torch in here, as many as before afterwards."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
