"""`shared.cli.restarts`: patience with a daemon that dies, and its end."""

from __future__ import annotations

from shared.cli.restarts import DEATH_WINDOW_S, MAX_DEATHS, RestartPolicy


def test_the_delay_doubles_until_the_fifth_death_in_a_minute() -> None:
    policy = RestartPolicy()
    delays = [policy.died(now_s=now_s, started_s=now_s) for now_s in range(MAX_DEATHS)]
    assert delays == [0.2, 0.4, 0.8, 1.6, None]


def test_deaths_far_apart_are_never_too_many_but_the_delay_has_a_ceiling() -> None:
    """A daemon that dies every twenty seconds still answers most of the time."""
    policy = RestartPolicy()
    delays = [policy.died(now_s=20.0 * n, started_s=20.0 * n - 19) for n in range(100)]
    assert delays[:7] == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert set(delays[7:]) == {5.0}


def test_a_daemon_that_ran_for_the_whole_window_is_well_again() -> None:
    policy = RestartPolicy()
    assert policy.died(now_s=0.0, started_s=0.0) == 0.2
    assert policy.died(now_s=0.5, started_s=0.2) == 0.4
    assert policy.died(now_s=1.0 + DEATH_WINDOW_S, started_s=1.0) == 0.2
