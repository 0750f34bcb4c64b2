"""Who is suspected when decoded dies, and who is not."""

from __future__ import annotations

import pytest

from prefilld.casualties import MAX_DEATHS, MAX_REMEMBERED, Casualties, poisoned_error


@pytest.fixture
def casualties() -> Casualties:
    return Casualties()


def die(casualties: Casualties, *lent: str) -> None:
    casualties.peer_lost(lent)
    casualties.peer_died()


def test_a_request_that_comes_back_from_two_deaths_is_poisoned(casualties: Casualties) -> None:
    """The first may have been chance."""
    casualties.adopted("r")
    die(casualties)
    assert casualties.came_back("r") == 1
    assert not casualties.is_poisoned("r")
    casualties.adopted("r")
    die(casualties)
    assert casualties.came_back("r") == MAX_DEATHS
    assert casualties.is_poisoned("r")


def test_what_was_lent_twice_to_a_dying_decoded_is_poisoned(casualties: Casualties) -> None:
    """It need not come back: it is here, and would go to the next one."""
    die(casualties, "r", "s")
    assert not casualties.is_poisoned("r")
    die(casualties, "r")
    assert casualties.is_poisoned("r")
    assert not casualties.is_poisoned("s")


def test_lent_and_adopted_count_alike(casualties: Casualties) -> None:
    """A request can kill decoded by its blocks or by its tokens."""
    die(casualties, "r")
    casualties.adopted("r")
    die(casualties)
    assert casualties.came_back("r") == MAX_DEATHS


def test_an_answer_that_was_whole_is_not_suspected(casualties: Casualties) -> None:
    """Its client does not come back, so a name that is used again starts from nothing."""
    for _ in range(5):
        casualties.begun("probe")
        casualties.adopted("probe")
        die(casualties)
    casualties.begun("probe")
    assert casualties.came_back("probe") == 0


def test_coming_back_twice_from_one_death_counts_once(casualties: Casualties) -> None:
    """Prefilld may have died in between, or refused for want of room."""
    casualties.adopted("r")
    die(casualties)
    assert [casualties.came_back("r"), casualties.came_back("r")] == [1, 1]


def test_a_poisoned_request_stays_so_under_its_id(casualties: Casualties) -> None:
    """A client that asks from the start brings the same prompt."""
    die(casualties, "r")
    die(casualties, "r")
    casualties.begun("r")
    assert casualties.is_poisoned("r")


def test_requests_of_one_id_are_counted_as_one(casualties: Casualties) -> None:
    """Ids are the clients' own, and one death is one death."""
    die(casualties, "r", "r")
    assert not casualties.is_poisoned("r")


def test_a_decoded_that_said_that_it_would_end_is_no_death(casualties: Casualties) -> None:
    """An upgrade ends streams as well, and all of them come back."""
    for _ in range(3):
        casualties.adopted("r")
        casualties.peer_lost(["s"])
        casualties.peer_left()
        assert casualties.came_back("r") == 0
    assert not casualties.is_poisoned("s")


def test_silence_counts_once_it_is_proved_to_be_death(casualties: Casualties) -> None:
    """A request that hangs decoded would otherwise hang every one that its supervisor starts."""
    for _ in range(MAX_DEATHS):
        assert not casualties.is_poisoned("lent")
        casualties.adopted("adopted")
        casualties.peer_lost(["lent"])
        assert casualties.came_back("lent") < MAX_DEATHS
        casualties.peer_died()
        casualties.peer_found()
    assert casualties.is_poisoned("lent")
    assert casualties.came_back("adopted") == 1


def test_a_decoded_that_only_slept_harmed_nobody(casualties: Casualties) -> None:
    """What was lent to it went on; its streams are still with it, and may yet meet its death."""
    casualties.adopted("adopted")
    casualties.peer_lost(["lent"])
    casualties.peer_found()
    die(casualties)
    assert casualties.came_back("lent") == 0
    assert casualties.came_back("adopted") == 1


def test_what_is_remembered_is_bounded(casualties: Casualties) -> None:
    """A daemon that runs for a year forgets the oldest, whoever they were."""
    for number in range(MAX_REMEMBERED + 1):
        casualties.adopted(f"r{number}")
    die(casualties)
    assert casualties.came_back("r0") == 0
    assert casualties.came_back("r1") == 1
    for number in range(MAX_REMEMBERED):
        die(casualties, f"s{number}")
    assert casualties.came_back("r1") == 0


def test_the_client_is_told_what_to_do() -> None:
    """It is not to try again as it is."""
    error = poisoned_error("r")
    assert (error.code, error.retryable) == ("poisoned", False)
    assert "request r" in error.message
    assert "under another id" in error.message
