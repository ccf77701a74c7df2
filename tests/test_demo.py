"""The two doors, run as a person runs them: torchrun on a small model."""

import json
import os
import subprocess
import sys

import matplotlib
import pandas as pd
import pytest

from minifsdp import plots
from minifsdp.demo import parse_arguments

SMALL = ["--layers", "2", "--width", "32", "--heads", "2", "--batch", "2", "--seq", "16", "--steps", "6"]


def run(ranks, module, *flags, check=True):
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, "-m", f"minifsdp.{module}", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=110, env=environment, check=False
    )
    assert not check or result.returncode == 0, result.stderr
    return result


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (0, ["--precision", "fp32"]),
        (2, ["--precision", "fp32", "--units", "layer", "--accumulate", "2", "--clip", "0"]),
        (3, ["--precision", "fp16", "--strategy", "shard_grad_op"]),
    ],
    ids=["alone", "fp32", "fp16"],
)
def test_the_demo_reports_what_it_promises(tmp_path, ranks, flags):
    results = tmp_path / "results.json"
    result = run(ranks, "demo", *SMALL, *flags, "--out", str(tmp_path), "--json", str(results))
    found = json.loads(results.read_text())
    assert found["world_size"] == max(ranks, 1)
    assert (found["device"], found["backend"], found["precision"]) == ("cpu", "gloo", flags[1])
    assert found["max_abs_param_diff"] <= 1e-6
    for name in ("dp", "fsdp"):
        side = found[name]
        assert len(side["losses"]) == found["steps"] == 6
        assert side["seconds_per_step"] > 0
        assert {k: side["peak_bytes"][k] for k in side["formula_bytes"]} == side["formula_bytes"]
        assert side["peak_bytes"]["total"] <= sum(v for k, v in side["peak_bytes"].items() if k != "total")
        assert {"all_gather", "reduce_scatter", "all_reduce"} <= side["sent_bytes"].keys()
    assert found["dp"]["losses"] == pytest.approx(found["fsdp"]["losses"], rel=1e-6)
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    assert str(tmp_path / "demo.png") in result.stdout
    assert ("torchrun --nproc-per-node 4" in result.stdout) == (ranks == 0)
    assert "Warning" not in result.stderr


def test_the_demo_without_baseline_on_a_text_of_ones_own(tmp_path):
    text = tmp_path / "mine.txt"
    text.write_text("to shard or not to shard " * 40)
    results = tmp_path / "results.json"
    flags = ["--skip-baseline", "--text", str(text), "--precision", "fp32", "--steps", "25", "--lr", "1e-2"]
    run(2, "demo", *SMALL, *flags, "--out", str(tmp_path), "--json", str(results))
    found = json.loads(results.read_text())
    assert found["dp"] is None
    assert found["max_abs_param_diff"] is None
    assert found["fsdp"]["losses"][-1] < 0.6 * found["fsdp"]["losses"][0]


def test_flags_that_cannot_be():
    for flags in (["--steps", "0"], ["--width", "10", "--heads", "3"], ["--units", "row"]):
        with pytest.raises(SystemExit):
            parse_arguments(flags)
    assert "NCCL" in run(0, "demo", "--backend", "nccl", check=False).stderr.upper()


def test_the_benchmark_prints_ratios(tmp_path):
    csv = tmp_path / "times.csv"
    flags = [
        "--layers",
        "1",
        "--width",
        "16",
        "--heads",
        "2",
        "--seq",
        "8",
        "--rounds",
        "2",
        "--csv",
        str(csv),
    ]
    result = run(2, "bench", *flags)
    assert "minifsdp fully_shard" in result.stdout
    assert len(pd.read_csv(csv)) == 2 * 4


def test_the_figure_shows_the_numbers_of_its_frame():
    matplotlib.use("agg")
    memory = pd.DataFrame(
        [
            ("DP", "parameters", 4 << 20, 4 << 20),
            ("DP", "other", 2 << 20, None),
            ("FSDP", "parameters", 1 << 20, 1 << 20),
            ("FSDP", "other", 2 << 20, None),
        ],
        columns=["parallelism", "category", "measured_bytes", "formula_bytes"],
    )
    losses = pd.DataFrame(
        [("DP", 0, 5.0), ("DP", 1, 4.0), ("FSDP", 0, 5.0), ("FSDP", 1, 4.0)],
        columns=["parallelism", "step", "loss"],
    )
    figure = plots.overview(memory, losses)
    left, right = figure.axes
    filled = [bar.get_height() for bar in left.patches if bar.get_fill()]
    outlines = [bar.get_height() for bar in left.patches if not bar.get_fill()]
    assert filled == [4, 2, 1, 2]
    assert [h for h in outlines if h == h] == [4, 1]
    assert left.get_ylim()[0] == right.get_ylim()[0] == 0
    assert [list(line.get_ydata()) for line in right.lines] == [[5, 4], [5, 4]]
    assert all(axes.get_xlabel() or axes.get_xticklabels() for axes in figure.axes)
    assert all("(" in axes.get_ylabel() for axes in figure.axes)  # a unit
