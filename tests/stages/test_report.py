"""Reports are one file, the same bytes for the same input, and inert whatever a response contains."""

import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw_core.spec import Score
from longstraw_core.spec.receipts import Phase
from longstraw_core.stages.report import (
    EvidenceRow,
    HistoryPoint,
    RunReport,
    SampleResponse,
    StageRow,
    TrainReport,
    markdown_summary,
    render_run_report,
    render_train_report,
)

HOSTILE = "</pre></details><script>alert('x')</script><img src=https://evil.example/a onerror=alert(1)>\"'&{{ 7*7 }}"
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Parses a page, insists on balanced tags and collects what it may not contain."""

    def __init__(self, content: bytes) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.feed(content.decode("utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "data", "action", "poster", "srcset"):
                self.links.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def sample(text: str = "so\nAnswer: 42", **changes: Any) -> SampleResponse:
    score = Score(index=0, reward=0.5, correct=True, status="ok", extracted="42", rule="dapo_math:label", penalty=-0.5)
    fields: dict[str, Any] = {
        "prompt_id": "p1",
        "score": score,
        "advantage": 0.75,
        "tokens": 12,
        "text": text,
        "ground_truth": "42",
        "finish_reason": "stop",
    }
    return SampleResponse(**(fields | changes))


HISTORY = tuple(
    HistoryPoint(
        transaction=number,
        reward=-0.5 + 0.2 * number,
        reward_std=0.3,
        mean_length=20.0 + number,
        clipped_ratio=0.1,
        loss=0.01,
        gradient_norm=1.0 / number,
        kl=0.001 if number > 1 else None,
    )
    for number in range(1, 7)
)
PHASES = (
    Phase(name="capture", seconds=3.0, peak_memory_bytes=10**8),
    Phase(name="replay", seconds=6.0, peak_memory_bytes=2 * 10**8),
)
TRAIN = TrainReport(
    run="demo",
    transaction=6,
    gradient="exact",
    status="stepped",
    facts=(("Adapter", "sha256:" + "ab" * 32),),
    history=HISTORY,
    response_lengths=(5, 8, 8, 13),
    logprob_differences=(0.0, 1e-3, -2e-3, math.nan),
    gradient_norms=(("attention", 0.3), ("gdn", 0.4)),
    phases=PHASES,
    metrics={"reward": 0.25, "frac_reward_zero_std": 0.0},
    samples=(sample(),),
)
RUN = RunReport(
    run="demo",
    gradient="stopgrad",
    status="validated",
    history=HISTORY,
    stages=(
        StageRow(
            stage="sample",
            transaction=1,
            seconds=2.0,
            peak_memory_bytes=2**20,
            receipt_digest="sha256:" + "cd" * 32,
            status="ok",
        ),
    ),
    evidence=(
        EvidenceRow(level="execution completes", proven=True, because="nine receipts"),
        EvidenceRow(level="full-gradient parity", proven=False, because="not measured in this run"),
    ),
    samples=(sample(),),
)
BOTH = [render_train_report(TRAIN), render_run_report(RUN)]


@pytest.mark.parametrize("content", BOTH)
def test_the_page_is_one_well_formed_file_that_loads_nothing(content: bytes) -> None:
    page = Page(content)
    assert page.tags.count("svg") >= 6
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert not {"script", "link", "img", "iframe", "object", "embed", "image"} & set(page.tags)
    addresses = set(re.findall(rb"https?://[^\s\"'<>]+", content))
    assert addresses <= {b"http://www.w3.org/2000/svg", b"http://www.w3.org/1999/xlink"}
    clips = set(re.findall(rb"url\(#([^)]+)\)", content))
    assert {clip.decode() for clip in clips} <= set(page.ids)
    assert b"@import" not in content
    assert re.search(rb"\b20\d\d-\d\d-\d\d", content) is None


def test_the_train_report_shows_what_happened() -> None:
    text = Page(BOTH[0]).text
    for expected in (
        "demo: transaction 6",
        "stepped",
        "sha256:" + "ab" * 32,
        "Mean reward per transaction",
        "Response lengths",
        "Log-probability: trainer minus sampler",
        "1 values that are not finite are left out",
        "Gradient norm per parameter group",
        "Peak memory per phase",
        "frac_reward_zero_std",
        "dapo_math:label (ok)",
        "Answer: 42",
    ):
        assert expected in text


def test_the_run_report_shows_stages_and_only_the_proven_levels_as_proven() -> None:
    text = Page(BOTH[1]).text
    assert "sha256:" + "cd" * 32 in text
    assert "nine receipts" in text
    assert b'<td>full-gradient parity</td><td class="no">no</td>' in BOTH[1]
    assert b'<td>execution completes</td><td class="yes">yes</td>' in BOTH[1]
    assert "not equal to conventional GRPO" in text


def test_the_same_input_gives_the_same_bytes_in_another_process_with_another_configuration(tmp_path: Any) -> None:
    (tmp_path / "matplotlibrc").write_text("axes.facecolor: red\nsvg.fonttype: path\n")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_report as t; "
        "sys.stdout.buffer.write(t.render_train_report(t.TRAIN))"
    )
    environment = os.environ | {"MPLCONFIGDIR": str(tmp_path), "MATPLOTLIBRC": str(tmp_path), "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", program, os.path.dirname(__file__)], capture_output=True, check=True, env=environment
    )
    assert done.stdout == BOTH[0] == render_train_report(TRAIN)


def test_hostile_text_stays_text_wherever_it_appears() -> None:
    score = Score(index=0, reward=-1.0, correct=False, status="ok", extracted=HOSTILE, rule=HOSTILE)
    hostile = sample(HOSTILE, score=score, prompt_id=HOSTILE, ground_truth=HOSTILE, finish_reason=HOSTILE)
    train = TrainReport(
        run=HOSTILE,
        transaction=1,
        gradient=HOSTILE,
        status=HOSTILE,
        facts=((HOSTILE, HOSTILE),),
        gradient_norms=((HOSTILE, 1.0), ("$x_{$ -->", 2.0), ("]]>", 1.0)),
        phases=(Phase(name="--><script>alert(2)</script>", seconds=1.0, peak_memory_bytes=1),),
        metrics={HOSTILE: 1.0},
        samples=(hostile,),
    )
    run = RunReport(
        run=HOSTILE,
        gradient="exact",
        status=HOSTILE,
        stages=(
            StageRow(
                stage=HOSTILE,
                transaction=1,
                seconds=1.0,
                peak_memory_bytes=1,
                receipt_digest=HOSTILE,
                status=HOSTILE,
            ),
        ),
        evidence=(EvidenceRow(level=HOSTILE, proven=False, because=HOSTILE),),
        samples=(hostile,),
    )
    for content in (render_train_report(train), render_run_report(run)):
        page = Page(content)
        assert not {"script", "img"} & set(page.tags)
        assert page.handlers == []
        assert all(link.startswith("#") for link in page.links)
        assert HOSTILE in page.text
        assert b"<script" not in content


@settings(deadline=None, max_examples=25)
@given(st.text(alphabet=st.characters(), max_size=200))
def test_any_response_can_be_shown(text: str) -> None:
    page = Page(
        render_train_report(TrainReport(run="r", transaction=1, gradient="exact", status="s", samples=(sample(text),)))
    )
    assert "Ground truth" in page.text


def test_halves_of_surrogate_pairs_and_nul_are_replaced() -> None:
    report = TrainReport(run="r", transaction=1, gradient="exact", status="s", samples=(sample("a\ud800b\0c"),))
    assert "a?b\ufffdc" in Page(render_train_report(report)).text


def test_a_long_response_is_cut_at_its_beginning() -> None:
    report = TrainReport(run="r", transaction=1, gradient="exact", status="s", samples=(sample("x" * 10**6 + "END"),))
    content = render_train_report(report)
    assert len(content) < 20_000
    assert "[996003 characters before this are not shown]" in Page(content).text
    assert b"END</pre>" in content


def test_a_transaction_without_a_step_is_marked() -> None:
    point = HistoryPoint(transaction=7, reward=0.0, stepped=False)
    report = TrainReport(run="r", transaction=7, gradient="exact", status="no_signal", history=(*HISTORY, point))
    assert "hollow: no optimizer step" in Page(render_train_report(report)).text
    assert "hollow" not in Page(BOTH[0]).text


def test_an_empty_report_says_that_nothing_was_recorded() -> None:
    page = Page(render_train_report(TrainReport(run="r", transaction=1, gradient="exact", status="no_signal")))
    assert "svg" not in page.tags
    assert "Mean reward per transaction: nothing was recorded." in page.text
    assert "Log-probability: trainer minus sampler: nothing was recorded." in page.text
    assert "svg" not in Page(render_run_report(RunReport(run="r", gradient="exact", status="ok"))).tags


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, 1e300, -5.0])
def test_one_value_and_values_that_are_not_finite_can_be_drawn(value: float) -> None:
    point = HistoryPoint(transaction=1, reward=value, loss=value, gradient_norm=value, kl=value, mean_length=value)
    report = TrainReport(
        run="r",
        transaction=1,
        gradient="exact",
        status="s",
        history=(point,),
        response_lengths=(0,),
        logprob_differences=(value,),
        gradient_norms=(("all", value),),
        metrics={"loss": value},
    )
    Page(render_train_report(report))


def test_the_markdown_summary_is_a_table_in_which_values_are_inert() -> None:
    summary = markdown_summary("train", {"reward": 0.123456789, "run": "demo", "count": 3})
    assert summary == "# train\n\n| | |\n|---|---|\n| reward | 0.123457 |\n| run | demo |\n| count | 3 |\n"
    hostile = markdown_summary(
        "a\n# b", [("k|v", "x | y\n| z |"), ("html", "<b>&"), ("link", "[a](b) `c` *d* _e_ \\|")]
    )
    lines = hostile.splitlines()
    assert lines[0] == r"# a \# b"
    assert lines[4] == r"| k\|v | x \| y \| z \| |"
    assert lines[5] == "| html | &lt;b&gt;&amp; |"
    assert lines[6] == r"| link | \[a\](b) \`c\` \*d\* \_e\_ \\\| |"
    assert markdown_summary("t", ()) == "# t\n\n| | |\n|---|---|\n"
