"""Tries the code that the options of a run name, user code included, before slow parts start."""

from asyncrl import user_code
from asyncrl.config import Config
from asyncrl.engine.rewards import load_scorer
from asyncrl.tasks import prepare_task


def try_choices(config: Config) -> None:
    """Load the loss, advantage estimator, optimizer, task and rewards of a run, and call some of them.

    Raises ValueError, in one line, for a wrong argument of one of them, and for unfit user code.
    """
    from asyncrl.trainer.advantage_choice import try_estimator
    from asyncrl.trainer.loss_choice import choose_loss, try_loss
    from asyncrl.trainer.optimizer import try_optimizer

    loss = choose_loss(config)
    with user_code.errors_as_value_error(config.algo, "--algo"):
        try_loss(loss, config.top_logprobs, config.centering)
    try_estimator(config)
    try_optimizer(config)
    prepare_task(config)
    if config.reward or not config.is_multi_turn:
        load_scorer(config.task, config.reward)
    user_code.files(user_code.user_code_names(config))
