"""Learning curves: trains a PPO config and notes return, steps and seconds after each iteration."""

import time
from dataclasses import dataclass, field

from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EPISODE_RETURN_MEAN,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES_LIFETIME,
)

# Before so many episodes have ended, a mean return may be luck.
MIN_EPISODES = 100


@dataclass
class Curve:
    """One training run, a value an iteration."""

    steps: list[int] = field(default_factory=list)
    """Environment steps so far."""
    seconds: list[float] = field(default_factory=list)
    """Time spent in `Algorithm.train` so far."""
    returns: list[float] = field(default_factory=list)
    """Mean return of the episodes that ended in the iteration, at most 100."""
    goal_at: int | None = None
    """The first iteration whose mean return reached the goal."""

    def cost(self) -> tuple[int, float]:
        """Steps and seconds to the goal, or those of the whole run if it was not reached."""
        index = len(self.steps) - 1 if self.goal_at is None else self.goal_at
        return self.steps[index], self.seconds[index]

    def final_return(self, share: float = 0.2) -> float:
        """Mean over the last part of the run."""
        tail = self.returns[-max(1, round(share * len(self.returns))) :]
        return sum(tail) / len(tail)


def train_curve(
    config: PPOConfig, *, goal: float, max_steps: int, stop_at_goal: bool = True
) -> Curve:
    """Trains until the goal or the last step.

    Args:
        config: What to train.
        goal: Mean return of the episodes of an iteration.
        max_steps: Environment steps at most.
        stop_at_goal: Whether the goal ends the run.

    Returns:
        The curve.
    """
    algo = config.build_algo()
    curve = Curve()
    spent = 0.0
    try:
        while not curve.steps or curve.steps[-1] < max_steps:
            start = time.perf_counter()
            result = algo.train()
            spent += time.perf_counter() - start
            runners = result[ENV_RUNNER_RESULTS]
            if not runners.get(NUM_EPISODES_LIFETIME):
                continue
            curve.steps.append(int(result[NUM_ENV_STEPS_SAMPLED_LIFETIME]))
            curve.seconds.append(round(spent, 2))
            curve.returns.append(round(float(runners[EPISODE_RETURN_MEAN]), 4))
            full = runners[NUM_EPISODES_LIFETIME] >= MIN_EPISODES
            if curve.goal_at is None and full and curve.returns[-1] >= goal:
                curve.goal_at = len(curve.returns) - 1
                if stop_at_goal:
                    break
    finally:
        algo.stop()
    return curve
