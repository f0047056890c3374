"""RLlib's own LSTM against our stack with as many parameters, each on its own connectors.

Part of `python -m benchmarks connectors`. RLlib's LSTM has 256 cells behind its default MLP. Ours
is `DeepLinearAttentionRLModule`, as wide as it takes to have the same number of parameters.
"""

import dataclasses

from popgym.envs.repeat_previous import RepeatPreviousEasy

from benchmarks.harness import Record, alternate, check, machine_info, record, timed
from benchmarks.rigs import (
    MAX_SEQ_LEN,
    NUM_ENVS,
    Rig,
    memory_config,
    rllib_lstm_config,
)
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule

CASE = "lstm-256"
CELLS = 256
TARGETS = {"update": 1.5, "iteration": 1.2}
ALLOWED_DIFFERENCE = 0.05
"""In the number of parameters."""


def compare(
    *,
    device: str = "cpu",
    fragment: int = 256,
    min_runs: int = 7,
    seconds: float = 20.0,
    cells: int = CELLS,
    compile_ours: bool = False,
) -> list[Record]:
    """Measures updates and iterations of both.

    Args:
        device: Where the Learners run.
        fragment: Steps an environment and sample.
        min_runs: Rounds at least.
        seconds: Time for the rounds beyond those.
        cells: Width of the LSTM.
        compile_ours: Whether our module is compiled.

    Raises:
        CorrectnessError: If a side does not reproduce its recorded log-probabilities, or the
            numbers of parameters differ by more than 5 %.
    """
    theirs = Rig(rllib_lstm_config(lstm_cell_size=cells, fragment=fragment, device=device))
    model_config = config_of_size(theirs)
    model_config.compile = compile_ours
    ours = Rig(
        memory_config(
            DeepLinearAttentionRLModule,
            model_config,
            connected=True,
            fragment=fragment,
            device=device,
        )
    )
    difference = ours.num_parameters / theirs.num_parameters - 1
    check(
        abs(difference) <= ALLOWED_DIFFERENCE,
        f"{ours.num_parameters} parameters against {theirs.num_parameters}",
    )
    rigs = {"ours": ours, "theirs": theirs}
    recorded = {}
    for side, rig in rigs.items():
        recorded[side] = rig.record_sample()
        rig.check_log_probs(rig.train_batch(recorded[side].episodes()))

    runs = {
        "update": {side: recorded[side].timed(rigs[side].update, device) for side in rigs},
        "iteration": {side: timed(rigs[side].iterate, device) for side in rigs},
    }
    measured = {
        metric: alternate(contestants, min_runs=min_runs, seconds=seconds)
        for metric, contestants in runs.items()
    }
    records = [
        record(
            benchmark="connectors",
            case=CASE,
            peer="rllib-lstm",
            metric=metric,
            ours=values["ours"],
            theirs=values["theirs"],
            unit="s",
            target=TARGETS[metric],
            machine=machine_info(device),
            num_envs=NUM_ENVS,
            fragment=fragment,
            max_seq_len=MAX_SEQ_LEN,
            num_epochs=ours.algo.config.num_epochs,
            parameters={side: rig.num_parameters for side, rig in rigs.items()},
            d_model=model_config.d_model,
            compiled=compile_ours,
        )
        for metric, values in measured.items()
    ]
    for rig in rigs.values():
        rig.stop()
    return records


def config_of_size(rig: Rig) -> DeepLinearAttentionConfig:
    """Our default, widened until it has about as many parameters as a rig's module."""
    env = RepeatPreviousEasy()

    def num_parameters(config: DeepLinearAttentionConfig) -> int:
        module = DeepLinearAttentionRLModule(
            observation_space=env.observation_space,
            action_space=env.action_space,
            model_config=dataclasses.asdict(config),
        )
        return sum(p.numel() for p in module.parameters())

    configs = [
        DeepLinearAttentionConfig(
            max_seq_len=MAX_SEQ_LEN,
            d_model=width,
            head_dim=width // 8 * 2,  # even, for rotary positions
            feedforward_dim=2 * width,
            fcnet_hiddens=[width],
        )
        for width in range(16, 513, 4)
    ]
    return min(configs, key=lambda config: abs(num_parameters(config) - rig.num_parameters))
