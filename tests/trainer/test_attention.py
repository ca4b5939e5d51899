"""A prefix that is read once gives the log-probs and the gradient of one that is read for every sequence."""

import functools

import numpy as np
import pytest
import torch
from test_policy import AGGREGATIONS, make_config, plain_gradient, plain_logprobs, wide_clip
from tiny_policy import (
    VOCAB,
    assert_same_gradient,
    brute_force_nucleus,
    first_gradient,
    grouped_sequences,
    load,
    random_sequences,
    random_tree,
    save_tiny_model,
)
from torch.func import functional_call
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    RecurrentGemmaConfig,
)

from algos import KL_ESTIMATORS, LOSSES, LossInputs
from algos.inputs import couples_tokens
from algos.sampling import Sampling
from asyncrl.config import OptimOptions
from asyncrl.trainer.attention import (
    _block_mask_maker,
    attention_inputs,
    check_layers,
    dense_mask,
    mask_function,
)
from asyncrl.trainer.batch import distribute
from asyncrl.trainer.logprobs import TokenLogprobs
from asyncrl.trainer.lora import named_adapters
from asyncrl.trainer.loss import choose_loss
from asyncrl.trainer.packing import bundle, pack

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return save_tiny_model(str(tmp_path_factory.mktemp("untied")), tied=False)


@pytest.mark.parametrize("sharing", ["prompt", "tree"])
@pytest.mark.parametrize("budget", [40, 90, 100_000])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_sharing_prompts_leaves_the_gradient_that_of_the_definition(
    untied, aggregation, budget, sharing
):
    """Tolerance, in float32: 1e-4 of the loss, 1e-5 of each parameter's largest gradient."""
    sequences = grouped_sequences(5, 4, seed=3) + random_sequences(3)
    metrics = assert_gradient_of_the_definition(untied, sequences, aggregation, budget, sharing)
    assert budget == 40 or metrics["tokens/saved_share"] > 0.1


@pytest.mark.parametrize("budget", [35, 60, 100_000])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("seed", range(3))
def test_random_trees_have_the_gradient_of_the_definition(untied, aggregation, budget, seed):
    """Tokens that are trained in several branches, with another advantage in each; equal sequences; prefixes of others.

    Tolerance as above.
    """
    sequences = random_tree(12, seed)
    assert sum(s.num_trained for s in sequences) > 50
    metrics = assert_gradient_of_the_definition(untied, sequences, aggregation, budget, "tree")
    assert metrics["tokens/shareable"] >= metrics["tokens/saved_share"] > 0.15
    assert budget < 1000 or metrics["tokens/shareable"] == metrics["tokens/saved_share"] > 0.4


def assert_gradient_of_the_definition(path, sequences, aggregation, budget, sharing):
    policy = load(make_config(path, loss_aggregation=aggregation, share_prefix=sharing))
    metrics = policy.train_step(distribute([sequences], 1, budget, sharing)[0], policy_version=12)
    loss, gradient = plain_gradient(path, sequences, aggregation, policy.config.max_response_tokens)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert_same_gradient(first_gradient(policy), gradient)
    total = sum(len(s.tokens) for s in sequences)
    assert metrics["tokens/saved_share"] == pytest.approx(1 - metrics["tokens/forward"] / total)
    return metrics


# Against single sequences, whatever is trained how


IN_PARTS = (("prompt", 60), ("tree", 35), ("tree", 100_000))
"""What is shared, and the most tokens of a micro-batch: a tree in parts, and whole."""


@pytest.mark.parametrize("algo", LOSSES)
def test_every_loss_has_the_gradient_of_single_sequences_on_a_tree(untied, algo):
    """With a penalty to a reference, which is less sure; tolerance 1e-5 of each parameter's largest gradient, 1e-3 of
    the metrics. Tree and aggregation go by the length of the loss's name, so that a new one changes no other's."""
    sequences, aggregation = random_tree(12, seed=len(algo)), AGGREGATIONS[len(algo) % 3]
    options = {"algo": algo, "loss_aggregation": aggregation, "kl_coef": 0.1, **wide_clip(algo)}
    model, found = AutoModelForCausalLM.from_pretrained(untied).eval(), []
    logits = logits_alone(model, sequences)
    loss, means = loss_of_the_definition(
        make_config(untied, **options), sequences, logits, 0.8 * logits.detach()
    )
    loss.backward()
    for sharing, budget in IN_PARTS:
        policy = load(make_config(untied, share_prefix=sharing, **options))
        with torch.no_grad():
            policy.reference.model.get_output_embeddings().weight.mul_(0.8)
        found.append(
            assert_step(
                policy, sequences, budget, means, {n: p.grad for n, p in model.named_parameters()}
            )
        )
    assert (
        found[0].pop("tokens/forward")
        >= found[1].pop("tokens/forward")
        >= found[2].pop("tokens/forward")
    )
    assert found[0].pop("tokens/saved_share") < 0.3 < found[2].pop("tokens/saved_share")
    del found[1]["tokens/saved_share"]
    assert found[1] == pytest.approx(found[0], rel=1e-3, abs=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_adapters_have_the_gradient_of_single_sequences_on_a_tree(untied, aggregation):
    """Of adapters that are no longer 0, with a penalty to the model below them. Tolerance 1e-5 of each one's largest
    gradient."""
    sequences, options = (
        random_tree(12, seed=len(aggregation)),
        {"loss_aggregation": aggregation, "kl_coef": 0.1},
    )
    policies = [
        load(make_config(untied, lora_rank=4, share_prefix=sharing, **options))
        for sharing, _ in IN_PARTS
    ]
    for policy in policies:
        generator = torch.Generator().manual_seed(0)
        for _, adapter in named_adapters(policy.module.model):
            adapter.detach().to_local().normal_(std=0.05, generator=generator)
    adapters = {
        n: p.full_tensor().detach().clone() for n, p in named_adapters(policies[0].module.model)
    }
    model, merged = AutoModelForCausalLM.from_pretrained(untied).eval().requires_grad_(False), {}
    for name, weight in model.named_parameters():
        a, b = (adapters.get(name.replace(".weight", f".lora_{letter}")) for letter in "AB")
        if a is not None:
            merged[name] = weight + 2 * b.requires_grad_() @ a.requires_grad_()
    logits = logits_alone(model, sequences, merged)
    loss, means = loss_of_the_definition(
        policies[0].config, sequences, logits, logits_alone(model, sequences)
    )
    loss.backward()
    gradient = {name: adapter.grad for name, adapter in adapters.items()}
    assert len(gradient) == 28 and min(g.abs().max() for g in gradient.values()) > 0
    for policy, (_, budget) in zip(policies, IN_PARTS, strict=True):
        assert_step(policy, sequences, budget, means, gradient)


ENTROPY = {"optim": OptimOptions(entropy=0.5)}


@pytest.mark.parametrize(
    "options",
    [
        *({"top_p": 0.7}, {"top_k": 6}, {"min_p": 0.05}, ENTROPY),
        {"temperature": 0.8, "top_p": 0.9, "top_k": 12, "min_p": 0.01, **ENTROPY},
    ],
    ids=["top_p", "top_k", "min_p", "entropy", "all"],
)
def test_sampling_and_the_entropy_bonus_have_the_gradient_of_single_sequences_on_a_tree(
    untied, options
):
    """What is kept of a prefix's next tokens is another set for one that was sampled from outside it in a branch."""
    sequences, config = random_tree(9, seed=7), make_config(untied, share_prefix="tree", **options)
    model = AutoModelForCausalLM.from_pretrained(untied).eval()
    logits = logits_alone(model, sequences)
    prefixes = [tuple(s.tokens[:t]) for s in sequences for t in np.flatnonzero(s.loss_mask)]
    kept = kept_tokens(config, logits.detach(), trained_columns(sequences)["tokens"])
    sets = set(zip(prefixes, map(tuple, kept.tolist()), strict=True))
    assert len(set(prefixes)) < len(prefixes) and (
        len(sets) > len(set(prefixes)) or options is ENTROPY
    )
    loss, means = loss_of_the_definition(config, sequences, logits, kept=kept)
    loss.backward()
    assert_step(
        load(config), sequences, 40, means, {n: p.grad for n, p in model.named_parameters()}
    )


def logits_alone(model, sequences, weights=None):
    """Logits [N, V] before the trained tokens, each sequence read by itself: unpacked, and not sharded."""
    read = functools.partial(functional_call, model, weights or {})
    pairs = [(torch.from_numpy(s.tokens)[None], np.flatnonzero(s.loss_mask) - 1) for s in sequences]
    return torch.cat([read(tokens).logits[0][before] for tokens, before in pairs])


def trained_columns(sequences):
    """What is known of the N trained tokens, by field of TrainSequence, and the sequence of each."""
    trained = [s for s in sequences if s.num_trained]
    ids = torch.arange(len(trained)).repeat_interleave(
        torch.tensor([s.num_trained for s in trained])
    )
    names = ("tokens", "behavior_logprobs"), ("advantage", "reward")
    columns = {
        n: torch.from_numpy(np.concatenate([getattr(s, n)[s.loss_mask] for s in trained]))
        for n in names[0]
    }
    return (
        columns
        | {n: torch.tensor([getattr(s, n) for s in trained]).float()[ids] for n in names[1]}
        | {"ids": ids}
    )


def kept_tokens(config, logits, targets):
    """What the sampling transform leaves of each row of logits, [N, V] bool."""
    cuts = (config.top_p, config.top_k, config.min_p)
    if cuts == (1.0, 0, 0.0):
        return torch.ones(logits.shape, dtype=torch.bool)
    rows = zip(logits, targets.tolist(), strict=True)
    return torch.stack(
        [brute_force_nucleus(*row, config.temperature, *cuts).isfinite() for row in rows]
    )


def loss_of_the_definition(config, sequences, logits, ref_logits=None, kept=None):
    """Loss of an update of one rank, of all its tokens at once, and means of its stats, by the logits before them."""
    of = trained_columns(sequences)

    def scores(logits):
        of_kept = kept_tokens(config, logits.detach(), of["tokens"]) if kept is None else kept
        for row, target, stays in zip(
            logits / config.temperature, of["tokens"].tolist(), of_kept, strict=True
        ):
            logprobs = row[stays].log_softmax(dim=-1)
            yield logprobs[stays[:target].sum()], -(logprobs.exp() * logprobs).sum()

    logprobs, entropy = (torch.stack(column) for column in zip(*scores(logits), strict=True))
    inputs = LossInputs(
        logprobs,
        of["behavior_logprobs"],
        logprobs.detach(),
        of["advantage"],
        of["reward"],
        of["ids"],
    )
    chosen_loss = choose_loss(config)
    loss, stats = (
        chosen_loss(inputs, inputs.to("cpu"))
        if couples_tokens(chosen_loss)
        else chosen_loss(inputs)
    )
    stats = {**stats, "entropy": entropy}
    if ref_logits is not None:
        ref_logprobs = torch.stack([logprob for logprob, _ in scores(ref_logits)])
        stats["kl_ref"] = KL_ESTIMATORS[config.kl_estimator](
            logprobs, ref_logprobs, of["behavior_logprobs"]
        )
        loss = loss + config.kl_coef * stats["kl_ref"]
    loss = loss - config.optim.entropy * entropy
    num, lengths = int(of["ids"][-1]) + 1, of["ids"].bincount()[of["ids"]]
    constant = num * config.max_response_tokens
    divisor = {"token_mean": len(loss), "sequence_mean": num * lengths, "constant": constant}
    loss = (loss / divisor[config.loss_aggregation]).sum()
    return loss, {
        "loss": loss.item(),
        **{name: column.mean().item() for name, column in stats.items()},
    }


def assert_step(policy, sequences, budget, means, gradient):
    """A step's gradient is this one to 1e-5 of each parameter's largest, and its metrics have these means."""
    share = distribute([sequences], 1, budget, policy.config.share_prefix)[0]
    metrics = policy.train_step(share, policy_version=12)
    assert {name: metrics[name] for name in means} == pytest.approx(means, rel=1e-3, abs=1e-5)
    assert_same_gradient(first_gradient(policy), gradient)
    return metrics


# What is read, and what is computed


def test_the_reference_and_the_proximal_policy_read_shared_prefixes_too(untied):
    sequences = grouped_sequences(4, 4)
    options = {"kl_coef": 0.1, "minibatches": 2, "lr": 1e-3, "optim": OptimOptions(warmup=0)}
    traces = []
    for sharing in ("off", "prompt", "tree"):
        policy = load(make_config(untied, share_prefix=sharing, **options))
        shares = distribute([sequences[:8], sequences[8:]], 1, 200, sharing)[0]
        traces.append([policy.train_step(shares, policy_version=12 + step) for step in range(2)])
    for plain, *others in zip(*traces, strict=True):
        read, saved = plain.pop("tokens/forward"), plain.pop("tokens/saved_share")
        for shared in others:
            assert (
                shared.pop("tokens/forward") < read
                and shared.pop("tokens/saved_share") > saved == 0
            )
            assert shared == pytest.approx(plain, rel=1e-3, abs=1e-5)


def test_the_head_computes_a_token_of_several_branches_once(untied):
    sequences = random_tree(12, seed=4)
    module = load(make_config(untied, share_prefix="tree")).module
    rows = []
    module.model.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: rows.append(len(inputs[0]))
    )
    batch = pack(bundle(sequences, "tree"), module.one_row, "tree")
    inputs = (batch.input_ids, batch.position_ids, batch.sources, batch.targets, Sampling())
    with torch.no_grad():
        logprobs, entropy, _ = module(*inputs, batch.visible_until)
    trained = {tuple(s.tokens[: t + 1]) for s in sequences for t in np.flatnonzero(s.loss_mask)}
    assert sum(rows) == len(trained) < len(batch.targets) == len(logprobs) == len(entropy)
    in_order = [s for b in bundle(sequences, "tree") for s in b.sequences]
    torch.testing.assert_close(logprobs, plain_logprobs(untied, in_order), rtol=1e-5, atol=1e-5)


def test_in_float64_hidden_states_and_gradients_differ_by_rounding_only():
    """Tolerance: 1e-12 of a hidden state, 1e-12 of each parameter's largest gradient.

    In a GPT-2, as the norms of Qwen3 and Llama compute in float32 whatever they are given.
    """
    torch.manual_seed(0)
    model = (
        GPT2Model(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64))
        .double()
        .eval()
    )
    weights = None
    found = []
    sequences = [s for b in bundle(random_tree(12), "tree") for s in b.sequences]
    for sharing in ("off", "tree"):
        batch = pack(bundle(sequences, sharing), one_row=False, share_prefix=sharing)
        seen = attention_inputs("sdpa", batch.position_ids, batch.visible_until)
        hidden = model(batch.input_ids, position_ids=batch.position_ids, use_cache=False, **seen)[0]
        hidden = hidden.flatten(0, 1)[batch.sources]
        weights = torch.randn_like(hidden) if weights is None else weights
        model.zero_grad()
        (hidden * weights).sum().backward()
        found.append(
            (hidden.detach(), {name: p.grad.clone() for name, p in model.named_parameters()})
        )
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-12, atol=1e-12)
    assert_same_gradient(found[1][1], found[0][1], relative=1e-12)


# slower, but the same mask
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flexattention_s_mask_gives_the_logprobs_of_single_sequences(untied):
    bundles = bundle(random_tree(20, seed=5, system=0), "tree")
    model = AutoModelForCausalLM.from_pretrained(
        untied, attn_implementation="flex_attention"
    ).eval()
    module = TokenLogprobs(model)
    batch = pack(bundles, module.one_row, "tree")
    assert batch.input_ids.shape[0] == 1 and len(bundles) == 3
    inputs = (batch.input_ids, batch.position_ids, batch.sources, batch.targets, Sampling())
    with torch.compiler.set_stance("force_eager"):
        logprobs, *_ = module(*inputs, visible_until=batch.visible_until)
    in_order = [s for b in bundles for s in b.sequences]
    torch.testing.assert_close(logprobs, plain_logprobs(untied, in_order), rtol=1e-5, atol=1e-5)


def test_the_mask_s_maker_is_compiled_once_for_all_widths(monkeypatch):
    """On a GPU. Here by dynamo alone, which makes the graphs that inductor would compile."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    make = _block_mask_maker.__wrapped__("cuda")
    for width in (256, 384, 1280, 512):
        until = (torch.arange(width) // 50 * 50 + 50)[None]
        mask = make(mask_function(until), 1, None, width, width, until.device)
        assert torch.equal(mask.to_dense()[0, 0], dense_blocks(dense_mask(until)[0, 0]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def dense_blocks(mask):
    """Which blocks of 128 × 128 have an entry, 0 or 1."""
    return mask.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).any(dim=3).any(dim=1).int()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Gemma2Config(num_hidden_layers=2), "sliding_attention"),
        (MistralConfig(sliding_window=64), "sliding_window 64"),
        (
            Qwen3Config(num_hidden_layers=2, use_sliding_window=True, max_window_layers=1),
            "sliding_attention",
        ),
    ],
)
def test_a_model_that_reads_by_columns_of_the_row_is_refused(config, reason):
    with pytest.raises(ValueError, match=f"needs full attention in every layer, m has {reason}"):
        check_layers(config, "m", shares_prefix=True)
    for shares_prefix in (False, True):
        with pytest.raises(
            ValueError,
            match="m has recurrent layers; sequences of a packed row would see each other",
        ):
            check_layers(RecurrentGemmaConfig(), "m", shares_prefix)
    for whole in (Qwen3Config(num_hidden_layers=2), LlamaConfig(), GPT2Config()):
        check_layers(whole, "m", shares_prefix=True)
