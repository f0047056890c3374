"""The commands of `python -m rlmodules`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rlmodules.modules.checkpoints import find_checkpoint, load_modules
from rlmodules.tools import curves, drawing, loading, tables
from rlmodules.tools import describe as description
from rlmodules.tools import memory_map as maps
from rlmodules.tools.watch import WatchServer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _quiet() -> None:
    """Describes models with memory, draws which steps they take from, compares and watches runs."""
    logging.getLogger("ray").setLevel(logging.ERROR)


@app.command()
def describe(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|CHECKPOINT",
            help="A config: `package.module:name` or `path.py:name` of an AlgorithmConfig or of a "
            "function that returns one. Or the folder of an Algorithm's or a module's checkpoint.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prints a model and what it costs: parameters, states, arithmetic, rows, settings."""
    # `rlmodules` imports nothing of `connectors`, but for these commands, which sit on top of both.
    from connectors import MemoryLearnerMixin

    with _clear_errors("CONFIG|CHECKPOINT"):
        if Path(target).expanduser().is_dir():
            config, modules = load_modules(target)
        else:
            config = loading.load_config(target)
            modules = loading.build_modules(config)
        connected = config is not None and issubclass(config.learner_class, MemoryLearnerMixin)
        facts = description.describe(config, modules, connected=connected)
    if as_json:
        typer.echo(json.dumps(facts, indent=2, default=str))
    else:
        tables.print_description(facts, Console(highlight=False))


@app.command()
def memory_map(
    checkpoint: Annotated[str, typer.Argument(help="Folder of an Algorithm's or a module's.")],
    env: Annotated[
        str | None,
        typer.Option(
            help="A gymnasium ID, or `package.module:name` or `path.py:name` of an environment's "
            "class. Left out: the environment of the checkpoint's config."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the environment's reset.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Steps to play at most.")] = 128,
    out: Annotated[Path, typer.Option(help="Folder for the drawings.")] = Path("memory_map"),
) -> None:
    """Plays an episode and draws which steps the memory takes from.

    A panel a layer and head with attention weights, else one a memory, by its gradient.
    """
    from connectors import MemoryPolicy
    from connectors.acting.loading import load_parts

    with _clear_errors("CHECKPOINT"):
        parts = load_parts(checkpoint)
        _, config = find_checkpoint(checkpoint)
        played = maps.make_env(config, env)
        found = maps.play(MemoryPolicy(parts), parts.module, played, seed=seed, num_steps=steps)
    out.mkdir(parents=True, exist_ok=True)
    title = (
        f"{played.unwrapped.__class__.__name__}, seed {seed}: {len(found.actions)} steps, "
        f"return {sum(found.rewards):.2f}"
    )
    drawing.draw_png(found, out / "memory_map.png", title=title)
    drawing.draw_html(found, out / "memory_map.html", title=title)
    console = Console(highlight=False)
    console.print(title, style="bold")
    tables.print_look_back(maps.look_back(found.layers), console)
    console.print(f"{out / 'memory_map.png'}, {out / 'memory_map.html'}", soft_wrap=True)


@app.command()
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Folders of runs, with `metrics.csv` of `make train` or `result.json` of Tune. "
            "Those whose names differ in `-seed<n>` alone are one curve; so are all runs below a "
            "folder.",
        ),
    ],
    metric: Annotated[str | None, typer.Option(help="A column; left out: mean returns.")] = None,
    out: Annotated[Path, typer.Option(help="The PNG file to write.")] = Path("compare.png"),
) -> None:
    """Draws the learning curves of runs, also of those that go on, with 95 % intervals."""
    with _clear_errors("RUN..."):
        found = curves.read_curves(runs, metric)
    curves.draw_curves(found, out, label=metric or "mean return")
    console = Console(highlight=False)
    tables.print_curves(found, console)
    console.print(str(out), soft_wrap=True)


@app.command()
def watch(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Folders of runs, or with runs in them, as `compare` takes them. Those that begin "
            "there later appear too.",
        ),
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of the page; 0: any that is free.")
    ] = 8600,
) -> None:
    """Serves a page with the curves of runs, which goes on while they do, until Ctrl-C."""
    with _clear_errors("RUN..."):
        server = WatchServer(runs, port)
    Console().print(f"Open http://127.0.0.1:{server.server_port} in a browser. Ctrl-C ends it.")
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()


@contextmanager
def _clear_errors(name: str) -> Iterator[None]:
    """Turns errors about what was asked for into a message and exit code 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=name) from error
    except ModuleNotFoundError as error:
        raise typer.BadParameter(
            f"It needs what cannot be imported here: {error}. Run from the folder that it was made "
            "in, or add that to PYTHONPATH.",
            param_hint=name,
        ) from error
