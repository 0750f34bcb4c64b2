"""The queue of descriptors: each goes to its frame, or is closed."""

from __future__ import annotations

import os
import socket
from array import array
from collections.abc import Iterator

import pytest

from protocol.descriptors import DescriptorQueue, received_rights, rights
from tests.support.descriptors import num_descriptors


@pytest.fixture(autouse=True)
def no_descriptor_leaks() -> Iterator[None]:
    before = num_descriptors()
    yield
    assert num_descriptors() == before


def new_fds(count: int) -> list[int]:
    return [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]


def close(fds: list[int] | None) -> None:
    for fd in fds or []:
        os.close(fd)


def test_a_batch_belongs_to_the_frame_with_the_reads_last_byte() -> None:
    """Of three frames in one read the last one brought the descriptor."""
    queue = DescriptorQueue()
    (fd,) = new_fds(1)
    queue.add([fd], is_cut=False, last_byte=29)
    assert queue.take(frame_end=10, num_wanted=1) is None
    assert queue.take(frame_end=20, num_wanted=0) == []
    assert queue.take(frame_end=30, num_wanted=1) == [fd]
    close([fd])


def test_a_frame_of_many_reads_keeps_its_descriptor() -> None:
    """It came with the first bytes and waits for the last."""
    queue = DescriptorQueue()
    (fd,) = new_fds(1)
    queue.add([fd], is_cut=False, last_byte=9)
    queue.add([], is_cut=False, last_byte=19)
    assert queue.take(frame_end=100, num_wanted=1) == [fd]
    close([fd])


@pytest.mark.parametrize(("num_sent", "num_wanted"), [(1, 0), (3, 1), (5, 2)])
def test_surplus_is_closed(num_sent: int, num_wanted: int) -> None:
    """What a frame does not carry by its schema is nobody's."""
    queue = DescriptorQueue()
    fds = new_fds(num_sent)
    queue.add(fds, is_cut=False, last_byte=0)
    assert queue.take(frame_end=1, num_wanted=num_wanted) == fds[:num_wanted]
    close(fds[:num_wanted])


@pytest.mark.parametrize(("num_sent", "is_cut"), [(0, True), (1, True), (1, False), (2, True)])
def test_incomplete_is_lost_as_a_whole(num_sent: int, is_cut: bool) -> None:
    """Half a pool is none; a cut batch cannot say which half it is."""
    queue = DescriptorQueue()
    queue.add(new_fds(num_sent), is_cut=is_cut, last_byte=0)
    assert queue.take(frame_end=1, num_wanted=2) is None


def test_closing_closes_what_no_frame_claimed() -> None:
    """The link ended in mid-frame."""
    queue = DescriptorQueue()
    queue.add(new_fds(2), is_cut=False, last_byte=0)
    queue.close()
    queue.close()


def test_rights_round_trip_and_other_messages_are_ignored() -> None:
    """Only SCM_RIGHTS carries descriptors, and a torn trailing integer is no descriptor."""
    assert rights([]) == []
    ((level, kind, fds),) = rights([7, 9])
    assert received_rights([(level, kind, fds.tobytes() + b"\x01")]) == [7, 9]
    assert received_rights([(level, kind + 1, array("i", [3]).tobytes())]) == []
    assert received_rights([(socket.IPPROTO_IP, kind, array("i", [3]).tobytes())]) == []
