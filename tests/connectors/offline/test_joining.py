"""Data lost silently: parts of recorded episodes are joined, and what is missing is an error."""

import random

import gymnasium as gym
import numpy as np
import pytest
import tree
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from connectors.offline.joining import join_parts
from tests.connectors.helpers import BOX, DISCRETE

DICT = gym.spaces.Dict(a=BOX, b=gym.spaces.Discrete(3))


def play(lengths, *, space=BOX, done=True, lookback=1, seed=0):
    """The parts of an episode that was cut after these numbers of steps."""
    space.seed(seed)
    episode = SingleAgentEpisode(observation_space=space, action_space=DISCRETE)
    episode.add_env_reset(space.sample(), {"t": 0})
    parts, t = [], 0
    for number, length in enumerate(lengths):
        for step in range(length):
            t += 1
            last = done and number == len(lengths) - 1 and step == length - 1
            episode.add_env_step(space.sample(), t % 2, float(t), {"t": t}, terminated=last)
        parts.append(episode)
        if not episode.is_done:
            episode = episode.cut(len_lookback_buffer=lookback)
    return [part.to_numpy() for part in parts]


def check_whole(episode, parts):
    """The episode has every step of its parts, once and in order."""
    num_steps = sum(map(len, parts))
    assert (episode.t_started, len(episode)) == (0, num_steps)
    assert (episode.id_, episode.is_terminated) == (parts[0].id_, parts[-1].is_terminated)
    assert episode.get_rewards().tolist() == list(range(1, num_steps + 1))
    assert episode.get_actions().tolist() == [t % 2 for t in range(1, num_steps + 1)]
    assert [info["t"] for info in episode.get_infos()] == list(range(num_steps + 1))
    assert episode.observations.lookback == episode.rewards.lookback == 0
    for part in parts:
        span = slice(part.t_started, part.t + 1)
        tree.map_structure(
            np.testing.assert_array_equal, episode.get_observations(span), part.get_observations()
        )


@pytest.mark.parametrize("space", [BOX, DICT], ids=["box", "dict"])
@pytest.mark.parametrize("seed", range(5))
def test_parts_in_any_order_and_again(space, seed):
    """As from several EnvRunners, files and folders; Ray 2.60 records parts repeatedly."""
    rng = random.Random(seed)
    episodes = [
        play(
            [rng.randint(1, 6) for _ in range(rng.randint(1, 5))],
            space=space,
            done=number % 3 > 0,
            lookback=number % 2,
            seed=number,
        )
        for number in range(8)
    ]
    recorded = [part for parts in episodes for part in parts]
    recorded += rng.sample(recorded, 6)
    rng.shuffle(recorded)
    joined = {episode.id_: episode for episode in join_parts(recorded)}
    assert len(joined) == len(episodes) == len(list(join_parts(recorded)))
    for parts in episodes:
        check_whole(joined[parts[0].id_], parts)


def test_nan_at_a_cut():
    parts = play([3, 4])
    parts[0].observations.data[-1] = parts[1].observations.data[1] = np.nan
    (episode,) = join_parts(parts)
    assert np.isnan(episode.get_observations(3)).all()
    assert len(episode) == 7


def test_parts_that_overlap():
    """The same episode recorded twice, cut at other steps."""
    parts = play([4, 4, 4])
    (whole,) = join_parts(parts)
    for recorded in (
        [whole[:6], whole[3:9], parts[2]],
        [parts[0], whole[2:4], whole[4:]],
        [whole[:2], parts[0], whole[1:]],
    ):
        (episode,) = join_parts(recorded)
        check_whole(episode, parts)


def test_only_what_lacks_a_part_is_held():
    """Whole episodes come out before the next row is read."""
    first, second = play([3, 3]), play([5])
    read = []

    def recorded():
        for part in (second[0], *first):
            read.append(part)
            yield part

    joined = join_parts(recorded())
    assert len(next(joined)) == 5
    assert len(read) == 1
    assert len(next(joined)) == 6


@pytest.mark.parametrize(
    ("kept", "missing"),
    [([1, 2], "0 to 2"), ([0, 2], "3 to 6"), ([0, 3], "3 to 8"), ([2], "0 to 6")],
)
def test_missing_steps_are_an_error(kept, missing):
    parts = play([3, 4, 2, 5])
    with pytest.raises(ValueError, match=f"episode {parts[0].id_} lacks its steps {missing}"):
        list(join_parts(parts[number] for number in kept))


def test_parts_without_steps():
    parts = play([3, 2])
    empty = parts[0].cut()
    (episode,) = join_parts([empty, *parts])
    check_whole(episode, parts)
