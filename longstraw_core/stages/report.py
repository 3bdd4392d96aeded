"""Reports for people: one self-contained HTML file per `train` and `validate_run`, one Markdown table per stage.

The same input gives the same bytes. Everything that came from a response, a file or a name is escaped. It renders
what it is given and must not read artifacts or compute anything that a receipt should carry.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import TYPE_CHECKING, Any, cast

from longstraw_core.spec import Score
from longstraw_core.spec.receipts import Phase

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN_CHARACTERS = 4000
"""Longest part of a response that is shown; its end holds the answer, so the end is kept."""
INK = "#1f4e79"
ACCENT = "#c1440e"
GRADIENT_MODE_NOTES = {
    "stopgrad": "prompt state treated as a constant: not equal to conventional GRPO",
    "exact": "full gradient, through the prompt state as well",
    "response_adapter": "adapter active from the last prompt token on; exact for such a model",
}


@dataclass(frozen=True, kw_only=True)
class HistoryPoint:
    """One transaction on the curves over time; None leaves a curve without a point."""

    transaction: int
    reward: float
    reward_std: float = 0.0
    mean_length: float | None = None
    clipped_ratio: float | None = None
    loss: float | None = None
    gradient_norm: float | None = None
    kl: float | None = None
    stepped: bool = True
    """False when no group carried a signal and the adapter stayed as it was; drawn as a hollow point."""


@dataclass(frozen=True, kw_only=True)
class SampleResponse:
    """One response with everything that decided its reward."""

    prompt_id: str
    score: Score
    advantage: float
    tokens: int
    text: str
    ground_truth: str
    finish_reason: str


@dataclass(frozen=True, kw_only=True)
class TrainReport:
    """What the report of one transaction's training shows."""

    run: str
    transaction: int
    gradient: str
    status: str
    facts: tuple[tuple[str, str], ...] = ()
    """Further rows of the header table: adapter digest, seed, model."""
    history: tuple[HistoryPoint, ...] = ()
    response_lengths: tuple[int, ...] = ()
    logprob_differences: tuple[float, ...] = ()
    """Per token: trainer's old log-probability minus the sampler's."""
    gradient_norms: tuple[tuple[str, float], ...] = ()
    """Per group of parameters."""
    phases: tuple[Phase, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    samples: tuple[SampleResponse, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """One finished stage."""

    stage: str
    transaction: int
    seconds: float
    peak_memory_bytes: int
    receipt_digest: str
    status: str


@dataclass(frozen=True, kw_only=True)
class EvidenceRow:
    """One level of evidence and whether this run's receipts prove it."""

    level: str
    proven: bool
    because: str


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What the report of a validated run shows."""

    run: str
    gradient: str
    status: str
    facts: tuple[tuple[str, str], ...] = ()
    history: tuple[HistoryPoint, ...] = ()
    stages: tuple[StageRow, ...] = ()
    evidence: tuple[EvidenceRow, ...] = ()
    response_lengths: tuple[int, ...] = ()
    logprob_differences: tuple[float, ...] = ()
    phases: tuple[Phase, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    samples: tuple[SampleResponse, ...] = ()


def render_train_report(report: TrainReport) -> bytes:
    """Return the HTML report of one transaction's training."""
    header = [
        ("Run", report.run),
        ("Transaction", str(report.transaction)),
        ("Status", report.status),
        ("Gradient mode", _gradient_row(report.gradient)),
        *report.facts,
    ]
    figures = [
        *_history_figures(report.history),
        _lengths_figure(report.response_lengths),
        _differences_figure(report.logprob_differences),
        _bars_figure("Gradient norm per parameter group", "L2 norm", report.gradient_norms),
        *_phase_figures(report.phases),
    ]
    return _render(
        title=f"{report.run}: transaction {report.transaction}",
        header=header,
        figures=figures,
        stages=(),
        evidence=(),
        metrics=report.metrics,
        samples=report.samples,
    )


def render_run_report(report: RunReport) -> bytes:
    """Return the HTML report of a validated run."""
    header = [
        ("Run", report.run),
        ("Status", report.status),
        ("Gradient mode", _gradient_row(report.gradient)),
        *report.facts,
    ]
    seconds_of: dict[str, float] = {}
    memory_of: dict[str, float] = {}
    for row in report.stages:
        seconds_of[row.stage] = seconds_of.get(row.stage, 0.0) + row.seconds
        memory_of[row.stage] = max(memory_of.get(row.stage, 0.0), float(row.peak_memory_bytes))
    figures = [
        *_history_figures(report.history),
        _lengths_figure(report.response_lengths),
        _differences_figure(report.logprob_differences),
        _bars_figure("Time per stage, this transaction", "seconds", tuple(seconds_of.items())),
        _bars_figure("Peak memory per stage", "MiB", tuple((name, size / 2**20) for name, size in memory_of.items())),
        *_phase_figures(report.phases),
    ]
    return _render(
        title=f"{report.run}: run report",
        header=header,
        figures=figures,
        stages=report.stages,
        evidence=report.evidence,
        metrics=report.metrics,
        samples=report.samples,
    )


def markdown_summary(title: str, rows: Mapping[str, object] | Iterable[tuple[str, object]]) -> str:
    """Return a Markdown title and key-value table in which no value can act as markup."""
    pairs = cast("Iterable[tuple[str, object]]", rows.items() if isinstance(rows, Mapping) else rows)
    lines = [f"# {_markdown_text(title)}", "", "| | |", "|---|---|"]
    lines += [f"| {_markdown_text(key)} | {_markdown_text(_shown(value))} |" for key, value in pairs]
    return "\n".join(lines) + "\n"


def _markdown_text(text: str) -> str:
    escaped = re.sub(r"([\\`*_\[\]|~#])", r"\\\1", " ".join(text.split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _gradient_row(gradient: str) -> str:
    note = GRADIENT_MODE_NOTES.get(gradient)
    return f"{gradient} ({note})" if note else gradient


@dataclass(frozen=True)
class _Figure:
    """A drawn figure, or the reason why there is nothing to draw."""

    title: str
    svg: str
    note: str = ""


@dataclass(frozen=True)
class _ShownSample:
    sample: SampleResponse
    text: str
    omitted: int


def _render(
    *,
    title: str,
    header: Sequence[tuple[str, str]],
    figures: Sequence[_Figure],
    stages: Sequence[StageRow],
    evidence: Sequence[EvidenceRow],
    metrics: Mapping[str, float],
    samples: Sequence[SampleResponse],
) -> bytes:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("longstraw_core.stages", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    page = environment.get_template("report.html.j2").render(
        title=title,
        header=header,
        figures=[_with_own_ids(figure, number) for number, figure in enumerate(figures, start=1)],
        stages=stages,
        evidence=evidence,
        metrics=[(name, _shown(metrics[name])) for name in sorted(metrics)],
        samples=[_shortened(sample) for sample in samples],
        mebibyte=2**20,
    )
    # A response may hold half a surrogate pair or a NUL, which no HTML file can carry.
    return page.replace("\0", "\ufffd").encode("utf-8", errors="replace")


def _with_own_ids(figure: _Figure, number: int) -> _Figure:
    """Prefix the ids inside one SVG, because ids must be unique in the whole page."""
    svg = re.sub(r'( id="|url\(#|xlink:href="#)', rf"\g<1>f{number}-", figure.svg)
    return _Figure(figure.title, svg, figure.note)


def _shortened(sample: SampleResponse) -> _ShownSample:
    omitted = max(len(sample.text) - SHOWN_CHARACTERS, 0)
    return _ShownSample(sample=sample, text=sample.text[omitted:], omitted=omitted)


def _history_figures(history: Sequence[HistoryPoint]) -> list[_Figure]:
    points = sorted(history, key=lambda point: point.transaction)
    rewards = [(point.transaction, point.reward) for point in points]
    spread = [point.reward_std for point in points]
    idle = frozenset(point.transaction for point in points if not point.stepped)
    return [
        _curve_figure("Mean reward per transaction", "reward", rewards, spread=spread, hollow=idle),
        _curve_figure("Mean response length", "tokens", [(p.transaction, p.mean_length) for p in points]),
        _curve_figure("Truncated responses", "share", [(p.transaction, p.clipped_ratio) for p in points]),
        _curve_figure("Gradient norm", "L2 norm", [(p.transaction, p.gradient_norm) for p in points]),
        _curve_figure("Loss", "loss", [(p.transaction, p.loss) for p in points]),
        _curve_figure("KL to the old policy", "KL", [(p.transaction, p.kl) for p in points]),
    ]


def _phase_figures(phases: Sequence[Phase]) -> list[_Figure]:
    memory = tuple((phase.name, phase.peak_memory_bytes / 2**20) for phase in phases)
    return [
        _bars_figure("Time per phase", "seconds", tuple((phase.name, phase.seconds) for phase in phases)),
        _bars_figure("Peak memory per phase", "MiB", memory),
    ]


def _curve_figure(
    title: str,
    unit: str,
    points: Sequence[tuple[int, float | None]],
    *,
    spread: Sequence[float] | None = None,
    hollow: frozenset[int] = frozenset(),
) -> _Figure:
    known = [(x, y, position) for position, (x, y) in enumerate(points) if y is not None and math.isfinite(y)]
    if not known:
        return _Figure(title, "", "nothing was recorded")
    xs = [x for x, _, _ in known]
    ys = [y for _, y, _ in known]

    def draw(axes: "Axes") -> None:
        from matplotlib.ticker import MaxNLocator

        axes.plot(xs, ys, marker="o", color=INK, linewidth=1.5, markersize=4)
        hollow_points = [(x, y) for x, y, _ in known if x in hollow]
        if hollow_points:
            hollow_xs, hollow_ys = zip(*hollow_points, strict=True)
            axes.plot(hollow_xs, hollow_ys, "o", color=INK, markerfacecolor="white", markersize=4)
        if spread is not None:
            deviations = [spread[position] for _, _, position in known]
            low = [y - deviation for y, deviation in zip(ys, deviations, strict=True)]
            high = [y + deviation for y, deviation in zip(ys, deviations, strict=True)]
            axes.fill_between(xs, low, high, color=INK, alpha=0.15, linewidth=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if unit == "share":
            axes.set_ylim(-0.03, 1.03)
        axes.set_xlabel("transaction")
        axes.set_ylabel(unit)

    notes = ["band: mean standard deviation within groups"] if spread is not None else []
    if hollow:
        notes.append("hollow: no optimizer step")
    if len(known) < len(points):
        notes.append(f"{len(points) - len(known)} transactions without a finite value are left out")
    return _Figure(title, _draw(draw), "; ".join(notes))


def _lengths_figure(lengths: Sequence[int]) -> _Figure:
    title = "Response lengths"
    if not lengths:
        return _Figure(title, "", "nothing was recorded")
    note = f"{len(lengths)} responses, {min(lengths)} to {max(lengths)} tokens"
    return _Figure(title, _histogram([float(length) for length in lengths], "tokens", "responses", log=False), note)


def _differences_figure(differences: Sequence[float]) -> _Figure:
    title = "Log-probability: trainer minus sampler"
    finite = [value for value in differences if math.isfinite(value)]
    if not finite:
        return _Figure(title, "", "nothing was recorded" if not differences else "no value is finite")
    note = (
        f"{len(finite)} tokens, mean {math.fsum(finite) / len(finite):.3g}, "
        f"largest absolute difference {max(abs(value) for value in finite):.3g}"
    )
    if len(finite) < len(differences):
        note += f"; {len(differences) - len(finite)} values that are not finite are left out"
    return _Figure(title, _histogram(finite, "difference (nats)", "tokens", log=True), note)


def _bars_figure(title: str, unit: str, bars: Sequence[tuple[str, float]]) -> _Figure:
    finite = [(name, value) for name, value in bars if math.isfinite(value)]
    if not finite:
        return _Figure(title, "", "nothing was recorded")

    def draw(axes: "Axes") -> None:
        places = list(range(len(finite)))
        values = [value for _, value in finite]
        axes.barh(places, values, color=INK, height=0.6)
        axes.set_yticks(places, labels=[_plot_text(name) for name, _ in finite])
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        axes.margins(x=0.18)
        for place, value in zip(places, values, strict=True):
            axes.annotate(
                f"{value:.3g}", (value, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7
            )

    dropped = len(bars) - len(finite)
    note = f"{dropped} values that are not finite are left out" if dropped else ""
    return _Figure(title, _draw(draw, height=max(1.6, 0.3 * len(finite) + 0.8)), note)


def _histogram(values: Sequence[float], unit: str, count_of: str, *, log: bool) -> str:
    low, high = min(values), max(values)
    largest = max(abs(low), abs(high))
    if high - low <= 1e-9 * max(largest, 1.0):
        margin = max(0.5, 0.01 * largest)
        low, high = low - margin, high + margin

    def draw(axes: "Axes") -> None:
        from matplotlib.ticker import MaxNLocator

        axes.hist(values, bins=min(40, 5 + math.isqrt(len(values))), range=(low, high), color=INK)
        if log:
            axes.set_yscale("log")
            axes.axvline(0.0, color=ACCENT, linewidth=1)
        else:
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel(unit)
        axes.set_ylabel(count_of)

    return _draw(draw)


def _plot_text(text: str) -> str:
    """Return a name as matplotlib may draw it: no mathtext, no control characters, not longer than 48."""
    printable = "".join(character if character.isprintable() else "?" for character in text)
    short = printable if len(printable) <= 48 else printable[:47] + "…"
    return short.replace("$", r"\$")


def _draw(paint: "Callable[[Axes], None]", *, height: float = 2.6) -> str:
    """Draw one figure and return its `<svg>` element, without date, version or external references."""
    from matplotlib import rc_context, rcdefaults, rcParams
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        "svg.hashsalt": "longstraw",
        "svg.fonttype": "none",  # text stays text: smaller, searchable, and drawn in the reader's own font
        "font.family": ["sans-serif"],
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.25,
    }
    with rc_context():
        rcdefaults()  # a personal matplotlibrc must not change the bytes
        rcParams.update(settings)
        figure = Figure(figsize=(4.6, height), layout="constrained")
        canvas = FigureCanvasSVG(figure)
        paint(figure.add_subplot())
        output = StringIO()
        canvas.print_svg(output, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    drawn = output.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    return re.sub(r"\s*<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
