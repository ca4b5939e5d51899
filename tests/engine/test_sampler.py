"""vLLM's own sampler of the CPU, on random logits, against the trainer's sampling transform."""

from types import SimpleNamespace

import pytest
import torch

from asyncrl.config import Config
from asyncrl.engine.vllm_setup import sampling_params
from asyncrl.trainer.sampling import Sampling, sampling_logits

ROWS, VOCAB = 64, 300
CUTS = [
    (1.0, 0, 0.0),
    (0.9, 0, 0.0),
    (1.0, 7, 0.0),
    (1.0, 0, 0.05),
    (0.8, 7, 0.0),
    (0.8, 0, 0.1),
    (0.7, 20, 0.02),
]
"""top_p, top_k and min_p, as options have them."""


def sample(logits: torch.Tensor, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [N] and the log-probs [N, V] that vLLM gives for them; each row is a request with a seed."""
    from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors, MinPLogitsProcessor
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    requests = [sampling_params(config, [], seed, 8, 1) for seed in range(len(logits))]
    scheduler = SimpleNamespace(max_num_seqs=len(logits))
    least = MinPLogitsProcessor(
        SimpleNamespace(scheduler_config=scheduler), torch.device("cpu"), False
    )
    least.update_state(
        BatchUpdate(
            len(logits), [], [(i, request, [], []) for i, request in enumerate(requests)], []
        )
    )
    columns = {
        name: torch.tensor([getattr(request, name) for request in requests])
        for name in ("temperature", "top_p", "top_k")
    }
    # as vLLM's batch has it
    columns["top_k"] = torch.where(columns["top_k"] > 0, columns["top_k"], logits.shape[1])
    unused = torch.zeros(len(logits))
    metadata = SamplingMetadata(
        **columns,
        all_greedy=False,
        all_random=True,
        generators={
            i: torch.Generator().manual_seed(request.seed) for i, request in enumerate(requests)
        },
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=unused,
        presence_penalties=unused,
        repetition_penalties=unused,
        output_token_ids=[[] for _ in requests],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors([least]),
    )
    return Sampler("processed_logprobs").sample(logits.clone(), metadata)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
@pytest.mark.parametrize(("top_p", "top_k", "min_p"), CUTS)
def test_what_vllm_draws_from_is_the_trainers_transform(temperature, top_p, top_k, min_p):
    logits = 3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
    cuts = {"top_p": top_p, "top_k": top_k, "min_p": min_p}
    tokens, engine = sample(logits, Config(temperature=temperature, **cuts))
    trainer = sampling_logits(logits, tokens, Sampling(temperature, **cuts)).log_softmax(dim=-1)
    assert torch.equal(engine.isinf(), trainer.isinf()), "both keep the same tokens"
    assert (
        torch.isfinite(engine.gather(1, tokens[:, None])).all() and len(tokens.unique()) > ROWS / 4
    )
    torch.testing.assert_close(engine, trainer, rtol=1e-6, atol=1e-5)
    assert (engine.isinf().sum() > 0) == (cuts != {"top_p": 1.0, "top_k": 0, "min_p": 0.0})
