"""What PPO needs to know of each POPGym task: a row a family, and a row a memory.

A family's settings follow from how its tasks are built, and are the same for all memories:

- `gamma`, `lambda_`: how far an action is credited. Where it changes nothing but its own reward,
  each later reward in an advantage is noise: on RepeatPreviousMedium its variance is 24 times that
  of the own reward with POPGym's 0.99 and 1.0, 7.7 times with 0.99 and 0.95, and 1.3 times with
  0.5 and 0.95.
- `row_steps`: how far gradients reach into the memory: over whole episodes, unless what counts is
  always recent, or is kept from step to step all the same once it has been kept for a while. An
  episode takes a row of its own, so rows longer than most episodes are padding.
- `lag`: how many steps back the answer stands, for memories that attend to a window.
- `entropy_coeff`: more where the first actions that earn something are rare.
- `kl_target`: how far an iteration's updates may move the policy, in nats, for RLlib's KL loss. A
  policy that is nearly certain of its actions moves far without it; where much is to be learned
  bit by bit, a count, it slows that down.

The previous action and reward are inputs where POPGym says so (`obs_requires_prev_action`).
"""

from dataclasses import dataclass
from typing import Any

LEVELS = ("Easy", "Medium", "Hard")
TRAIN_BATCH_SIZE = 4096
"""Environment steps an iteration, about."""

MIN_MINIBATCH_SIZE = 1024
MIN_MINIBATCH_ROWS = 4


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of tasks; of three numbers, one is for each of `LEVELS`."""

    why: str
    """Where the settings come from."""

    steps: tuple[int, int, int]
    """Steps of the longest episode."""

    gamma: float
    lambda_: float = 0.95
    entropy_coeff: float = 0.003

    kl_target: float | None = None
    """For RLlib's KL loss; None: without it."""

    lag: tuple[int, int, int] | None = None
    """Steps back that a policy has to see; None: any step of the episode may count."""

    row_steps: int | None = None
    """Steps a training row at most; None: the episode's."""

    equal_lengths: bool = True
    """Whether all episodes have `steps`: then fragments end where episodes do."""

    solved: float = 0.98
    """Mean return at which there is nothing more to learn; 1 is the most that any task pays."""

    memory: str = "gru"
    """The memory to take, of `MODELS`: that of the highest returns so far."""


CARD = "An action earns its own reward and changes nothing else. "
CONTROL = "As CartPole with all it hides shown; velocity takes a few positions, so rows are short. "
SWING_UP = "As Pendulum with all it hides shown, where a swing takes some ten steps. "
GAME = "What an action shows is used some actions later, and few first actions earn something. "
FAMILIES: dict[str, Family] = {
    "RepeatPrevious": Family(
        why=CARD + "The card is 4, 32 or 64 steps back.",
        steps=(51, 103, 155), gamma=0.5, lag=(4, 32, 64), memory="gtrxl",
    ),
    "RepeatFirst": Family(
        why=CARD + "What is kept for a hundred steps is kept for longer: shorter rows are more "
        "updates of as many steps.",
        steps=(51, 415, 831), gamma=0.5, row_steps=104, kl_target=0.01,
    ),
    "CountRecall": Family(
        why=CARD + "A sum over all steps holds the counts.",
        steps=(51, 103, 207), gamma=0.5, memory="ffm",
    ),
    "Autoencode": Family(
        why=CARD + "The lag grows by two a step: what is known is the place in the episode.",
        steps=(103, 207, 311), gamma=0.5, memory="window_sine",
    ),
    "HigherLower": Family(
        why=CARD + "The last card is most of the answer, the others are counted.",
        steps=(51, 103, 155), gamma=0.5,
    ),
    "MultiarmedBandit": Family(
        why="A pull tells what later ones earn, for the rest of the episode; further ahead than "
        "some ten pulls, chance outweighs it. Shorter rows are more updates of as many steps.",
        steps=(200, 400, 600), gamma=0.9, row_steps=104, kl_target=0.03,
    ),
    "PositionOnlyCartPole": Family(
        why=CONTROL + "A random push may be the last.", steps=(200, 400, 600), gamma=0.99,
        entropy_coeff=0.0, lag=(8, 8, 8), row_steps=64, equal_lengths=False, solved=0.99,
    ),
    "NoisyPositionOnlyCartPole": Family(
        why=CONTROL + "More positions average noise out.",
        steps=(200, 200, 200), gamma=0.99, lag=(32, 32, 32), row_steps=64, equal_lengths=False,
        solved=0.99,
    ),
    "VelocityOnlyCartPole": Family(
        why=CONTROL + "Positions are sums of all velocities.",
        steps=(200, 400, 600), gamma=0.99, row_steps=64, equal_lengths=False, solved=0.99,
    ),
    "PositionOnlyPendulum": Family(
        why=SWING_UP, steps=(200, 150, 100), gamma=0.9, lag=(8, 8, 8), row_steps=64,
    ),
    "NoisyPositionOnlyPendulum": Family(
        why=SWING_UP + "More positions average noise out.",
        steps=(200, 200, 200), gamma=0.9, lag=(32, 32, 32), row_steps=64,
    ),
    "Battleship": Family(
        why=GAME, steps=(64, 100, 144), gamma=0.95, lambda_=0.9, entropy_coeff=0.01,
        equal_lengths=False,
    ),
    "Concentration": Family(
        why=GAME, steps=(104, 208, 104), gamma=0.95, lambda_=0.9, entropy_coeff=0.01,
    ),
    "MineSweeper": Family(
        why=GAME, steps=(14, 30, 54), gamma=0.95, lambda_=0.9, entropy_coeff=0.01,
        equal_lengths=False, memory="deep",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A memory at the size that all are compared in: 72,000 parameters without encoder and heads.

    The learning rate is the same on all tasks; `python -m benchmarks popgym --rates` compares some.
    """

    name: str
    """Which of the memories of `examples.popgym_setup`."""

    lr: float
    options: dict[str, Any]
    """What differs from its defaults."""

    window: str | None = None
    """Its option for how many past steps it attends to."""

    horizon: str | None = None
    """Its option for how many steps its positions are laid out for."""


def _frame(name: str, width: int, lr: float = 1e-3, **names: str) -> Model:
    """Residual blocks with heads, a quarter of the blocks' width each."""
    options = {"d_model": width, "head_dim": width // 4, "feedforward_dim": 2 * width}
    return Model(name, lr, options, **names)


def _channels(name: str, width: int, **options: Any) -> Model:
    """Residual blocks without heads."""
    return Model(name, 1e-3, {"d_model": width, "feedforward_dim": 2 * width, **options})


MODELS: dict[str, Model] = {
    "deep": _frame("deep", 64),
    "deep_sine": _frame("deep_sine", 64),
    "linear": _frame("linear", 88),
    "gated_delta": _frame("gated_delta", 64),
    "gtrxl": _frame("gtrxl", 40, lr=5e-4, window="memory_inference"),
    "window": _frame("window", 64, window="window"),
    "window_sine": _frame("window_sine", 64, window="window", horizon="position_horizon"),
    "mixed": _frame("mixed", 64, window="window"),
    "gru": Model("gru", 1e-3, {"d_model": 128}),
    "lstm": Model("lstm", 1e-3, {"d_model": 104}),
    "min_gru": _channels("min_gru", 56, state_dim=112),
    "lru": _channels("lru", 52, state_dim=104),
    "ffm": _channels("ffm", 52),
    "rllib-lstm": Model(
        "rllib-lstm",
        1e-3,
        {"fcnet_hiddens": [64], "fcnet_activation": "relu", "lstm_cell_size": 104},
    ),
    "mlp": Model("mlp", 1e-3, {"fcnet_hiddens": [64, 238, 238], "fcnet_activation": "relu"}),
}


def split(task: str) -> tuple[str, str]:
    """Family and level of a task's name.

    Raises:
        ValueError: If there is no such task.
    """
    for level in LEVELS:
        if task.endswith(level) and task.removesuffix(level) in FAMILIES:
            return task.removesuffix(level), level
    raise ValueError(
        f"`task` is {task!r}, but must be one of {', '.join(FAMILIES)}, and one of "
        f"{', '.join(LEVELS)} at its end."
    )


def is_known(task: str) -> bool:
    """Whether the table has a row for a task; mazes have none."""
    return task in tasks()


def family_of(task: str) -> Family:
    """The row of a task's family."""
    return FAMILIES[split(task)[0]]


def tasks() -> list[str]:
    """All tasks, a family after the other."""
    return [family + level for family in FAMILIES for level in LEVELS]


def settings(task: str, memory: str, *, lr: float | None = None, num_envs: int = 16) -> dict:
    """Settings of a run, as `examples.popgym_setup.build_config` takes them.

    Args:
        task: A POPGym environment's class.
        memory: One of `MODELS`.
        lr: Learning rate; None for the memory's.
        num_envs: Environments that are stepped at once.
    """
    family, model = family_of(task), MODELS[memory]
    index = LEVELS.index(split(task)[1])
    steps = family.steps[index]
    # A whole episode, and the step that RLlib appends.
    max_seq_len = min(steps + 1, family.row_steps or steps + 1)
    length = steps if family.equal_lengths and max_seq_len > steps else max_seq_len
    lr = model.lr if lr is None else lr
    kl_loss: dict[str, Any] = {"use_kl_loss": False}
    if family.kl_target is not None:
        kl_loss = {"use_kl_loss": True, "kl_target": family.kl_target}
    options = dict(model.options)
    if model.window:
        # A few steps beyond the lag: where exactly it lies has to be found.
        options[model.window] = steps if family.lag is None else family.lag[index] + 8
    if model.horizon:
        options[model.horizon] = steps
    return {
        "max_seq_len": max_seq_len,
        "fragment": max(1, round(TRAIN_BATCH_SIZE / num_envs / length)) * length,
        "hyperparameters": {
            # Kept while most tasks learn most, and then lowered for what is left.
            "lr": [[0, lr], [300_000, lr], [1_000_000, lr / 5]],
            # Gradients of fewer than four episodes are mostly noise.
            "minibatch_size": max(MIN_MINIBATCH_SIZE, MIN_MINIBATCH_ROWS * max_seq_len),
            "gamma": family.gamma,
            "lambda_": family.lambda_,
            "entropy_coeff": family.entropy_coeff,
            **kl_loss,
        },
        "model": options,
    }
