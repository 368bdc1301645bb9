"""Results as Markdown tables. No number is typed by hand: all come from results.json."""

from typing import Any

from benchmarks.peers.tabular_fit import FITS

Result = dict[str, Any]


def all_tables(results: Result) -> str:
    """Every table of what was run, under headings."""
    parts = [machine_line(results)]
    if "imports" in results:
        parts += ["## Import", imports(results["imports"])]
    if "fits" in results:
        parts += ["## Default fits", fits(results["fits"])]
    if "overhead" in results:
        parts += ["## Overhead", overhead(results["overhead"])]
    if results.get("residual"):
        parts += ["## Residual networks", residual(results["residual"])]
    if "pairs" in results:
        parts += ["## Pairs", pairs(results["pairs"])]
    if "peers" in results:
        parts += ["## Peers", peers(results["peers"]), scores(results["peers"]), left_out(results["peers"])]
    if "growth" in results:
        parts += ["## Growth", growth(results["growth"])]
    parts += ["## Targets", targets(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def machine_line(results: Result) -> str:
    """Where the numbers come from."""
    machine = results["machine"]
    device = f"{machine['processor']}, {machine['cores']} cores"
    if machine["accelerator"]:
        device = f"{machine['accelerator']} ({device})"
    peers = ", ".join(f"{name} {version}" for name, version in machine["peers"].items())
    sizes = " Tiny sizes: these numbers say nothing." if results["quick"] else ""
    return (
        f"*{device}, {machine['system']}; measureflow {machine['measureflow']} (commit {machine['commit']}), "
        f"JAX {machine['jax']}, Python {machine['python']}; {peers}. The whole run took "
        f"{results['seconds']:.0f} s.{sizes}*"
    )


def imports(cases: list[Result]) -> str:
    """Seconds of each, and in brackets how many times the first."""
    return "\n\n".join(_overhead_group(next(iter(case["times"])), [case], "in") for case in cases)


def fits(cases: list[Result]) -> str:
    """Seconds of each process, and the test NLL where it was computed."""
    rows = [
        {
            "default fit": case["title"],
            "process": name,
            "seconds": duration(found["median"]),
            "test NLL": f"{case['nll'][name]:.3f}" if "nll" in case else "",
        }
        for case in cases
        for name, found in case["times"].items()
    ]
    return "\n\n".join(part for part in (table(rows), left_out(cases)) if part)


def overhead(cases: list[Result]) -> str:
    """Time of a step, and in brackets how many times the baseline, which is the first column."""
    groups: dict[str, list[Result]] = {}
    for case in cases:
        groups.setdefault(next(iter(case["times"])), []).append(case)
    return "\n\n".join(_overhead_group(baseline, group) for baseline, group in groups.items())


def _overhead_group(baseline: str, cases: list[Result], of: str = "one step") -> str:
    names = list(dict.fromkeys(name for case in cases for name in case["times"]))
    rows = []
    for case in cases:
        over = {ratio["of"]: ratio["ratio"] for ratio in case["ratios"] if ratio["over"] == baseline}
        row = {of: case["title"]}
        for name in names:
            found = case["times"].get(name)
            times = f" ({over[name]:.2f})" if name in over else ""
            row[name] = "" if found is None else f"{duration(found['median'])}{times}"
        rows.append(row)
    return table(rows)


def residual(cases: list[Result]) -> str:
    """Time of a step, multiples of the baseline, and memory for each particle."""
    rows = []
    for case in cases:
        over = {ratio["of"]: ratio for ratio in case["ratios"]}
        for name, found in case["times"].items():
            rows.append(
                {case["title"]: name}
                | {"one step": duration(found["median"])}
                | {"times the first": with_quartiles(over[name]) if name in over else ""}
                | {"memory a particle": size_in_memory(case["bytes"][name] / case["particles"])}
            )
    return table(rows)


def pairs(cases: list[Result]) -> str:
    """Pairs a second, what share of the limit that is, and what memory it takes."""
    rows = []
    for case in cases:
        rate, limit, (ratio,) = case["pairs_per_second"], case["limit"], case["ratios"]
        rows.append(
            {"all pairs of": case["title"]}
            | {f"{name}": duration(found["median"]) for name, found in case["times"].items()}
            | {"times faster": with_quartiles(ratio)}
            | {"pairs a second": f"{rate:.2e}"}
            | ({"limit": f"{limit:.2e}", "share of it": f"{rate / limit:.0%}"} if limit else {})
            | {"temporary memory": size_in_memory(case["temporary_bytes"])}
        )
    return table(rows)


def peers(cases: list[Result]) -> str:
    """How many times faster, with the quartiles over rounds."""
    rows = [
        {
            "comparison": case["title"],
            "peer": f"{ratio['of']}: {duration(case['times'][ratio['of']]['median'])}",
            "measureflow": f"{ratio['over']}: {duration(case['times'][ratio['over']]['median'])}",
            "times faster": with_quartiles(ratio),
        }
        for case in cases
        for ratio in case["ratios"]
    ]
    return table(rows) if rows else ""


def scores(cases: list[Result]) -> str:
    """Of whole fits, the time and how good they are."""
    parts = []
    for case in cases:
        if case.get("nll"):
            rows = [
                {"whole fit": name}
                | {fit: duration(case["times"][f"{name}, {fit}"]["median"]) for fit in FITS}
                | {"test NLL": f"{nll:.3f}"}
                for name, nll in case["nll"].items()
            ]
            parts.append(table(rows))
    return "\n\n".join(parts)


def left_out(cases: list[Result]) -> str:
    """Peers that could not be had, each with its word."""
    found = {name: why for case in cases for name, why in case["left_out"].items()}
    return "\n".join(f"- Left out: {name}. {why}" for name, why in found.items())


def disagreement(cases: list[Result]) -> float | None:
    """The largest difference between a peer's drift or sum and the target's, over the largest entry."""
    found = [apart for case in cases for apart in case.get("apart", {}).values()]
    return max(found) if found else None


def growth(axes: list[Result]) -> str:
    """Each axis: what was measured at each size, and the exponent."""
    shown = {"seconds": duration, "bytes": size_in_memory, "ratio": "{:.4f}".format}
    rows = [
        {
            "along": axis["title"],
            "measured": ", ".join(
                f"{size:,}: {shown[axis['unit']](value)}"
                for size, value in zip(axis["sizes"], axis["values"], strict=True)
            ),
            "exponent": f"{axis['exponent']:.2f}",
            "in theory": f"{axis['expected']:g}",
        }
        for axis in axes
    ]
    return table(rows)


def targets(results: Result) -> str:
    """Every ratio that something was promised of."""
    rows = [
        {
            "ratio of times": f"{ratio['of']} / {ratio['over']}",
            "of": case["title"],
            "measured": with_quartiles(ratio),
            "target": promised(ratio),
            "holds": "yes" if ratio["holds"] else "**no**",
        }
        for part in ("imports", "fits", "overhead", "residual", "peers")
        for case in results.get(part, [])
        for ratio in case["ratios"]
        if ratio["holds"] is not None
    ]
    return table(rows) if rows else ""


def promised(ratio: Result) -> str:
    """A target in words."""
    return (
        f"at most {ratio['at_most']:g}" if ratio["at_most"] is not None else f"at least {ratio['at_least']:g}"
    )


def with_quartiles(ratio: Result) -> str:
    """A ratio as 1.23 (1.20–1.27)."""
    digits = 2 if ratio["ratio"] < 20 else 0
    return f"{ratio['ratio']:,.{digits}f} ({ratio['low']:,.{digits}f}–{ratio['high']:,.{digits}f})"


def duration(seconds: float) -> str:
    """Three digits, in a unit that suits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds / 1e-6)} µs"


def size_in_memory(size: float) -> str:
    """Three digits, in a unit that suits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{_three_digits(size / scale)} {unit}"
    return f"{size:.0f} B"


def _three_digits(value: float) -> str:
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def table(rows: list[dict[str, str]]) -> str:
    """Markdown; all rows have the columns of the first."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
