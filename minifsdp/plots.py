"""Every figure of the project, drawn from pandas frames, in one look.

Colour means what is stored, never which rank: the palette is Okabe and Ito's, which colour-blind readers can
tell apart. What was measured is a filled bar, what the formula says its outline.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLORS = {
    "parameters": "#0072B2",
    "gathered": "#56B4E9",
    "gradients": "#E69F00",
    "optimizer": "#009E73",
    "other": "#999999",
    "communication": "#D55E00",
}
MIB = 2**20


def memory_bars(frame: pd.DataFrame, ax: Axes) -> None:
    """Memory of one rank by category, one group of bars a parallelism.

    Args:
        frame: columns ``parallelism``, ``category``, ``measured_bytes``, ``formula_bytes`` (NaN where there
            is none).
    """
    categories, kinds = list(dict.fromkeys(frame.category)), list(dict.fromkeys(frame.parallelism))
    width = 0.8 / len(kinds)
    for k, kind in enumerate(kinds):
        rows = frame[frame.parallelism == kind].set_index("category").loc[categories]
        x = [i + (k - (len(kinds) - 1) / 2) * width for i in range(len(categories))]
        colors = [COLORS.get(category, "#444444") for category in categories]
        bars = ax.bar(x, rows.measured_bytes / MIB, 0.9 * width, color=colors)
        ax.bar(x, rows.formula_bytes / MIB, 0.9 * width, fill=False, edgecolor="black", linewidth=1.0)
        ax.bar_label(
            bars, [f"{kind}\n{value / MIB:.1f}" for value in rows.measured_bytes], fontsize=8, padding=2
        )
    ax.set_xticks(range(len(categories)), categories)
    ax.set_ylabel("memory of one rank, largest (MiB)")
    ax.set_ylim(0, 1.18 * max(frame.measured_bytes.max(), frame.formula_bytes.max()) / MIB)
    ax.set_title("What one rank holds: measured, and by formula (outline)", loc="left", fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)


def loss_curves(frame: pd.DataFrame, ax: Axes) -> None:
    """Loss against step, one line a parallelism.

    Args:
        frame: columns ``parallelism``, ``step``, ``loss`` (nats a byte).
    """
    for kind, rows in frame.groupby("parallelism", sort=False):
        wide = kind == "DP"  # the lines coincide, so the lower one is wider
        ax.plot(
            rows.step,
            rows.loss,
            color="#D5A98A" if wide else "black",
            linewidth=4 if wide else 1.2,
            label=kind,
        )
    ax.legend(frameon=False)
    ax.set_xlabel("step")
    ax.set_ylabel("loss (nats a byte)")
    ax.set_ylim(bottom=0)
    ax.set_title("Training loss", loc="left", fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)


def overview(memory: pd.DataFrame, losses: pd.DataFrame) -> Figure:
    """The demo's figure: memory by category beside the loss curves."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4.2), gridspec_kw={"width_ratios": [5, 3]}, layout="constrained"
    )
    memory_bars(memory, left)
    loss_curves(losses, right)
    return figure
