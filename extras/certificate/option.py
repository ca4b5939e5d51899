"""The option `--certificate`: it adds metrics to a policy's steps, and certificate.json with its alarms to a run."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.plugins import Plugin, PolicyPlugin
from extras.certificate.rules import RULES, TEXTS

# The policy imports transformers for seconds, and options are checked before any process starts.
if TYPE_CHECKING:
    from asyncrl.runlog.run_directory import RunDirectory
    from asyncrl.trainer.policy import Policy

PREFIX = "certificate/"
"""Beginning of the names of its metrics."""


class CertificatePlugin(Plugin):
    """Changes of a run by --certificate."""

    def make_policy_plugin(self, policy: "Policy") -> PolicyPlugin:
        """Return the checks of a policy's trained tokens."""
        from extras.certificate.policy import Certificate

        return Certificate(policy)

    def on_step(self, run: "RunDirectory", metrics: dict[str, float]) -> None:
        """Write a step's check to certificate.json, and warn of each rule that it is the first to break."""
        step = int(metrics["step"])
        values = {
            name.removeprefix(PREFIX): value
            for name, value in metrics.items()
            if name.startswith(PREFIX)
        }
        if not values:
            return
        path = run.path / "certificate.json"
        checks = [check for check in _read_checks(path) if check["step"] < step]
        known = {rule for check in checks for rule in check["alarms"]}
        alarms = {rule: TEXTS[rule](values) for rule in RULES if values[f"alarm_{rule}"]}
        for rule, text in alarms.items():
            if rule not in known:
                warning = f"step {step}: certificate, rule {rule}: {text}"
                run.record_event("warning", text=warning)
                print(f"warning: {warning}", flush=True)
        checks.append({"step": step, "tokens": int(values["tokens"]), "alarms": alarms})
        _write(path, {"verdict": _verdict(checks), "checks": checks})


def _read_checks(path: Path) -> list[dict]:
    """Return the checks of a certificate. A resumed run continues it."""
    return json.loads(path.read_text(encoding="utf-8"))["checks"] if path.exists() else []


def _verdict(checks: list[dict]) -> str:
    """Return what all checks show, in one line."""
    num_tokens = sum(check["tokens"] for check in checks)
    steps = [check["step"] for check in checks if check["alarms"]]
    checked = f"{num_tokens} tokens in {len(checks)} checks up to step {checks[-1]['step']}"
    if not steps:
        return f"no alarm: {checked}"
    rules = {rule: None for check in checks for rule in check["alarms"]}
    return f"ALARM from step {steps[0]} on ({', '.join(rules)}), in {len(steps)} checks: {checked}"


def _write(path: Path, certificate: dict) -> None:
    """Replace the certificate; the file is always whole."""
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(certificate, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


PLUGIN = CertificatePlugin()
