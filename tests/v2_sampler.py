"""vLLM's sampler for GPUs (Model Runner V2) on the CPU, by Triton's interpreter, against the trainer's transform.

To be run as a process, `v2_sampler.py RESULT.json`, with TRITON_INTERPRET=1 and Triton on the path: fake_h100.py has
vLLM take its code for CUDA, and what that keeps on the GPU is in host memory here.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import fake_h100
import numpy as np
import torch
from scipy.stats import chisquare

from asyncrl.trainer.sampling import Sampling, sampling_logits

VOCAB, ROWS = 600, 8
FEW, DRAWS = 30, 1500
CASES = {
    "plain": Sampling(), "temperature": Sampling(0.7), "top_p": Sampling(1.0, 0.9), "both": Sampling(0.6, 0.8),
    "top_k": Sampling(1.0, 1.0, 5), "min_p": Sampling(1.0, 1.0, 0, 0.1), "all": Sampling(0.8, 0.8, 10, 0.05),
}  # fmt: skip


def request(index: int, sampling: Sampling):
    """What vLLM is told of a request."""
    from vllm.sampling_params import SamplingParams

    seed = int(np.random.SeedSequence([7, index]).generate_state(1, np.uint64)[0] >> 1)
    return SamplingParams(**sampling._asdict(), seed=seed, logprobs=0)


def make_sampler(num_requests: int, vocab: int, sampling: Sampling):
    """vLLM's own sampler with as many seeded requests, as our engines ask for them."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    device = torch.device("cpu")
    states = RequestState(num_requests, 64, 64, 0, vocab, device)
    options = SimpleNamespace(reasoning_config=None)
    sampler = Sampler(
        options, num_requests, vocab, device, states, logprobs_mode="processed_logprobs"
    )
    for index in range(num_requests):
        states.add_request(str(index), 3, [1, 2, 3], 0, 32)
        sampler.add_request(index, request(index, sampling))
    states.apply_staged_writes()
    sampler.apply_staged_writes()
    return sampler


def sample(sampler, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [N] and the logits [N, V] that they are drawn by; each row is a request."""
    rows = torch.arange(len(logits), dtype=torch.int32)
    position, none = (
        torch.full((len(logits),), 5, dtype=torch.int64),
        torch.zeros(len(logits), dtype=torch.int32),
    )
    return sampler.sample(
        logits.clone(),
        rows,
        rows,
        rows.numpy(),
        position,
        none,
        none,
        none.numpy() + 6,
        return_logprobs=True,
    )


def draw(processed: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """DRAWS tokens by the same logits [1, V], each for a request of its own, as the sampler draws them."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    states, rows = SamplingStates(DRAWS, processed.shape[1]), torch.arange(DRAWS, dtype=torch.int32)
    for index in range(DRAWS):
        states.add_request(index, request(index, sampling))
    states.apply_staged_writes()
    of_requests = (
        states.temperature.gpu,
        states.seeds.gpu,
        torch.full((DRAWS,), 5, dtype=torch.int64),
    )
    logits = processed.expand(DRAWS, -1).contiguous()
    return gumbel_sample(logits, rows, *of_requests, apply_temperature=False, is_drafting=False)


def compare(sampling: Sampling) -> dict:
    """Largest gap of log-probs, tokens on whose place in the nucleus the two differ, χ² of frequencies."""
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(ROWS, VOCAB, generator=generator)
    tokens, processed = sample(make_sampler(ROWS, VOCAB, sampling), logits)
    expected = sampling_logits(logits, tokens, sampling)
    logprobs = compute_topk_scores(processed, 0, tokens).logprobs
    gap = (expected.log_softmax(-1).gather(1, tokens[:, None]) - logprobs).abs().max()
    differ = int((expected.isinf() != processed.isinf()).sum())
    few = 0.8 * torch.randn(1, FEW, generator=generator)
    drawn = draw(sample(make_sampler(1, FEW, sampling), few)[1], sampling)
    likeliest = few.argmax(-1)
    probabilities = sampling_logits(few, likeliest, sampling).double().softmax(-1)[0].numpy()
    counts = np.bincount(drawn.numpy(), minlength=FEW)
    often = probabilities * DRAWS >= 5
    seen, wanted = ([*of[often], of[~often].sum()] for of in (counts, probabilities * DRAWS))
    kept = np.array(wanted) > 0
    return {
        "gap": float(gap),
        "differ": differ,
        "outside": int(counts[probabilities == 0].sum()),
        "p": float(chisquare(np.array(seen)[kept], np.array(wanted)[kept]).pvalue),
    }


def split_differs() -> int:
    """Tokens on whose place in the nucleus the kernels for few rows, which vLLM has beside, differ from the trainer."""
    from vllm.v1.sample.ops.topk_topp_triton import _apply_topp_split

    logits = 3 * torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    processed = logits.clone()
    _apply_topp_split(processed, None, torch.full((4,), 0.9), float("-inf"), 4)
    return int(
        (
            sampling_logits(logits, logits.argmax(-1), Sampling(top_p=0.9)).isinf()
            != processed.isinf()
        ).sum()
    )


def greedy_differs() -> int:
    """Rows in which temperature 0 does not give the likeliest token."""
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(2))
    tokens, _ = sample(make_sampler(ROWS, VOCAB, Sampling(temperature=0.0)), logits)
    return int((tokens != logits.argmax(-1)).sum())


def count_rows_by_int(folder: Path) -> None:
    """Let the row in vLLM's kernel for top_p be what the interpreter's loop gives: Python's int, which has no `to`."""
    name = "vllm.v1.sample.ops.topk_topp_triton"
    source, changed = (
        Path(importlib.util.find_spec(name).origin).read_text(),
        folder / "topk_topp_triton.py",
    )
    assert source.count("row_id.to(tl.int64)") == 1
    changed.write_text(source.replace("row_id.to(tl.int64)", "row_id"))
    spec = importlib.util.spec_from_file_location(name, changed)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def main() -> None:
    """Compare all cases."""
    # which is fused, and not for requests with seeds or log-probs
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    fake_h100.pretend()
    import vllm.platforms
    from vllm.triton_utils import HAS_TRITON

    assert HAS_TRITON, "vLLM does not take this Triton"
    here = vllm.platforms.current_platform
    # buffers are in host memory then
    here.device_type, here.is_pin_memory_available = "cpu", lambda: False
    count_rows_by_int(Path(sys.argv[1]).parent)
    from vllm.v1.sample.ops import topk_topp_triton
    from vllm.v1.worker.gpu import buffer_utils

    buffer_utils.UvaBuffer = buffer_utils.NonUvaBuffer
    topk_topp_triton.num_compute_units = lambda *_: 4
    found = {name: compare(case) for name, case in CASES.items()}
    found |= {"split differs": split_differs(), "greedy differs": greedy_differs()}
    Path(sys.argv[1]).write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    main()
