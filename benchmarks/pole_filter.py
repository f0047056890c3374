"""What a player who knows the pole's physics earns in the noisy poles: a Kalman filter, and LQR."""

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from scipy.linalg import solve_discrete_are

NOISE = {
    "NoisyPositionOnlyCartPoleEasy": 0.1,
    "NoisyPositionOnlyCartPoleMedium": 0.2,
    "NoisyPositionOnlyCartPoleHard": 0.3,
}
"""Standard deviation of what is added to the position (m) and to the angle (rad)."""

STEPS = 200
START = 0.05
"""The state's four numbers are at first uniform between its negative and this."""

COSTS = np.diag([0.003, 0.001, 0.03, 0.003])
"""Of position, speed, angle and its speed, squared; a push costs 1. Of those tried the best."""

MODEL_ERROR = 1e-4
"""Variance a step that the filter allows for, since it takes the pole's physics as linear."""

SEEN = [0, 2]
"""Of the state: position and angle."""

CART = CartPoleEnv()
BOUNDS = 2 * np.array([[CART.x_threshold], [CART.theta_threshold_radians]])
"""What is seen is cut off here."""


def noisy_pole(sigma: float, episodes: int) -> np.ndarray:
    """What the player earns that estimates the state and pushes as if the estimate were right.

    Args:
        sigma: Standard deviation of the noise.
        episodes: Episodes, all at once.

    Returns:
        Returns `(episodes,)`: the share of 200 steps that the pole stands.
    """
    generator = np.random.default_rng(0)
    A, B = linearised()
    gain = feedback(A, B)
    state = generator.uniform(-START, START, (4, episodes))
    # The estimate, and its covariance, which is the same in all episodes.
    mean, covariance = np.zeros((4, episodes)), np.eye(4) * START**2 / 3
    stands, earned = np.ones(episodes, bool), np.zeros(episodes)
    for _ in range(STEPS):
        noise = generator.normal(0, sigma, (2, episodes))
        seen = np.clip(state[SEEN] + noise, -BOUNDS, BOUNDS)
        expected = covariance[np.ix_(SEEN, SEEN)] + np.eye(2) * sigma**2
        weight = covariance[:, SEEN] @ np.linalg.inv(expected)
        mean = mean + weight @ (seen - mean[SEEN])
        covariance = covariance - weight @ covariance[SEEN]
        push = np.where(gain @ mean < 0, 1.0, -1.0)[0]
        state = moved(state, push)
        mean = A @ mean + B * push
        covariance = A @ covariance @ A.T + MODEL_ERROR * np.eye(4)
        earned += stands / STEPS
        stands &= np.abs(state[0]) <= CART.x_threshold
        stands &= np.abs(state[2]) <= CART.theta_threshold_radians
    return earned


def moved(state: np.ndarray, push: np.ndarray | float) -> np.ndarray:
    """The state `(4, ...)` after a step with a push between -1 and 1."""
    _, speed, angle, turning = state
    cos, sin = np.cos(angle), np.sin(angle)
    pushed = push * CART.force_mag + CART.polemass_length * turning**2 * sin
    pushed = pushed / CART.total_mass
    inertia = CART.length * (4 / 3 - CART.masspole * cos**2 / CART.total_mass)
    turn = (CART.gravity * sin - cos * pushed) / inertia
    acceleration = pushed - CART.polemass_length * turn * cos / CART.total_mass
    change = np.stack([speed, acceleration, turning, turn])
    return state + CART.tau * change


def linearised(step: float = 1e-5) -> tuple[np.ndarray, np.ndarray]:
    """`moved` about the upright pole at rest: factors of state `(4, 4)` and push `(4, 1)`."""
    upright, steps = np.zeros((4, 1)), step * np.eye(4)
    A = (moved(steps, 0.0) - moved(-steps, 0.0)) / (2 * step)
    B = (moved(upright, step) - moved(upright, -step)) / (2 * step)
    return A, B


def feedback(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """Factors `(1, 4)` of the state in the push that costs least in the long run, negated."""
    P = solve_discrete_are(A, B, COSTS, np.eye(1))
    return np.linalg.solve(1 + B.T @ P @ B, B.T @ P @ A)
