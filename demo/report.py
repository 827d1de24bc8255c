"""What the demo found: figures to JSON, a picture, and a few lines on the terminal.

Not here: how the figures came about.
"""

from __future__ import annotations

import json
import pathlib
import statistics
from typing import Any

AUC_MIN = 0.76


def verdict(report: dict[str, Any]) -> list[str]:
    """What is wrong, in words; empty when everything holds."""
    run, audit, problems = report["with_kills"], report["audit"], []
    if run["auc"] < AUC_MIN:
        problems.append(f"test AUC {run['auc']:.4f} is below {AUC_MIN}")
    if report["undisturbed"] is not None and report["undisturbed"]["auc"] < AUC_MIN:
        problems.append(f"test AUC of the undisturbed run, {report['undisturbed']['auc']:.4f}, is below {AUC_MIN}")
    if len(report["kills"]) < report["kills_wanted"]:
        problems.append(f"{len(report['kills'])} leaders were killed, not {report['kills_wanted']}")
    if audit["lost_units"]:
        problems.append(f"{audit['lost_units']} units of acknowledged pushes are lost ({audit['lost_rows']} rows)")
    if audit["doubled_units"]:
        problems.append(f"{audit['doubled_units']} units were applied twice ({audit['doubled_rows']} rows)")
    if audit["errors"]:
        problems.append("pushes without a known outcome: " + "; ".join(audit["errors"]))
    if same_bits(report) is False:
        problems.append("the models of both runs differ, though the workers went in step")
    if not report["scrub"]["equal"]:
        problems.append(f"replicas differ in shards {report['scrub']['different']}: {report['scrub']['problem']}")
    return problems


def same_bits(report: dict[str, Any]) -> bool | None:
    """Whether both runs ended with the same model, to the bit; None where that is not to be expected."""
    if report["staleness"] != 0 or report["undisturbed"] is None:
        return None
    return report["with_kills"]["bits"] == report["undisturbed"]["bits"]


def gap_figures(kills: list[dict[str, Any]]) -> dict[str, float | None]:
    """Median and maximum over kills and workers, in milliseconds."""
    gaps = [gap for kill in kills for gap in kill["gaps_ms"].values()]
    if not gaps:
        return {"p50_ms": None, "max_ms": None}
    return {"p50_ms": round(statistics.median(gaps), 1), "max_ms": round(max(gaps), 1)}


def write_json(report: dict[str, Any], path: pathlib.Path) -> None:
    """Everything, machine-readable."""
    path.write_text(json.dumps(report, indent=2) + "\n")


def write_picture(report: dict[str, Any], path: pathlib.Path) -> None:
    """Loss and throughput over time, kills and returns marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(10, 6.5), layout="constrained")
    runs = [("undisturbed", "0.55", report["undisturbed"]), ("with kills", "tab:blue", report["with_kills"])]
    for label, colour, run in runs:
        if run is None:
            continue
        series = run["series"]
        above.plot(series["second"], series["loss"], color=colour, label=f"{label}: test AUC {run['auc']:.4f}")
        below.plot(
            series["second"],
            [rate / 1000 for rate in series["rows_per_s"]],
            color=colour,
            label=f"{label}: mean {run['rows_per_s'] / 1000:.0f} k rows/s",
        )
    for kill in report["kills"]:
        for axis in (above, below):
            axis.axvline(kill["at_s"], color="tab:red", linewidth=1)
            if kill["caught_up_at_s"] is not None:
                axis.axvline(kill["caught_up_at_s"], color="tab:green", linewidth=1, linestyle=":")
        below.annotate(
            f" kill -9 node {kill['node']} ({kill['led']} leaders)\n gap {kill['gap_max_ms']:.0f} ms",
            (kill["at_s"], 0.03),
            xycoords=("data", "axes fraction"),
            fontsize=8,
            color="tab:red",
        )
    lost, doubled = report["audit"]["lost_units"], report["audit"]["doubled_units"]
    figure.suptitle(
        f"MovieLens 100k, {report['workers']} workers, {report['nodes']} servers, {report['shards']} shards: "
        f"{len(report['kills'])} leaders killed, {lost} lost, {doubled} doubled"
    )
    above.set_ylabel("training loss")
    below.set_ylabel("thousand rows/s (pulled + pushed)")
    below.set_xlabel("seconds (red: kill, green: node back and caught up)")
    below.set_ylim(0, below.get_ylim()[1] * 1.25)  # Room for the legend.
    for axis in (above, below):
        axis.grid(alpha=0.25)
        axis.legend(loc="upper right", fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def text(report: dict[str, Any]) -> str:
    """The short report."""
    run, calm, audit, gaps = report["with_kills"], report["undisturbed"], report["audit"], report["gaps"]
    lines = [
        "",
        f"MovieLens 100k on {report['nodes']} servers, {report['shards']} shards, {report['workers']} workers",
        "",
    ]
    rows = [("test AUC", f"{run['auc']:.4f}" + (f"    undisturbed run: {calm['auc']:.4f}" if calm else ""))]
    rate = f"{run['rows_per_s']:,.0f} rows/s, {run['steps_per_s']:.0f} steps/s"
    rows.append(("throughput", rate + (f"    undisturbed run: {calm['rows_per_s']:,.0f} rows/s" if calm else "")))
    nodes = ", ".join(f"node {kill['node']} (led {kill['led']})" for kill in report["kills"])
    rows.append(("leaders killed", f"{len(report['kills'])}    {nodes}"))
    if gaps["p50_ms"] is not None:
        rows.append(("gap seen by workers", f"p50 {gaps['p50_ms']:.0f} ms, max {gaps['max_ms']:.0f} ms"))
    rows.append(("audit pushes", f"{audit['pushes']:,} acknowledged ({audit['rows']:,} rows)"))
    rows.append(("lost", f"{audit['lost_units']}"))
    rows.append(("doubled", f"{audit['doubled_units']}"))
    scrub = report["scrub"]
    same = f"bit-identical in {scrub['shards']} shards" if scrub["equal"] else f"DIFFER in {scrub['different']}"
    rows.append(("replicas", same))
    if (same := same_bits(report)) is not None:
        rows.append(("model", "bit-identical to the undisturbed run" if same else "DIFFERS from the undisturbed run"))
    rows.append(("time", f"{report['seconds']:.0f} s"))
    lines += [f"  {name:<20}  {value}" for name, value in rows]
    problems = verdict(report)
    lines.append("")
    held = "Nothing lost, nothing doubled, replicas equal" + (", the same bits as undisturbed." if same_bits(report) else ".")
    lines += [f"  FAILED: {problem}" for problem in problems] or [f"  {held}"]
    return "\n".join(lines)
