"""Which parts a node is made of."""

from types import SimpleNamespace

import pytest
import torch
from tiny_policy import save_tiny_family

from asyncrl.cluster.cluster import Cluster
from asyncrl.cluster.placement import Placement, WorkerPlacement
from asyncrl.config import Config
from asyncrl.controller.controller import Controller
from asyncrl.controller.tickets import TicketSource
from asyncrl.job.node import Leader, Rank, _check_model, _make_tickets
from asyncrl.weights.models import resolve_model
from extras.baselines import BaselineController


@pytest.mark.parametrize("replicate_prompts", [True, False])
def test_a_group_is_one_ticket_exactly_without_replication(replicate_prompts):
    config = Config(replicate_prompts=replicate_prompts, group_size=3)
    model_path = resolve_model(config.model, config.task)
    tickets = _make_tickets(config, Cluster(), model_path).for_group(0, 0, 0)
    assert [ticket.num_members for ticket in tickets] == ([1, 1, 1] if replicate_prompts else [3])


def test_only_a_baseline_needs_the_controller_and_the_tickets_of_extras():
    assert Leader.controller_class(Config()) is Controller
    assert Leader.controller_class(Config(scheduling="batch")) is BaselineController
    config = Config()
    tickets = _make_tickets(config, Cluster(), resolve_model(config.model, config.task))
    assert type(tickets) is TicketSource


@pytest.mark.parametrize(
    ("transport", "share", "options", "calls"),
    [
        ("nccl", None, "", ["expandable_segments:True", "cuda:1"]),
        ("shm", 0.4, "", ["expandable_segments:True", "cuda:1", "0.60"]),
        (
            "ipc",
            0.4,
            "expandable_segments:True",
            ["expandable_segments:True,expandable_segments:False", "cuda:1", "0.60"],
        ),
    ],
)
@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_grow_unless_an_engine_opens_them_and_never_into_its_part_of_the_gpu(
    monkeypatch, transport, share, options, calls, variable
):
    made = []
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv(variable, options)
    monkeypatch.setattr("torch._C._accelerator_setAllocatorSettings", made.append)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: made.append(str(device)))
    monkeypatch.setattr(
        "torch.cuda.set_per_process_memory_fraction", lambda part: made.append(f"{part:.2f}")
    )
    worker = WorkerPlacement(0, 1, None if share is None else 0, 1, share or 0.9)
    placement = Placement((1,), 1, (worker,), transport)
    rank = SimpleNamespace(config=Config(), device=torch.device("cuda", 1), placement=placement)
    Rank.use_device(rank)
    assert made == calls


def test_a_model_that_vllm_computes_on_a_cpu_in_bfloat16_only_is_refused_in_float32(tmp_path):
    path = save_tiny_family("qwen3_next", str(tmp_path))
    for options, device in (({"dtype": "bfloat16"}, "cpu"), ({}, "cuda")):
        _check_model(Config(model=path, **options), path, device)
    with pytest.raises(ValueError, match=r"is a qwen3_next, of which .*; add --dtype bfloat16$"):
        _check_model(Config(model=path), path, "cpu")
