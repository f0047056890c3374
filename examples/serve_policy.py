"""Serves a trained agent, or several, with Ray Serve and plays many episodes against it at once.

What it shows
-------------
- `serve_policy`: a checkpoint behind HTTP, with a recurrent state for each session.
- A client with a thousand sessions, each of which plays an episode of its own; of several agents
  each asks for itself.
- That nothing gets mixed up: each return equals that of `MemoryPolicy` in the same environment.

How to run it
-------------
    python -m examples.train_popgym --no-baseline    # once, for a checkpoint
    python -m examples.serve_policy
    python -m examples.serve_policy --run-dir runs/RepeatPreviousEasy-deep-seed0 --num-replicas 2
    python -m examples.pettingzoo_relay --run-dir relay    # several agents
    python -m examples.serve_policy --run-dir relay

Sessions start new episodes until `--seconds` have passed, and then finish the last one. The exit
code is 1 if a return differs.

Results to expect
-----------------
Two cores, shared with the client: 53,000 requests of 1,000 sessions in 150 s, 354 a second; 275 ms
(median) to 463 ms (99 %) with 100 requests in flight. The mean return is
0.9676 over 1,000 episodes (seed 0 of the training), the same with and without a server. An episode
takes 51 steps, so that the sessions need more than the 60 seconds for their first one.
"""

import argparse
import asyncio
import logging
import socket
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import ray
from ray import serve
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from connectors import MemoryPolicy
from connectors.serving import serve_policy
from examples.pettingzoo_relay import APIS
from examples.popgym_setup import make_env, start_ray
from examples.run_dir import RunDir, newest_checkpoint


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, and the newest checkpoint of the run."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.serve_policy",
        description="Serves a trained agent and plays POPGym episodes against it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--run-dir",
        type=Path,
        help="a run of examples.train_popgym or pettingzoo_relay (default: newest in runs/)",
    )
    add("--sessions", type=int, default=1000, help="sessions that play at once")
    add("--seconds", type=float, default=60.0, help="how long sessions start new episodes")
    add("--connections", type=int, default=100, help="requests in flight at a time")
    add("--num-replicas", type=int, default=1, help="copies of the policy")
    add("--num-cpus", type=int, help="CPUs that Ray may use (default: all)")
    args = parser.parse_args(argv)
    runs = Path("runs").glob("*/") if args.run_dir is None else [args.run_dir]
    args.checkpoint = newest_checkpoint(runs)
    if args.checkpoint is None:
        parser.error(
            f"`--run-dir`: no checkpoint in {args.run_dir or 'runs/*'}. Train one first: "
            "python -m examples.train_popgym --no-baseline"
        )
    return args


class Players:
    """Sessions that play episodes over HTTP, and what came of them.

    Args:
        url: The server.
        make: Makes an environment.
        num_sessions: Sessions that play at once.
        seconds: How long they start new episodes.
        connections: Requests in flight at a time.
    """

    def __init__(
        self, url: str, make: Callable[[], Any], num_sessions: int, seconds: float, connections: int
    ):
        self._url, self._make, self._num_sessions = url, make, num_sessions
        self._end = time.monotonic() + seconds
        self._slots = asyncio.Semaphore(connections)
        self.returns: dict[int, float] = {}
        self.latencies: list[float] = []

    async def play(self) -> None:
        """Plays until the time is over and every session has finished its episode."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(self._url, connector=connector, timeout=timeout) as http:
            await asyncio.gather(*(self._session(http, i) for i in range(self._num_sessions)))

    async def _session(self, http: aiohttp.ClientSession, index: int) -> None:
        """Episodes of one session; their seeds are nobody else's."""
        name, seed, env = f"session-{index}", index, self._make()
        while True:
            observation, _ = env.reset(seed=seed)
            await self._post(http, "reset", {"session": name})
            reward: Any = {} if has_agents(env) else 0.0
            total, done = 0.0, False
            while not done:
                fields = {"session": name}
                if has_agents(env):
                    action = await self._act_agents(http, fields, observation, reward)
                else:
                    fields |= {"observation": plain(observation), "reward": reward}
                    action = (await self._post(http, "act", fields))["action"]
                observation, reward, paid, done = step(env, action)
                total += paid
            self.returns[seed] = total
            seed += self._num_sessions
            if time.monotonic() >= self._end:
                await self._post(http, "end", {"session": name})
                return

    async def _act_agents(
        self, http: aiohttp.ClientSession, fields: dict, observations: dict, rewards: dict
    ) -> dict:
        """The actions of a session's agents, which ask all at once."""
        requests = []
        for agent, seen in observations.items():
            reward = rewards.get(agent, 0.0)
            fields = fields | {"agent": agent, "observation": plain(seen), "reward": reward}
            requests.append(self._post(http, "act", fields))
        actions = [answer["action"] for answer in await asyncio.gather(*requests)]
        return dict(zip(observations, actions, strict=True))

    async def _post(self, http: aiohttp.ClientSession, verb: str, request: dict) -> dict:
        async with self._slots:
            start = time.perf_counter()
            async with http.post(f"/{verb}", json=request) as response:
                answer = await response.json()
            self.latencies.append(time.perf_counter() - start)
        if response.status != 200:
            raise RuntimeError(f"/{verb} answered {response.status}: {answer['error']}")
        return answer


def has_agents(env: Any) -> bool:
    """Whether an environment has several."""
    return isinstance(env, MultiAgentEnv)


def step(env: Any, action: Any) -> tuple[Any, Any, float, bool]:
    """Observation and reward, those of several agents by agent; the sum of rewards; the end."""
    observation, reward, terminated, truncated, _ = env.step(action)
    if not has_agents(env):
        return observation, float(reward), float(reward), terminated or truncated
    alive = {
        agent: seen
        for agent, seen in observation.items()
        if not (terminated[agent] or truncated[agent])
    }
    over = terminated["__all__"] or truncated["__all__"]
    return alive, reward, float(sum(reward.values())), over


def plain(observation: object) -> object:
    """A POPGym observation as what JSON knows."""
    if isinstance(observation, tuple):
        return [plain(part) for part in observation]
    return np.asarray(observation).tolist()


def returns_without_server(
    checkpoint: Path, make: Callable[[], Any], seeds: Iterable[int]
) -> dict[Hashable, float]:
    """The returns of `MemoryPolicy` in environments with these seeds, all played side by side."""
    policy = MemoryPolicy.from_checkpoint(checkpoint)
    envs: dict[Hashable, Any] = {seed: make() for seed in seeds}
    observations = {seed: env.reset(seed=seed)[0] for seed, env in envs.items()}
    rewards: dict[Hashable, Any] = {}
    totals = dict.fromkeys(envs, 0.0)
    while observations:
        for seed, action in policy.act_batch(observations, rewards=rewards).items():
            observations[seed], rewards[seed], paid, done = step(envs[seed], action)
            totals[seed] += paid
            if done:
                del observations[seed]
    return totals


def maker(settings: dict[str, Any]) -> Callable[[], Any]:
    """What makes the environment of a run."""
    if "api" in settings:
        return lambda: APIS[settings["api"]]({})
    return lambda: make_env({"name": settings["env"]})


def serve_and_play(args: argparse.Namespace) -> int:
    """Serves the checkpoint, plays, compares.

    Returns:
        0, or 1 if a return differs from the one without a server.
    """
    settings = RunDir(args.checkpoint.parents[1]).settings()
    make = maker(settings)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(
        http_options={"host": "127.0.0.1", "port": port},
        logging_config={"enable_access_log": False, "log_level": "ERROR"},
    )
    app = serve_policy(args.checkpoint, num_replicas=args.num_replicas, max_sessions=args.sessions)
    serve.run(app)
    start = time.perf_counter()
    players = Players(
        f"http://127.0.0.1:{port}", make, args.sessions, args.seconds, args.connections
    )
    asyncio.run(players.play())
    seconds = time.perf_counter() - start

    latencies = 1000 * np.array(players.latencies)
    p50, p90, p99 = np.percentile(latencies, [50, 90, 99])
    print(
        f"{settings['env']}: {len(latencies):,} requests of {args.sessions:,} sessions in "
        f"{seconds:.0f} s: {len(latencies) / seconds:.0f} a second\n"
        f"latency with {args.connections} requests in flight: {p50:.0f} ms (median), "
        f"{p90:.0f} ms (90 %), {p99:.0f} ms (99 %)"
    )
    expected = returns_without_server(args.checkpoint, make, players.returns)
    num_different = sum(expected[seed] != value for seed, value in players.returns.items())
    print(
        f"mean return over {len(expected):,} episodes: {np.mean([*players.returns.values()]):.4f} "
        f"served, {np.mean([*expected.values()]):.4f} without a server; "
        f"{num_different} episodes differ"
    )
    return 1 if num_different else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example."""
    args = parse(argv)
    start_ray(args.num_cpus)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        return serve_and_play(args)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
