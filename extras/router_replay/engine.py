"""An engine that returns its routers' experts: vLLM's options, and a missing part of its runner for CPUs.

vLLM 0.32 hands routed experts out by its second model runner. This needs Triton, so it does not run on a CPU without
it. The routers of all backends and the scheduler do their part anyway. `ReturningRunner` does that of the first runner.
Imports vllm; only a process that starts an engine may import this module.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class ReturningRunner(CPUModelRunner):
    """Does for each step of an engine on a CPU what vLLM's second runner does to return routed experts."""

    def initialize_kv_cache(self, kv_cache_config, *arguments, **options) -> None:
        """Bind the routers to the store of their choices. It is as large as the cache of keys and values."""
        super().initialize_kv_cache(kv_cache_config, *arguments, **options)
        self.connector = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

    def execute_model(self, scheduler_output, *arguments):
        """Compute a step. The routers leave its choices in the connector."""
        self.connector.begin_step(scheduler_output.aux_output_connector_metadata)
        return super().execute_model(scheduler_output, *arguments)

    def sample_tokens(self, grammar_output):
        """Sample, and return the choices of the step's tokens with what is sampled."""
        num_requests = self.input_batch.num_reqs
        is_sampled = ~self.discard_request_mask.np[:num_requests]
        # the connector reads these three fields of the second runner's batch
        batch = SimpleNamespace(
            req_ids=self.input_batch.req_ids,
            query_start_loc_np=self.query_start_loc.np,
            num_computed_tokens_np=self.input_batch.num_computed_tokens_cpu[:num_requests].copy(),
        )
        step = self.connector.prepare_output(batch)
        output = super().sample_tokens(grammar_output)
        step.enqueue_cpu_copy(is_sampled, np.zeros(num_requests, dtype=np.int32))
        return dataclasses.replace(output, aux_output_connector_output=step.process_output())


def engine_options(on_cpu: bool) -> dict:
    """Return vLLM's engine arguments. On a CPU the engine also uses the runner above, because it is forked later."""
    if on_cpu:
        cpu_worker.CPUModelRunner = ReturningRunner
        # asks for the second runner; what else it asks for is checked in check.py
        VllmConfig._verify_aux_output_compatibility = lambda config: None
    return {"enable_return_routed_experts": True}
