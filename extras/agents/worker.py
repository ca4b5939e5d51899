"""The rollout worker of agents: it serves an OpenAI endpoint, and runs an agent for each ticket."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from asyncrl import user_code
from asyncrl.cluster.placement import WorkerSpec
from asyncrl.config import Config
from asyncrl.engine.reward_pool import RewardPool
from asyncrl.plugins import Plugin
from asyncrl.records import Ticket
from asyncrl.weights.models import has_tokenizer, load_tokenizer
from asyncrl.weights.stop_tokens import stop_token_ids
from data.problem import Task
from extras.agents import verifiers_task
from extras.agents.endpoint import Endpoint
from extras.agents.episode import AgentEpisode, Agents
from extras.agents.parsers import RULES
from extras.agents.replies import Replies
from extras.agents.runners import Agent, Coroutines, Programs
from extras.agents.task import prepare_task
from extras.agents.template import Template
from rollout import RolloutWorker

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

REWARD_PROCESSES = 4


class AgentWorker(RolloutWorker):
    """A worker whose trajectories are agents."""

    async def serve(self) -> None:
        """Serve the endpoint, and the controller until it says stop."""
        self.start(self.environments.endpoint.serve())
        await super().serve()

    def make_episodes(self, ticket: Ticket) -> list[AgentEpisode]:
        """Make the trajectory of a ticket."""
        return [
            AgentEpisode(
                self.config, ticket, ticket.member, agents=self.environments, proxy=self.proxy
            )
        ]


def _agent_of(config: Config) -> Agent:
    task = config.task
    if task.startswith(verifiers_task.PREFIX):
        return Coroutines(task, verifiers_task.make_agent(task, config.task_args))
    if user_code.is_user_code(task):
        return Coroutines(task, user_code.load(task))
    return Programs(task.removeprefix("agent:"))


class AgentPlugin(Plugin):
    """The changes of a task that is a program with calls of the policy."""

    rules = RULES
    rollout_worker = AgentWorker

    def prepare_task(self, config: Config) -> Callable[[], Task]:
        """Return a function that makes the task. Raises ValueError for a wrong name or argument."""
        return prepare_task(config)

    def check(self, config: Config, hf_config: "PreTrainedConfig") -> None:
        """Warn of a chat template that shows the policy no tools, although a parser reads calls of tools."""
        if not config.tool_parser or not has_tokenizer(hf_config.name_or_path):
            return
        template = load_tokenizer(hf_config.name_or_path).chat_template
        if "tools" not in str(template):
            print(
                f"warning: --tool-parser {config.tool_parser} reads calls of tools, and the chat template of --model "
                f"{config.model} shows the policy no tools; describe them in a message, or change the template",
                flush=True,
            )

    def start_environments(self, spec: WorkerSpec, tokenizer) -> Agents:
        """Return what the agents of a worker share.

        Raises ValueError for a parser that does not fit the model, and for user code that does not load.
        """
        config = spec.config
        rewards = None
        if config.reward:
            title = f"rewards {spec.placement.worker}"
            rewards = RewardPool(
                config.task, config.reward, config.env_timeout_s, REWARD_PROCESSES, title
            )
        return Agents(
            _agent_of(config),
            Endpoint(config),
            Template(tokenizer, stop_token_ids(spec.model_path, tokenizer)),
            Replies(config, tokenizer),
            rewards,
        )


PLUGIN = AgentPlugin()
