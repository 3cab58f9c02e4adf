"""A schedule drawn: as text, a line for each rank, or as a picture."""

from pathlib import Path

from xscale.parallel.pipeline.simulate import Played

COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#eeca3b", "W": "#54a24b"}
NAMES = {"F": "forward", "B": "backward", "I": "backward to inputs", "W": "backward to weights"}


def text(played: Played, columns: int = 120) -> str:
    """A line for each rank.

    F3 and B3 are micro-batch 3's forward and backward, I3 and W3 the two parts of a split one; dots are bubble. What
    does not fit into `columns` is cut off.
    """
    stages = 1 + max(timed.action.stage for actions in played.ranks for timed in actions)
    several = stages > len(played.ranks)
    label = {
        timed.action: f"{timed.action.kind}{timed.action.micro}" + (f"/{timed.action.stage}" if several else "")
        for actions in played.ranks
        for timed in actions
    }
    cell = 1 + max(len(one) for one in label.values())
    lines = []
    for rank, actions in enumerate(played.ranks):
        line = ""
        for timed in actions:
            line = line.ljust(round(timed.start * cell), ".")
            line += label[timed.action].ljust(max(cell, round(timed.end * cell) - len(line)), "-")[:-1] + " "
        head = f"rank {rank}  "
        whole = head + line.ljust(round(played.span * cell), ".")
        lines.append(whole if len(whole) <= columns else whole[: columns - 1] + ">")
    return "\n".join(lines)


def picture(played: Played, path: Path, title: str = "") -> None:
    """Write the schedule to `path`, in the format that its ending names (.svg, .png)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(min(24.0, 2 + 0.35 * played.span), 1 + 0.5 * len(played.ranks)), layout="constrained")
    axes = figure.add_subplot()
    for rank, actions in enumerate(played.ranks):
        for timed in actions:
            width, colour = timed.end - timed.start, COLOURS[timed.action.kind]
            axes.barh(rank, width, left=timed.start, color=colour, edgecolor="white", height=0.9)
            axes.text(timed.start + width / 2, rank, str(timed.action.micro), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(played.ranks)), [f"rank {rank}" for rank in range(len(played.ranks))])
    axes.invert_yaxis()
    axes.set_xlabel(f"time in forwards of a stage; {played.bubble:.1%} bubble")
    axes.set_title(title)
    used = {timed.action.kind for actions in played.ranks for timed in actions}
    for kind in COLOURS:
        if kind in used:
            axes.barh(0, 0, color=COLOURS[kind], label=NAMES[kind])
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=7)
    figure.savefig(path)
