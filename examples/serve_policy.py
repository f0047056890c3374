"""Serves a trained agent with Ray Serve and plays many POPGym episodes against it at once.

What it shows
-------------
- `serve_policy`: a checkpoint behind HTTP, with a recurrent state for each session.
- A client with a thousand sessions, each of which plays an episode of its own.
- That nothing gets mixed up: each return equals that of `MemoryPolicy` in the same environment.

How to run it
-------------
    python -m examples.train_popgym --no-baseline    # once, for a checkpoint
    python -m examples.serve_policy
    python -m examples.serve_policy --run-dir runs/RepeatPreviousEasy-deep-seed0 --num-replicas 2

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
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import cast

import aiohttp
import gymnasium as gym
import numpy as np
import ray
from ray import serve

from connectors import MemoryPolicy
from connectors.serving import serve_policy
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
    add("--run-dir", type=Path, help="a run of examples.train_popgym (default: newest in runs/)")
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
        env: Name of the POPGym environment.
        num_sessions: Sessions that play at once.
        seconds: How long they start new episodes.
        connections: Requests in flight at a time.
    """

    def __init__(self, url: str, env: str, num_sessions: int, seconds: float, connections: int):
        self._url, self._env, self._num_sessions = url, env, num_sessions
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
        name, seed, env = f"session-{index}", index, make_env({"name": self._env})
        while True:
            observation, _ = env.reset(seed=seed)
            await self._post(http, "reset", {"session": name})
            reward, total, done = 0.0, 0.0, False
            while not done:
                request = {"session": name, "observation": plain(observation), "reward": reward}
                action = (await self._post(http, "act", request))["action"]
                observation, reward, terminated, truncated, _ = env.step(action)
                total += (reward := float(reward))
                done = terminated or truncated
            self.returns[seed] = total
            seed += self._num_sessions
            if time.monotonic() >= self._end:
                await self._post(http, "end", {"session": name})
                return

    async def _post(self, http: aiohttp.ClientSession, verb: str, request: dict) -> dict:
        async with self._slots:
            start = time.perf_counter()
            async with http.post(f"/{verb}", json=request) as response:
                answer = await response.json()
            self.latencies.append(time.perf_counter() - start)
        if response.status != 200:
            raise RuntimeError(f"/{verb} answered {response.status}: {answer['error']}")
        return answer


def plain(observation: object) -> object:
    """A POPGym observation as what JSON knows."""
    if isinstance(observation, tuple):
        return [plain(part) for part in observation]
    return np.asarray(observation).tolist()


def returns_without_server(
    checkpoint: Path, env: str, seeds: Iterable[int]
) -> dict[Hashable, float]:
    """The returns of `MemoryPolicy` in environments with these seeds, all played side by side."""
    policy = MemoryPolicy.from_checkpoint(checkpoint)
    envs: dict[Hashable, gym.Env] = {seed: make_env({"name": env}) for seed in seeds}
    observations = {seed: env.reset(seed=cast("int", seed))[0] for seed, env in envs.items()}
    rewards: dict[Hashable, float] = {}
    totals = dict.fromkeys(envs, 0.0)
    while observations:
        for seed, action in policy.act_batch(observations, rewards=rewards).items():
            observation, reward, terminated, truncated, _ = envs[seed].step(action)
            observations[seed], rewards[seed] = observation, float(reward)
            totals[seed] += float(reward)
            if terminated or truncated:
                del observations[seed]
    return totals


def serve_and_play(args: argparse.Namespace) -> int:
    """Serves the checkpoint, plays, compares.

    Returns:
        0, or 1 if a return differs from the one without a server.
    """
    env = RunDir(args.checkpoint.parents[1]).settings()["env"]
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
        f"http://127.0.0.1:{port}", env, args.sessions, args.seconds, args.connections
    )
    asyncio.run(players.play())
    seconds = time.perf_counter() - start

    latencies = 1000 * np.array(players.latencies)
    p50, p90, p99 = np.percentile(latencies, [50, 90, 99])
    print(
        f"{env}: {len(latencies):,} requests of {args.sessions:,} sessions in {seconds:.0f} s: "
        f"{len(latencies) / seconds:.0f} a second\n"
        f"latency with {args.connections} requests in flight: {p50:.0f} ms (median), "
        f"{p90:.0f} ms (90 %), {p99:.0f} ms (99 %)"
    )
    expected = returns_without_server(args.checkpoint, env, players.returns)
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
