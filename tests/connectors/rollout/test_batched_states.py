"""States that stay in the batches of passes, and `Rollout` against a plain dict of states."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from connectors.rollout.batched_states import gather
from connectors.rollout.states import Rollout

T = 3


class Module:
    def __init__(self):
        self.model_config = {"max_seq_len": T}

    def get_initial_state(self):
        return {"x": torch.full((2,), 0.5), "t": torch.zeros((), dtype=torch.int64)}

    def is_stateful(self):
        return True


def batch(number, rows):
    return {"x": torch.arange(rows * 2.0).view(rows, 2) + number, "t": torch.full((rows,), number)}


def step(state, number):
    return {"x": state["x"] * 2 + number, "t": state["t"] + 1}


def test_a_batch_in_order_is_not_copied():
    states = batch(7, 3)
    assert gather([(states, 0), (states, 1), (states, 2)], Module(), "cpu") is states
    for rows in ([0, 1], [1, 0, 2], [0, 0, 1]):
        picked = gather([(states, row) for row in rows], Module(), "cpu")
        assert torch.equal(picked["x"], states["x"][rows])


def test_rows_of_several_batches():
    a, b = batch(100, 3), batch(200, 2)
    a["x"] = a["x"].double()
    picked = gather([(b, 1), None, (a, 2), (b, 0), None], Module(), "cpu")
    assert picked["t"].tolist() == [200, 0, 100, 200, 0]
    initial = [0.5, 0.5]
    expected = [b["x"][1].tolist(), initial, a["x"][2].tolist(), b["x"][0].tolist(), initial]
    assert picked["x"].tolist() == expected
    # As the first known batch has it: the module goes on in the dtype that it returned.
    assert picked["x"].dtype == b["x"].dtype


class Agent(SimpleNamespace):
    def __init__(self, id_):
        super().__init__(id_=id_, t=0, t_started=0, is_done=False, extra_model_outputs={})

    def __len__(self):
        return self.t


def environment(agents):
    return SimpleNamespace(agent_episodes=agents)


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_agents(seed, monkeypatch):
    """Agents that come, go and act at any time, each answered at once or later."""
    monkeypatch.setattr(
        "connectors.rollout.states.agents_by_module",
        lambda episodes: {"m": list(episodes[0].agent_episodes.values())},
    )
    rng = np.random.default_rng(seed)
    module, rollout = Module(), Rollout()
    agents, states, snapshots = {}, {}, {}
    unanswered = set()
    for number in range(80):
        for name in [name for name in agents if rng.random() < 0.1]:
            del agents[name]
            unanswered.discard(name)
        if rng.random() < 0.5 or not agents:
            for k in range(rng.integers(1, 4)):
                agents[f"{number}-{k}"] = Agent(f"{number}-{k}")
        for name in sorted(unanswered):
            if rng.random() < 0.7:
                agents[name].t += 1
                unanswered.discard(name)
        names = [name for name in agents if name not in unanswered and rng.random() < 0.7]
        rng.shuffle(names)
        episodes = [environment(agents)]
        rollout.observe(episodes)
        for name, snapshot in snapshots.items():
            agent = agents.get(name)
            if agent is not None and agent.t == snapshot.t + T:
                assert snapshot.end_t == agent.t
                assert np.array_equal(snapshot.end_state["x"], states[name]["x"])
        if not names:
            continue
        acting = [((0, name), agents[name]) for name in names]
        rollout.row_length("m", module)
        state_in = rollout.begin("m", module, acting, episodes, device="cpu")
        for row, name in enumerate(names):
            known = states.get(name, Module().get_initial_state())
            assert all(torch.equal(state_in[key][row], known[key]) for key in known)
            states[name] = step(known, number)
        rollout.settle(episodes)
        references = rollout.end("m", step(state_in, number), episodes)
        assert references is not None
        for name, snapshot in zip(names, references, strict=True):
            assert snapshot.t == agents[name].t // T * T
            snapshots[name] = snapshot
        unanswered.update(names)
    # Those that are gone are forgotten.
    assert len(rollout._agents) < 40


def test_a_state_is_held_once(monkeypatch):
    """Where a single agent acts, only the last pass's batch stays."""
    monkeypatch.setattr(
        "connectors.rollout.states.agents_by_module", lambda episodes: {"m": episodes}
    )
    module, rollout = Module(), Rollout()
    episodes = [Agent(str(i)) for i in range(3)]
    acting = [((i, None), episode) for i, episode in enumerate(episodes)]
    rollout.row_length("m", module)
    state_out = None
    for number in range(5):
        rollout.observe(episodes)
        state_in = rollout.begin("m", module, acting, episodes, device="cpu")
        assert state_out is None or state_in is state_out
        state_out = step(state_in, number)
        rollout.end("m", state_out, episodes)
        held = [agent.state[0] for agent in rollout._agents.values()]
        assert all(batch is state_out for batch in held)
        assert all(agent.before is None for agent in rollout._agents.values())
        assert not rollout._passes
        for episode in episodes:
            episode.t += 1
