"""One table of spaces, drawn at random, at every door: module, connectors, policy, HTTP, export and
recorded episodes serve a space with the same numbers, or building the module refuses it."""

import json

import gymnasium as gym
import numpy as np
import pytest
import torch
import tree
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.spaces.space_utils import get_base_struct_from_space

from connectors import BuildTrainBatch, MemoryPolicy
from connectors.acting.loading import _module_parts
from connectors.acting.observations import conform
from connectors.offline.reading import read_episodes
from connectors.serving.json_requests import action_to_json, observation_from_json
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule
from rlmodules.export.step_model import StepModel
from tests.connectors.helpers import run_pipeline
from tests.connectors.offline.test_reading import Rows

# RLlib asks for the truth of a space, and gymnasium for its length.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-dimensional MultiDiscrete:UserWarning")

S = gym.spaces
T = 5
CONFIG = DeepLinearAttentionConfig(
    max_seq_len=3,
    num_layers=1,
    d_model=8,
    num_heads=1,
    head_dim=4,
    feedforward_dim=8,
    fcnet_hiddens=[8],
    conv_filters=[[2, 3, 2]],
    compile=False,
)

# Bounds of a Box by kind of dtype. gymnasium knows no infinite ones of unsigned integers.
BOUNDS = {
    "f": [(-3.0, 2.0), (0.0, 1.0), (-np.inf, np.inf), (0.0, np.inf), (-np.inf, 1.0)],
    "i": [(-5, 9), (0, 100), (-np.inf, np.inf), (0, np.inf)],
    "u": [(0, 7), (0, 255)],
    "b": [(0, 1)],
}
DTYPES = [
    *("uint8", "uint16", "uint32", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "bool"),
]


@st.composite
def boxes(draw, *, max_rank, dtypes=DTYPES):
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    low, high = draw(st.sampled_from(BOUNDS[dtype.kind]))
    shape = draw(st.lists(st.integers(1, 4), max_size=max_rank))
    return S.Box(low, high, tuple(shape), dtype.type)


@st.composite
def multi_discretes(draw):
    dtype = draw(st.sampled_from(["int64", "int32", "uint8", "uint16", "uint32", "uint64"]))
    shape = draw(st.sampled_from([(1,), (3,), (2, 2)]))
    nvec = draw(st.lists(st.integers(1, 4), min_size=4, max_size=4))
    nvec = np.resize(np.array(nvec, dtype), shape)
    start = draw(st.sampled_from([0, 2]))
    return S.MultiDiscrete(nvec, dtype=np.dtype(dtype).type, start=np.full(shape, start, dtype))


DISCRETES = st.builds(
    S.Discrete,
    st.integers(1, 5),
    start=st.sampled_from([0, 0, 3]),
    dtype=st.sampled_from([np.int64, np.uint8]),
)
MULTI_BINARIES = st.sampled_from([3, (2, 2), (1, 2, 3)]).map(S.MultiBinary)


def nested(leaves):
    return st.recursive(
        leaves,
        lambda children: (
            st.lists(children, min_size=1, max_size=3).map(S.Tuple)
            | st.dictionaries(st.sampled_from("zab"), children, min_size=1, max_size=3).map(S.Dict)
        ),
        max_leaves=4,
    )


OBSERVATIONS = nested(
    st.one_of(boxes(max_rank=4), boxes(max_rank=4), DISCRETES, multi_discretes(), MULTI_BINARIES)
)
SERVED_ACTIONS = st.one_of(
    boxes(max_rank=1, dtypes=["float16", "float32", "float64"]).filter(lambda box: box.shape),
    DISCRETES.filter(lambda space: space.start == 0),
    multi_discretes().filter(lambda space: len(space.shape) == 1 and not space.start.any()),
)
OTHER_ACTIONS = st.one_of(
    boxes(max_rank=2, dtypes=["float32", "int64"]), DISCRETES, multi_discretes(), MULTI_BINARIES
)
ACTIONS = nested(SERVED_ACTIONS) | nested(SERVED_ACTIONS) | nested(OTHER_ACTIONS)


def leaves_of(space):
    return tree.flatten(get_base_struct_from_space(space))


def build(observation_space, action_space):
    """A module whose outputs depend on what it reads."""
    torch.manual_seed(0)
    module = RLModuleSpec(
        module_class=DeepLinearAttentionRLModule,
        observation_space=observation_space,
        action_space=action_space,
        model_config=CONFIG,
    ).build()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module.eval()


def roll_out(module, observations, *, explore):
    """An episode as an EnvRunner samples it, and the actions that its environment got."""
    parts = _module_parts(module)
    episode = SingleAgentEpisode(
        observation_space=module.observation_space, action_space=module.action_space
    )
    episode.add_env_reset(observations[0])
    common = {"rl_module": module, "episodes": [episode], "explore": explore, "shared_data": {}}
    sent = []
    for observation in observations[1:]:
        with torch.no_grad():
            outputs = module.forward_inference(parts.env_to_module(batch={}, **common))
        columns = parts.module_to_env(batch=outputs, **common)
        row = {
            key: tree.map_structure(lambda leaf: leaf[0], value)
            if not isinstance(value, list)
            else value[0]
            for key, value in columns.items()
        }
        actions = row.pop(Columns.ACTIONS)
        sent.append(row.pop(Columns.ACTIONS_FOR_ENV))
        episode.add_env_step(observation, actions, 0.0, extra_model_outputs=row)
    return episode.to_numpy(), sent


def train_pass(module, episode):
    """The Learner's batch of an episode, in rows, with what the module makes of it."""
    batch = run_pipeline(
        lambda *_: BuildTrainBatch(), module.as_multi_rl_module(), [episode], bootstrap=False
    )
    with torch.no_grad():
        outputs = module.forward_train(batch)
    return batch, outputs[Columns.ACTION_DIST_INPUTS]


def recorded(episode):
    """The episode, written and read."""
    return next(read_episodes(Rows([episode]), batch_size=1))


def exported_steps(module, observations):
    """Outputs of the exported model, step by step."""
    model = StepModel(module)
    inputs = {name: value[:1] for name, value in model.example().items()}
    for t, observation in enumerate(observations):
        leaves = tree.flatten(observation)
        names = [name for name in inputs if name.split(".")[0] == "obs"]
        inputs |= {
            name: torch.as_tensor(np.asarray(leaf))[None]
            for name, leaf in zip(names, leaves, strict=True)
        }
        inputs["reset"] = torch.tensor([t == 0])
        with torch.no_grad():
            outputs = model(inputs)
        yield outputs
        inputs |= {
            name.replace("state_out", "state_in", 1): value
            for name, value in outputs.items()
            if name.startswith("state_out")
        }


def assert_same(actual, expected):
    """Same structure, dtypes and bits."""
    tree.assert_same_structure(actual, expected)
    for ours, theirs in zip(tree.flatten(actual), tree.flatten(expected), strict=True):
        assert np.asarray(ours).dtype == np.asarray(theirs).dtype
        np.testing.assert_array_equal(ours, theirs)


def has_channels_first(space):
    return (
        isinstance(space, S.Box) and len(space.shape) == 3 and space.shape[0] < min(space.shape[1:])
    )


@settings(max_examples=20)
@given(space=OBSERVATIONS, seed=st.integers(0, 99))
def test_observations(space, seed):
    if any(map(has_channels_first, leaves_of(space))):
        with pytest.raises(ValueError, match="channels last"):
            build(space, S.Discrete(3))
        return
    module = build(space, S.Discrete(3))
    space.seed(seed)
    observations = [space.sample() for _ in range(T + 1)]
    episode, sent = roll_out(module, observations, explore=False)
    dist_inputs = episode.get_extra_model_outputs(Columns.ACTION_DIST_INPUTS)
    assert np.isfinite(dist_inputs).all()

    # The module, on the whole sequence at once.
    obs = tree.map_structure(
        lambda *steps: torch.as_tensor(np.stack(steps))[None], *observations[:T]
    )
    first = tree.map_structure(lambda leaf: leaf[None], module.get_initial_state())
    with torch.no_grad():
        whole = module.forward_train({Columns.OBS: obs, Columns.STATE_IN: first})
    tolerance = {"rtol": 1e-3, "atol": 1e-4}
    np.testing.assert_allclose(whole[Columns.ACTION_DIST_INPUTS][0], dist_inputs, **tolerance)

    # The Learner, in rows, from what was sampled and from what was recorded of it.
    for copied in (episode, recorded(episode)):
        assert_same(copied.get_observations(), episode.get_observations())
    batch, in_rows = train_pass(module, episode)
    np.testing.assert_allclose(in_rows[batch[Columns.LOSS_MASK]], dist_inputs, **tolerance)

    # Acting: the policy, JSON, the exported model.
    policy = MemoryPolicy(_module_parts(module))
    steps = exported_steps(module, observations[:T])
    for t, (observation, outputs) in enumerate(zip(observations, steps, strict=False)):
        assert_same(conform(observation, space), observation)
        assert_same(
            observation_from_json(json.loads(action_to_json(observation))["action"], space),
            observation,
        )
        assert policy.act(observation) == sent[t] == outputs["action"][0]
        np.testing.assert_allclose(outputs["action_dist_inputs"][0], dist_inputs[t], **tolerance)


def is_served_action(space):
    if isinstance(space, S.Box):
        return len(space.shape) == 1 and space.dtype.kind == "f"
    if isinstance(space, S.MultiDiscrete):
        return len(space.shape) == 1 and not space.start.any()
    return isinstance(space, S.Discrete) and space.start == 0


def is_bounded(space):
    return not isinstance(space, S.Box) or space.is_bounded()


@settings(max_examples=20)
@given(space=ACTIONS, seed=st.integers(0, 99))
def test_actions(space, seed):
    observation_space = S.Box(-1.0, 1.0, (3,), np.float32)
    if not all(map(is_served_action, leaves_of(space))):
        with pytest.raises(ValueError, match="which RLlib's distributions do not serve"):
            build(observation_space, space)
        return
    module = build(observation_space, space)
    observation_space.seed(seed)
    observations = [observation_space.sample() for _ in range(T + 1)]
    _, best = roll_out(module, observations, explore=False)
    torch.manual_seed(seed)
    episode, sent = roll_out(module, observations, explore=True)

    # What environments get: of the space's structure, shapes and dtypes, within finite bounds.
    for action in (*best, *sent):
        for leaf, part in zip(leaves_of(space), tree.flatten(action), strict=True):
            assert np.asarray(part).dtype == leaf.dtype
            assert np.shape(part) == leaf.shape
            assert leaf.contains(part) or not is_bounded(leaf)

    # The policy, JSON, the exported model.
    policy = MemoryPolicy(_module_parts(module))
    steps = exported_steps(module, observations[:T])
    for t, (observation, outputs) in enumerate(zip(observations, steps, strict=False)):
        assert_same(policy.act(observation), best[t])
        document = json.loads(action_to_json(best[t]))["action"]
        if all(map(is_bounded, leaves_of(space))):
            assert_same(observation_from_json(document, space), best[t])
        names = [name for name in outputs if name.split(".")[0] == "action"]
        for name, part in zip(names, tree.flatten(best[t]), strict=True):
            exported = outputs[name][0].numpy()
            assert exported.dtype == np.asarray(part).dtype
            np.testing.assert_allclose(exported, part, rtol=1e-2, atol=1e-3)

    # The Learner gives the sampled actions the rollout's log-probabilities.
    batch, dist_inputs = train_pass(module, episode)
    dist = module.get_train_action_dist_cls().from_logits(dist_inputs)
    mask = batch[Columns.LOSS_MASK]
    np.testing.assert_allclose(
        dist.logp(batch[Columns.ACTIONS])[mask],
        episode.get_extra_model_outputs(Columns.ACTION_LOGP),
        rtol=1e-3,
        atol=1e-3,
    )
    assert_same(recorded(episode).get_actions(), episode.get_actions())
