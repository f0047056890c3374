"""The table of `python -m benchmarks popgym` on a terminal."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.harness import Record

CAPTION = (
    "return: mean over seeds of the best mean return over 200 episodes, and its 95 % interval. "
    "steps: median to `goal`, the best published return or 0.9 if that is less, else that of "
    "RLlib's LSTM; >: not reached by so many of the seeds. published: the best of POPGym's 13 "
    "models after 15,000,000 steps."
)


def print_table(records: Sequence[Record], console: Console | None = None) -> None:
    """Prints a line for each task, memory and learning rate."""
    table = Table(caption=CAPTION, caption_justify="left")
    for column in ("task", "memory"):
        table.add_column(column, no_wrap=True)
    for column in ("lr", "return", "seeds", "trained", "goal", "steps", "published"):
        table.add_column(column, justify="right", no_wrap=True)
    last = None
    for record in records:
        if last is not None and record["task"] != last:
            table.add_section()
        last = record["task"]
        table.add_row(
            record["task"],
            record["memory"],
            f"{record['lr']:g}",
            return_text(record),
            str(len(record["seeds"])),
            f"{record['max_steps']:,}",
            "" if record["goal"] is None else f"{record['goal']:.3g}",
            steps_text(record),
            "" if record["published"] is None else f"{record['published']:.3f}",
        )
    console = console or Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)


def return_text(record: Record) -> str:
    """The mean return, and its interval where there are several seeds."""
    text = f"{record['return']:.3f}"
    if record["interval"] is None:
        return text
    low, high = record["interval"]
    # Without a backslash rich would read the bracket as markup, were it a word.
    return f"{text} ({low:.2f} to {high:.2f})"


def steps_text(record: Record) -> str:
    """Steps to the goal, marked where seeds did not reach it."""
    if record["goal"] is None:
        return ""
    if record["steps_to_goal"] is None:
        return f"> {record['max_steps']:,}"
    censored, seeds = record["censored"], len(record["seeds"])
    missed = f" ({censored} of {seeds} never)" if censored else ""
    return f"{record['steps_to_goal']:,}{missed}"
