"""Acts on engines with wrong weights: it warns, bans the host, or ends the run."""

import math
from dataclasses import asdict, replace

from asyncrl.job.arrival import ALLOWED_MISMATCH, SURE
from asyncrl.job.node import Leader

SURELY_WRONG = 2.5
"""Factor of the allowed mismatch above which the first weights are surely wrong. Below it, rounding can be the reason,
because no model of 8B was measured. In bfloat16 it gives 0.375 nats, and one norm that is not sent 0.4 or more."""
FEW_VERSIONS = 5
"""Fewest compared versions for a report, at the end of a run, that it stayed undecided."""


class EngineCheck:
    """Compares the engines of a node with the trainer, and acts on wrong weights."""

    def __init__(self, leader: Leader) -> None:
        """Check the engines of a node, joined hosts included."""
        self._leader = leader
        self._dtype = leader.config.dtype_on(leader.device.type)
        self._allowed = ALLOWED_MISMATCH[self._dtype]
        self._has_warned = False
        self._first_version: int | None = None
        """First version that this start of the run compared."""

    def check(self, step: int) -> None:
        """Compare what engines have scored since the last call with the trainer's scores of the same version.

        The first mismatch of a worker above the limit prints a warning. Later ones are only recorded. A joined host is
        shut out, unless no believed worker would be left.
        Raises RuntimeError if the first weights that this start of the run compares are surely wrong.
        """
        leader = self._leader
        for mismatch in leader.probe.compare(leader.controller.take_probes()):
            leader.run.record_event(
                "mismatch", worker=mismatch.worker, version=mismatch.version, **mismatch.metrics()
            )
            if self._first_version is None:
                self._first_version = mismatch.version
            transport = leader.placement.transport
            problem = mismatch.describe(self._allowed, transport)
            if problem is None:
                continue
            if leader.controller.try_to_ban_host(mismatch.worker, problem):
                continue
            if mismatch.version == self._first_version:
                end_above = SURELY_WRONG * self._allowed
                surely_wrong = mismatch.describe(end_above, transport)
                if surely_wrong:
                    raise RuntimeError(surely_wrong)
                problem += (
                    ". The run continues: a large model may round that much, and a weight that is missing mostly gives "
                    f"more than {end_above:g}. Look at mismatch/versions_behind: it is near 0 if weights arrive"
                )
            if not self._has_warned:
                self._has_warned = True
                leader.run.record_event("warning", text=f"step {step}: {problem}")
                print(f"warning: step {step}: {problem}", flush=True)
        self._check_arrival()

    def _check_arrival(self) -> None:
        """Look whether engines have older weights than they report. Raises RuntimeError if one surely has."""
        leader = self._leader
        for version, worker in leader.probe.compare_neighbours():
            arrivals = leader.probe.arrivals[worker]
            arrival = arrivals.recent
            # None: no weight has changed since the last version that was surely right.
            if arrival is None:
                continue
            # The whole run dilutes a late fault, so the record has the number that the alarm compares.
            whole = replace(arrivals.whole, late_sigmas=arrival.late_sigmas)
            leader.run.record_event("lag", worker=worker, version=version, **asdict(whole))
            if not arrival.late_sigmas > SURE:
                continue
            problem = (
                f"worker {worker} has older weights than it says: at version {version} its log-probs of the probe lie "
                f"{arrival.versions_behind:.2g} ± {arrival.versions_behind_error:.1g} versions behind, and "
                f"{arrival.versions_ahead:.2g} ahead of the version before. "
                f"Every staleness is then recorded wrongly. Likely cause: --weight-sync {leader.placement.transport} "
                "brings weights late, or only some of them; try another --weight-sync"
            )
            if not leader.controller.try_to_ban_host(worker, problem):
                raise RuntimeError(problem)

    def finish(self) -> None:
        """Print the worker whose version is least certain, if the probe cannot tell it from the version before.

        Workers that were shut out, or compared at fewer than FEW_VERSIONS versions, do not count.
        """
        controller = self._leader.controller
        compared = {
            worker: arrivals
            for worker, arrivals in self._leader.probe.arrivals.items()
            if controller.is_believed(worker) and arrivals.num_versions >= FEW_VERSIONS
        }
        surety = [
            (arrivals.whole.current_sigmas if arrivals.whole else 0.0, worker)
            for worker, arrivals in compared.items()
        ]
        least, worker = min(surety, default=(math.inf, 0))
        if least > SURE:
            return
        if compared[worker].whole is None:
            print("no weight has changed, so their arrival was not checked", flush=True)
            return
        hint = "more steps may tell"
        if self._dtype != "float32":
            hint += ", and on a CPU --dtype float32 rounds least"
        print(
            f"the probe cannot tell whether weights came to worker {worker} in time or a version late: it has "
            f"{least:.1f} standard errors, of which {SURE:g} are needed; {hint}",
            flush=True,
        )
