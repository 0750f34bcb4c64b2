"""`shared.cli.bench_figures`: every figure against one that was worked out by hand."""

from __future__ import annotations

import random
import statistics

import pytest

from protocol.messages import DeviceTimings, HandoffTimings
from shared.cli.bench_figures import Figures, Spread, figures_of
from shared.cli.bench_plan import Slo
from tests.support.heard import failed, heard

NO_SLO = Slo()


def mean_ms(spread: Spread | None) -> float:
    assert spread is not None
    return spread.mean


def test_a_spread_is_that_of_its_values() -> None:
    """0 to 100: each percentile is its own name."""
    values = [float(value) for value in range(101)]
    random.Random(1).shuffle(values)
    spread = Spread.of(values)
    assert spread is not None
    assert (spread.num, spread.mean, spread.max) == (101, 50, 100)
    assert (spread.median, spread.p90, spread.p99) == pytest.approx((50, 90, 99))
    assert spread.std == pytest.approx(statistics.pstdev(values))


def test_percentiles_lie_between_their_neighbours() -> None:
    """Of 10 and 20 the 90th is nine tenths of the way: nothing jumps where values are few."""
    spread = Spread.of([20.0, 10.0])
    assert spread is not None
    assert (spread.median, spread.p90, spread.p99) == pytest.approx((15, 19, 19.9))


def test_nothing_observed_has_no_spread() -> None:
    assert Spread.of([]) is None


def test_one_answer_is_told_by_its_moments() -> None:
    """Sent at 100, tokens at 150, 160, 164, 168, 174; the first known to prefilld at 149.5."""
    figures = figures_of(
        [heard([150, 160, 164, 168, 174], due_ms=100, known_ms=149.5, cached_tokens=4)], NO_SLO
    )
    assert mean_ms(figures.ttft) == 50
    assert mean_ms(figures.gap) == 10
    assert figures.itl is not None
    assert (figures.itl.num, figures.itl.median, figures.itl.max) == (3, 4, 6)
    assert mean_ms(figures.tpot) == 24 / 4
    assert mean_ms(figures.e2el) == 74
    assert mean_ms(figures.handover) == 160 - 149.5 - 4
    assert figures.duration_s == 0.074
    assert (figures.num_completed, figures.num_failed, figures.num_cut) == (1, 0, 0)
    assert (figures.input_tokens, figures.cached_tokens, figures.output_tokens) == (10, 4, 5)
    assert figures.a_second(figures.output_tokens) == pytest.approx(5 / 0.074)


def test_waits_count_from_when_a_request_was_due() -> None:
    """A client that was late, or had no free connection, would hide the wait it causes."""
    figures = figures_of([heard([150, 160], due_ms=100, sent_ms=130)], NO_SLO)
    assert mean_ms(figures.ttft) == 50
    assert mean_ms(figures.e2el) == 60
    assert mean_ms(figures.send_lag) == 30


def test_gaps_beside_a_prompt_are_told_apart() -> None:
    """The second prompt is computed from 200 to 230; the first's tokens come all the time."""
    stream = heard([100, 110, 190, 205, 228, 231, 240], known_ms=100, prefill_ms=50)
    other = heard([230, 260], due_ms=195, known_ms=230, prefill_ms=30)
    figures = figures_of([stream, other], NO_SLO)
    assert figures.itl_beside_prompts is not None
    assert figures.itl_alone is not None
    beside, alone = (15, 23, 3), (80, 9)
    assert figures.itl_beside_prompts.num == len(beside)
    assert figures.itl_beside_prompts.mean == pytest.approx(statistics.mean(beside))
    assert figures.itl_alone.num == len(alone)
    assert figures.itl_alone.mean == pytest.approx(statistics.mean(alone))
    assert figures.itl is not None
    assert figures.itl.num == 5


def test_prompts_computed_at_once_are_one_time_of_computing() -> None:
    """Two that overlap, the longer first, and one inside; what lies between is beside none."""
    stream = heard([10, 20, 30, 40, 50, 60, 70], known_ms=10)
    prompts = [
        heard([35, 36], known_ms=35, prefill_ms=13),  # from 22
        heard([33, 34], known_ms=33, prefill_ms=5),  # from 28
        heard([62, 63], known_ms=62, prefill_ms=1),  # from 61
    ]
    figures = figures_of([stream, *prompts], NO_SLO)
    assert figures.itl_beside_prompts is not None
    assert figures.itl_alone is not None
    assert (figures.itl_beside_prompts.num, figures.itl_alone.num) == (3, 2)


def test_tokens_of_one_frame_arrive_once() -> None:
    """A half character's token leaves with the next one: its gap was not seen by anybody."""
    figures = figures_of([heard([100, 100, 110, 110, 130])], NO_SLO)
    assert figures.gap is None
    assert figures.handover is None
    assert figures.itl is not None
    assert (figures.itl.num, figures.itl.mean) == (2, 15)
    assert mean_ms(figures.tpot) == 30 / 4
    assert figures.output_tokens == 5


def test_a_resumed_answer_tells_no_hand_over() -> None:
    """Its END is of the last connection, whose first token was not this client's first."""
    resumed = heard([100, 110, 900, 904], known_ms=890)
    resumed.num_resumptions = 1
    figures = figures_of([resumed], NO_SLO)
    assert figures.handover is None
    assert figures.num_resumptions == 1
    assert mean_ms(figures.gap) == 10


def test_an_answer_of_one_token_has_no_gap() -> None:
    figures = figures_of([heard([100])], NO_SLO)
    assert mean_ms(figures.ttft) == mean_ms(figures.e2el) == 100
    assert figures.gap is figures.itl is figures.tpot is figures.handover is None


def test_failures_are_counted_by_code_and_left_out_of_the_rest() -> None:
    all_heard = [failed("busy"), heard([100, 110]), failed("too-large"), failed("busy")]
    figures = figures_of(all_heard, NO_SLO)
    assert figures.failures == {"busy": 2, "too-large": 1}
    assert (figures.num_failed, figures.num_completed) == (3, 1)
    assert figures.ttft is not None
    assert figures.ttft.num == 1


def test_what_was_cut_tells_its_tokens_and_no_length() -> None:
    """Only short answers are whole when time is up; their lengths alone would be a lie."""
    figures = figures_of([heard([100, 110, 130], is_cut=True), heard([100, 120])], NO_SLO)
    assert (figures.num_completed, figures.num_cut) == (1, 1)
    assert figures.gap is not None
    assert (figures.gap.num, figures.gap.mean) == (2, 15)
    assert figures.output_tokens == 5
    assert figures.e2el is not None
    assert figures.e2el.num == 1
    assert figures.input_tokens == 10


def test_a_cut_request_without_a_token_tells_nothing() -> None:
    figures = figures_of([heard([], is_cut=True)], NO_SLO)
    assert figures.num_cut == 1
    assert figures.ttft is None
    assert figures.duration_s == 0
    assert figures.a_second(5) is None


def test_requests_at_once_are_those_between_sending_and_last_token() -> None:
    """One that is sent as another ends is not beside it."""
    asked = [heard([5, 10]), heard([12, 20], due_ms=10), heard([8, 15], due_ms=2)]
    assert figures_of(asked, NO_SLO).max_concurrent_requests == 2


@pytest.mark.parametrize(
    ("slo", "num_good"),
    [
        (Slo(ttft_ms=100), 2),
        (Slo(ttft_ms=99), 1),
        (Slo(itl_ms=30), 2),
        (Slo(itl_ms=29), 1),
        (Slo(ttft_ms=99, itl_ms=29), 0),
        (Slo(), None),
    ],
)
def test_good_answers_keep_to_every_limit(slo: Slo, num_good: int | None) -> None:
    """Between two tokens means any two, the first two also."""
    answers = [heard([100, 110, 120]), heard([90, 120, 130]), failed("busy")]
    assert figures_of(answers, slo).num_good == num_good


def test_stages_are_those_that_the_daemons_told() -> None:
    """An answer that its first token ended was not handed over."""
    stages = HandoffTimings(ready=0.1, adopted=0.3, copy_start=0.0, copy_done=0.5, first_step=4.0)
    answers = [heard([100, 110], prefill_ms=20, handoff=stages), heard([100], prefill_ms=40)]
    found = figures_of(answers, NO_SLO).stages
    assert list(found) == [
        "queue", "prefill", "ready", "adopted", "copy_start", "copy_done", "first_step",
    ]  # fmt: skip
    assert (found["prefill"].num, found["prefill"].mean) == (2, 30)
    assert (found["first_step"].num, found["first_step"].mean) == (1, 4)


def test_what_gpus_took_is_of_those_that_had_a_part() -> None:
    """Under direct access nothing is pulled, and on a CPU there is no GPU."""
    pulled = DeviceTimings(prefill=20.0, pull=3.0, last_pull=1.0, first_step=4.0)
    direct = DeviceTimings(prefill=30.0, first_step=5.0)
    answers = [heard([100, 110], device=pulled), heard([100, 110], device=direct), heard([100])]
    found = figures_of(answers, NO_SLO).device
    assert list(found) == ["prefill", "pull", "last_pull", "first_step"]
    assert [(each.num, each.mean) for each in found.values()] == [(2, 25), (1, 3), (1, 1), (2, 4.5)]


def test_no_request_at_all_is_no_division_by_zero() -> None:
    figures: Figures = figures_of([], Slo(ttft_ms=1))
    assert figures.num_good == 0
    assert figures.stages == figures.device == {}
    assert figures.a_second(0) is None
