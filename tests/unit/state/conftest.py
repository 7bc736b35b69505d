"""What the state room's tests share: a transfer between two sets of tracked objects."""

from __future__ import annotations

import random
import socket
import threading
from typing import Protocol

import numpy as np
import pytest
import torch
import torch._dynamo  # optimizers import it, which makes a folder for compiled code

from tmover.state.capture import Tracked
from tmover.state.transfer import Received, receive_state, send_state

TIMEOUT_S = 30.0


class HandOver(Protocol):
    """Sends the state of one tracked set to another."""

    def __call__(
        self,
        source: Tracked,
        target: Tracked,
        *,
        step: int = 7,
        record: bytes = b"",
        own: bytes = b"",
    ) -> Received: ...


@pytest.fixture(autouse=True)
def _steady() -> None:
    """One thread, known streams."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.fixture
def hand_over() -> HandOver:
    return over_a_socket


def over_a_socket(
    source: Tracked, target: Tracked, *, step: int = 7, record: bytes = b"", own: bytes = b""
) -> Received:
    left, right = socket.socketpair()
    sent: list[BaseException | None] = []

    def send() -> None:
        try:
            send_state(
                left,
                job="j",
                epoch=3,
                step=step,
                tracked=source,
                record=record,
                own=own,
                peer="joiner",
                timeout_s=TIMEOUT_S,
            )
            sent.append(None)
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            sent.append(error)
        finally:
            left.close()

    sender = threading.Thread(target=send)
    sender.start()
    try:
        received = receive_state(
            right, job="j", epoch=3, tracked=target, peer="source", timeout_s=TIMEOUT_S
        )
    finally:
        right.close()
        sender.join(TIMEOUT_S)
    assert not sender.is_alive()
    assert sent == [None]
    return received
