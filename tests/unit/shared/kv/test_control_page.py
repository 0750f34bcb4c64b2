"""Tests of shared/kv/control_page.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shared.kv.control_page import ControlPage, ControlPageView
from shared.kv.errors import (
    GenerationError,
    MappingFault,
    PoolClosedError,
    PoolMappingError,
    UnknownSlotError,
)


@pytest.fixture
def page() -> Iterator[ControlPage]:
    page = ControlPage.create(5)
    yield page
    page.close()


@pytest.fixture
def view(page: ControlPage) -> Iterator[ControlPageView]:
    fd = page.export()
    view = ControlPageView.open(fd, 5)
    os.close(fd)
    yield view
    view.close()


def test_a_fresh_page_grants_nothing(page: ControlPage, view: ControlPageView) -> None:
    """No lease has generation 0."""
    assert [view.read(slot) for slot in range(5)] == [0] * 5
    assert view.num_slots == page.num_slots == 5


def test_the_reader_sees_a_generation_at_once_and_only_in_its_slot(
    page: ControlPage, view: ControlPageView
) -> None:
    """Revoking one lease leaves its neighbours alone."""
    page.publish(3, 1)
    page.publish(0, (1 << 64) - 1)
    assert [view.read(slot) for slot in range(5)] == [(1 << 64) - 1, 0, 0, 1, 0]
    assert page.read(3) == 1


@pytest.mark.parametrize("generation", [0, 6, 7])
def test_a_generation_only_grows(page: ControlPage, generation: int) -> None:
    """One that came back would let a reader trust what it read long ago."""
    page.publish(2, 7)
    with pytest.raises(GenerationError, match=f"slot 2 is at generation 7; .* to {generation}"):
        page.publish(2, generation)
    assert page.read(2) == 7


@pytest.mark.parametrize("slot", [-1, 5, 1 << 40])
def test_a_slot_off_the_page_is_named(page: ControlPage, view: ControlPageView, slot: int) -> None:
    """A negative slot must not count from the end; a large one comes from a broken peer."""
    with pytest.raises(UnknownSlotError, match=f"slot {slot} is not on a control page of 5"):
        view.read(slot)
    with pytest.raises(UnknownSlotError, match=f"slot {slot} is not on a control page of 5"):
        page.publish(slot, 1)


def test_a_first_token_is_its_leases_alone(page: ControlPage, view: ControlPageView) -> None:
    """What was told for an earlier lease of the slot must not begin a later one's answer."""
    page.publish(2, 7)
    assert view.first_token(2, 7) is None
    page.tell_first_token(2, 7, 0)
    assert (view.first_token(2, 7), view.first_token(2, 9), view.first_token(3, 7)) == (
        0,
        None,
        None,
    )
    page.publish(2, 9)
    page.tell_first_token(2, 9, 128_255)
    assert (view.read(2), view.first_token(2, 9)) == (9, 128_255)
    page.tell_first_token(2, 7, 5)  # late: the lease was taken back meanwhile
    assert (view.read(2), view.first_token(2, 9)) == (9, None)
    with pytest.raises(UnknownSlotError, match="slot 5 is not on a control page of 5"):
        page.tell_first_token(5, 1, 1)
    with pytest.raises(UnknownSlotError, match="slot -1 is not on a control page of 5"):
        view.first_token(-1, 1)


def test_generations_are_told_apart_beyond_four_bytes(
    page: ControlPage, view: ControlPageView
) -> None:
    """Half of a generation stands beside the token, and it is the half that changes."""
    page.publish(0, (1 << 40) + 5)
    page.tell_first_token(0, (1 << 40) + 5, 11)
    assert view.first_token(0, (1 << 40) + 5) == 11
    assert view.first_token(0, (1 << 40) + 7) is None


def test_a_view_of_another_length_is_refused(page: ControlPage) -> None:
    """Both sides must mean the same slot by the same number."""
    fd = page.export()
    with pytest.raises(PoolMappingError, match="the control page has 80 bytes") as caught:
        ControlPageView.open(fd, 6)
    os.close(fd)
    assert caught.value.fault is MappingFault.SIZE


def test_a_closed_page_refuses_everything_but_another_close(
    page: ControlPage, view: ControlPageView
) -> None:
    """Use after close is an error with a name, not a crash."""
    page.publish(1, 4)
    page.close()
    page.close()
    with pytest.raises(PoolClosedError, match="the control page is closed"):
        page.publish(1, 5)
    with pytest.raises(PoolClosedError, match="the control page is closed"):
        page.export()
    assert view.read(1) == 4
    view.close()
    view.close()
    with pytest.raises(PoolClosedError, match="the control page is closed"):
        view.read(1)


CHILD = """
import os, sys
from shared.kv.control_page import ControlPageView
fd = int(sys.argv[1])
view = ControlPageView.open(fd, 5)
os.close(fd)
print(view.read(4), flush=True)
while (generation := view.read(4)) < 8:
    pass
print(generation)
"""


def test_another_process_sees_a_revocation(page: ControlPage) -> None:
    """This is the fence between the daemons, so it is tried across a process's border."""
    fd = page.export()
    page.publish(4, 7)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(fd)], pass_fds=[fd], stdout=subprocess.PIPE, text=True
    )
    os.close(fd)
    with child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "7\n"
            page.publish(4, 8)
            rest, _ = child.communicate(timeout=30)
        except BaseException:
            child.kill()  # it would read on for ever
            raise
    assert rest == "8\n"
    assert child.returncode == 0


def test_pages_do_not_need_torch() -> None:
    """The loop's side of a daemon reads the page before the engine is loaded."""
    code = "import sys, shared.kv.control_page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
