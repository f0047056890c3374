"""`StateBank` against a plain dict of states, for agents that come, go and act at any time."""

import numpy as np
import pytest
import torch

from connectors.state_bank import StateBank


class Module:
    def get_initial_state(self):
        return {"x": torch.full((2,), 0.5), "t": torch.zeros((), dtype=torch.int64)}


def step(state, number):
    return {"x": state["x"] * 2 + number, "t": state["t"] + 1}


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_agents(seed):
    rng = np.random.default_rng(seed)
    bank = StateBank(Module())
    before, after, live = {}, {}, []
    for number in range(60):
        live = [id_ for id_ in live if rng.random() > 0.1]
        if rng.random() < 0.5 or not live:
            live += [f"{number}-{k}" for k in range(rng.integers(1, 4))]
        acting = [id_ for id_ in live if rng.random() < rng.choice([0.5, 1.0])]
        rng.shuffle(acting)
        if not acting:
            continue
        starts = [row for row, id_ in enumerate(acting) if id_ not in after or rng.random() < 0.1]
        states = bank.take(acting, starts, lambda live=live: live, "cpu")
        for row, id_ in enumerate(acting):
            state = Module().get_initial_state() if row in starts else after[id_]
            assert all(torch.equal(states[name][row], state[name]) for name in state)
            before[id_], after[id_] = state, step(state, number)
        bank.put(states, step(states, number))
        known = [id_ for id_ in live if id_ in after]
        for recorded, expected in ((bank.states_before, before), (bank.states_after, after)):
            for id_, state in zip(known, recorded(known), strict=True):
                assert all(np.array_equal(state[name], expected[id_][name]) for name in state)
    # Rows of agents that are gone are used again.
    assert len(bank._ids) < 40


def test_the_output_of_one_pass_is_the_input_of_the_next():
    """No copy where the same agents act, in this order or another from the second time on."""
    bank = StateBank(Module())
    states = bank.take(["a", "b"], [0, 1], lambda: (), "cpu")
    for ids in (["a", "b"], ["a", "b"], ["b", "a"], ["b", "a"]):
        out = step(states, 1)
        bank.put(states, out)
        states = bank.take(ids, [], lambda: (), "cpu")
        assert (states is out) == (ids == bank._ids)
        if states is not out:
            assert torch.equal(states["x"], out["x"].flip(0))
    assert states is out


def test_states_of_the_module_are_not_written_into():
    bank = StateBank(Module())
    states = bank.take(["a", "b"], [0, 1], lambda: ("a", "b"), "cpu")
    kept = step(states, 1)
    bank.put(states, kept)
    copies = [{name: leaf.clone() for name, leaf in tree.items()} for tree in (states, kept)]
    alone = bank.take(["b"], [], lambda: ("a", "b"), "cpu")
    bank.put(alone, step(alone, 7))
    for tree, copy in zip((states, kept), copies, strict=True):
        assert all(torch.equal(tree[name], copy[name]) for name in tree)


def test_heirs():
    bank = StateBank(Module())
    states = bank.take(["a", "b"], [0, 1], lambda: (), "cpu")
    out = step(states, 1)
    bank.put(states, out)
    heirs = {0: ("b", False), 1: ("a", True)}
    inherited = bank.take(["c", "d", "e"], [0, 1, 2], lambda: (), "cpu", heirs=heirs)
    expected = torch.stack([out["x"][1], states["x"][0], torch.full((2,), 0.5)])
    assert torch.equal(inherited["x"], expected)
    assert inherited["t"].tolist() == [1, 0, 0]
